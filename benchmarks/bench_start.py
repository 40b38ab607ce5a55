"""How soon does a server answer? `python benchmarks/bench_start.py [--json] [--smoke] [--arena-bytes N]`

answer_ms: from starting the process to the first answered lookup of another process. served_while_growing: bytes of the
arena that were usable at that moment. grown_ms: to the whole arena. Each start is a new server with a new arena.
"""

import argparse
import time

from benchmarks.bench_service import brain_rss_mib
from benchmarks.rows import Rows
from kvclient.client import Client
from kvserver.replay.served import Served

GIB = 1 << 30


def one_start(arena_bytes: int) -> tuple[float, float, float, float]:
    """(ms to the first answer, GiB usable then, ms to the whole arena, MiB of the empty brain)."""
    began = time.perf_counter()
    with Served(("--http-port", "0"), arena_bytes) as served:
        client = Client(str(served.socket), engine="bench-start", rank=-1)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--smoke", action="store_true", help="a tiny arena: shows that it runs, measures nothing")
    parser.add_argument("--arena-bytes", type=int, default=16 * GIB)
    given = parser.parse_args()
    arena_bytes = GIB // 16 if given.smoke else given.arena_bytes
    rows = Rows("start", as_json=given.json, config=f"arena {arena_bytes / GIB:g} GiB")
    answers, readies, growns, sizes = zip(
        *(one_start(arena_bytes) for _ in range(2 if given.smoke else 5)), strict=True
    )
    rows.add("answer_ms", answers, "ms")
    rows.add("ready_at_answer_gib", readies, "GiB")
    rows.add("grown_ms", growns, "ms")
    rows.add("brain_rss_empty_mib", sizes, "MiB")


if __name__ == "__main__":
    main()
