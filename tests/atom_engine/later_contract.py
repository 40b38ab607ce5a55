"""Copies a checkout of ATOM and gives the copy the connector's contract since ATOM's #2167:

    python -m tests.atom_engine.later_contract CHECKOUT COPY
    ATOM_DIR=COPY python -m pytest tests/atom_engine

The scheduler's base class demands source_blocks_released() and send_finished(). The scheduler calls the first wherever
it has freed a sequence's blocks, and does not call request_finished() a second time. `multi` passes both on. Nothing
else changes, so this is no later ATOM: it shows that the connector meets the later contract with ATOM's own scheduler.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

BASE = Path("atom/kv_transfer/disaggregation/base.py")
MULTI = Path("atom/kv_transfer/disaggregation/multi/multi_connector.py")
SCHEDULER = Path("atom/model_engine/scheduler.py")
DECLARED = """
    @abstractmethod
    def source_blocks_released(self, seq: Any) -> None: ...

    @abstractmethod
    def send_finished(self, req_id: Any) -> None: ...
"""
PASSED_ON = """
    def source_blocks_released(self, seq: Any) -> None:
        for each in self._connectors:
            each.source_blocks_released(seq)

    def send_finished(self, req_id: Any) -> None:
        for each in self._connectors:
            each.send_finished(req_id)
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
    return _within(text, "class KVConnectorSchedulerBase(ABC):", DECLARED)


def passed_on(text: str) -> str:
    """The module of `multi`, whose connectors hear of both."""
    return _within(text, "class MultiConnectorScheduler(KVConnectorSchedulerBase):", PASSED_ON)


def _within(text: str, head: str, methods: str) -> str:
    """Adds methods at the end of a class."""
    kind = re.search(rf"^{re.escape(head)}\n(?:(?:    .*)?\n)+", text, re.M)
    if kind is None:
        raise ValueError(f"no {head}")
    return text[: kind.end()].rstrip("\n") + "\n" + methods + "\n\n" + text[kind.end() :]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("copy", type=Path, help="does not exist yet")
    given = parser.parse_args()
    shutil.copytree(given.checkout, given.copy, ignore=shutil.ignore_patterns(".git"))
    for path, change in ((BASE, declared), (MULTI, passed_on), (SCHEDULER, told)):
        (given.copy / path).write_text(change((given.copy / path).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
