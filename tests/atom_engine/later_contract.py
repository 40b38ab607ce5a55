"""Copies a checkout of ATOM and gives the copy the connector's contract since ATOM's #2167:

    python -m tests.atom_engine.later_contract CHECKOUT COPY
    ATOM_DIR=COPY python -m pytest tests/atom_engine

The scheduler's base class demands source_blocks_released() and send_finished(). The scheduler calls the first wherever
it has freed a sequence's blocks, and does not call request_finished() a second time. Nothing else changes, so this is
no later ATOM: it shows that the connector meets the later contract with ATOM's own scheduler.
"""

import re
import shutil
import sys
from pathlib import Path

BASE = Path("atom/kv_transfer/disaggregation/base.py")
SCHEDULER = Path("atom/model_engine/scheduler.py")
DECLARED = """
    @abstractmethod
    def source_blocks_released(self, seq: Any) -> None: ...

    @abstractmethod
    def send_finished(self, req_id: Any) -> None: ...
"""
AGAIN = """
        callback = getattr(self.kv_connector, "request_finished", None)
        if callable(callback):
            callback(seq)
        self.deferred_free_blocks.pop(seq.id, None)
"""
FREED = re.compile(r"^( +)self\.block_manager\.deallocate\((\w+)\)\n", re.M)
TOLD = r"\g<0>\1if self.kv_connector is not None:\n\1    self.kv_connector.source_blocks_released(\2)\n"


def declared(text: str) -> str:
    """The module of the base classes, with the two methods in the scheduler's."""
    kind = re.search(r"^class KVConnectorSchedulerBase\(ABC\):\n(?:(?:    .*)?\n)+", text, re.M)
    if kind is None:
        raise ValueError(f"no KVConnectorSchedulerBase(ABC) in {BASE}")
    return text[: kind.end()].rstrip("\n") + "\n" + DECLARED + "\n\n" + text[kind.end() :]


def told(text: str) -> str:
    """The scheduler's module, in the later order of calls."""
    if text.count(AGAIN) != 1:
        raise ValueError(f"{SCHEDULER} does not call request_finished() a second time where it did at ffdf3bb")
    text = text.replace(AGAIN, "\n        self.deferred_free_blocks.pop(seq.id, None)\n")
    text, places = FREED.subn(TOLD, text)
    if not places:
        raise ValueError(f"{SCHEDULER} frees no blocks of a sequence")
    return text


def main() -> int:
    source, copy = map(Path, sys.argv[1:])
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
    for path, change in ((BASE, declared), (SCHEDULER, told)):
        (copy / path).write_text(change((copy / path).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
