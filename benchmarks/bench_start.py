"""How soon does a server answer? `python benchmarks/bench_start.py [--json] [--smoke] [--arena-bytes N]`

answer_ms: from starting the process to the first answered lookup of another process. ready_at_answer_gib: usable
bytes of the arena at that moment. grown_ms: until the whole arena is usable. Each start is a new server with a new
arena.

sum_ms, compare_ms: time added to a stop and to a start when a full arena is kept: the summing process, from start to
end. sum_gbs, compare_gbs: bytes of the arena / that time, next to a memory copy with as many threads.
"""

import os
import struct
import subprocess
import sys
import time
from contextlib import closing

import msgspec

from benchmarks.bench_service import brain_rss_mib
from benchmarks.replay.served import Served
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import PATIENT
from kvclient.client import Client
from kvserver._native import Ledger, Pattern, copy_seconds, create_memfd
from kvserver.config.config import Config
from kvserver.ipc.inheritance import Inheritance, Sums
from kvserver.supervisor.arena_sums import threads
from kvserver.tiers.records import NO_PARENT, Record, pack

GIB = 1 << 30
SLOT_BYTES, HEADROOM_BYTES = 2 << 20, 96
COPY_BYTES = GIB // 4


def one_start(arena_bytes: int) -> tuple[float, float, float, float]:
    """(ms to the first answer, GiB usable then, ms to the whole arena, MiB of the empty brain)."""
    began = time.perf_counter()
    with closing(Served(("--http-port", "0"), arena_bytes)) as served:
        client = Client(str(served.socket), engine="bench-start", rank=-1, timeouts=PATIENT)
        assert client.wait_connected(60), served.last_words()
        found = client.lookup(bytes(32), bytes(32))
        answer_ms = (time.perf_counter() - began) * 1e3
        assert (found.chunks, found.why) == (0, ""), found
        ready_gib = client.status()["arena"]["ready_bytes"] / GIB
        while True:
            arena = client.status()["arena"]
            assert not arena["problem"], arena
            if arena["ready_bytes"] == arena["total_bytes"]:
                break
            time.sleep(0.02)
        grown_ms = (time.perf_counter() - began) * 1e3
        rss_mib = brain_rss_mib(served.pid)
        client.close()
    return answer_ms, ready_gib, grown_ms, rss_mib


class Kept:
    """A full arena with its ledger, as a server leaves them."""

    def __init__(self, arena_bytes: int) -> None:
        self._config = Config(arena_bytes=arena_bytes)
        self.arena = create_memfd("bench-arena", arena_bytes)
        with closing(Pattern(self.arena, arena_bytes)) as pattern:
            pattern.fill(struct.pack("<QQQ", 0, arena_bytes, 1))
        self._ledger = create_memfd("bench-ledger", Ledger.file_bytes(self._config.ledger_span_bytes))
        payload_bytes = SLOT_BYTES - HEADROOM_BYTES
        self.records = b"".join(
            pack(Record(at, bytes(32), at.to_bytes(32), NO_PARENT, 0, 0, payload_bytes, 0, SLOT_BYTES, 1))
            for at in range(0, arena_bytes, SLOT_BYTES)
        )
        Ledger(self._ledger, self._config.ledger_span_bytes).seal(self.records)

    def seconds(self, sums: Sums) -> float:
        descriptors = (self.arena, self._ledger)
        inherited = Inheritance(
            parent=os.getpid(), arena=self.arena, ledger=self._ledger, sums=sums, config=self._config
        )
        command = [sys.executable, "-m", "kvserver.supervisor.arena_sums", msgspec.json.encode(inherited).decode()]
        began = time.perf_counter()
        subprocess.run(command, pass_fds=descriptors, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - began

    def is_whole(self) -> bool:
        ledger = Ledger(self._ledger, self._config.ledger_span_bytes)
        return ledger.scan() == self.records and not ledger.damaged


def kept(rows: Rows, arena_bytes: int, turns: int) -> None:
    memory = Kept(arena_bytes)
    copied_bytes = min(arena_bytes, COPY_BYTES)
    other = create_memfd("bench-copy", copied_bytes)
    puts, compares, ceilings = list[float](), list[float](), list[float]()
    for _ in range(turns):
        puts.append(memory.seconds("put"))
        compares.append(memory.seconds("compare"))
        assert memory.is_whole()
        ceilings.append(copied_bytes / copy_seconds(memory.arena, other, copied_bytes, threads(), True) / 1e9)
    for name, seconds in (("sum", puts), ("compare", compares)):
        rows.add(f"{name}_ms", [1e3 * second for second in seconds], "ms")
        rows.add(f"{name}_gbs", [arena_bytes / second / 1e9 for second in seconds], "GB/s", ceilings=ceilings)


def main() -> None:
    parser = option_parser(__doc__, smoke="a tiny arena")
    parser.add_argument("--arena-bytes", type=int, default=16 * GIB)
    given = parser.parse_args()
    arena_bytes = GIB // 16 if given.smoke else given.arena_bytes
    rows = Rows("start", as_json=given.json, config=f"arena {arena_bytes / GIB:g} GiB")
    turns = 2 if given.smoke else 5
    answers, readies, growns, sizes = zip(*(one_start(arena_bytes) for _ in range(turns)), strict=True)
    rows.add("answer_ms", answers, "ms")
    rows.add("ready_at_answer_gib", readies, "GiB")
    rows.add("grown_ms", growns, "ms")
    rows.add("brain_rss_empty_mib", sizes, "MiB")
    kept(rows, arena_bytes, turns)


if __name__ == "__main__":
    main()
