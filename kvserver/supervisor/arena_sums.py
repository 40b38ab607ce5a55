"""Sums of the arena's bytes, taken when a server stops and compared when the next one starts.

`python -m kvserver.supervisor.arena_sums INHERITANCE` is a child of the supervisor, which never looks at cached bytes
itself. It runs when no brain and no mover does. If it ends early, the remaining slots stay as they are. Slots without a
sum are believed by the next start; slots with a sum that was not compared are dropped (csrc/arena/arena_sums.h).
"""

import logging
import os
import sys
import time
from typing import Never

import msgspec

from kvserver import logs
from kvserver.ipc.inheritance import Inheritance, die_with_parent
from kvserver.transfer.native import Ledger, Summed

THREADS_MAX = 16
"""One thread per processor up to this, since nothing else of ours runs. More threads would wait for memory."""


def threads() -> int:
    return min(len(os.sched_getaffinity(0)), THREADS_MAX)


def run(inherited: Inheritance) -> None:
    config = inherited.config
    ledger = Ledger(inherited.ledger, config.ledger_span_bytes)
    compare = inherited.sums == "compare"
    began = time.monotonic()
    work = ledger.compare_sums if compare else ledger.put_sums
    summed = Summed._make(work(inherited.arena, config.arena_bytes, threads()))
    logs.event(
        logging.WARNING if summed.damaged else logging.INFO,
        "kept memory compared" if compare else "memory summed",
        ("slots", summed.slots),
        ("bytes", summed.payload_bytes),
        ("damaged", summed.damaged),
        ("took_s", f"{time.monotonic() - began:.2f}"),
    )


def main() -> Never:
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    logs.start(level=inherited.config.log_level, form=inherited.config.log_format, process="sums")
    run(inherited)
    os._exit(0)


if __name__ == "__main__":
    main()
