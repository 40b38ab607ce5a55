"""How soon has a server indexed its disk?

`python -m benchmarks.bench_recovery [--json] [--directory DIR] [--records 100000,400000] [--smoke]`

The disk engine fills a store with records of 4 KiB in chains of 512 chunks, one record per chunk. Then servers are
started on it, killed, and started again.

recovered_*_s: from starting the process to `disk_state` "ready", when everything is in the index. answer_*_s: to the
first answered lookup. lookup_longest: the longest lookup from then until recovery is complete; lookups run one after
another. brain_rss: of the brain, at the end. per_100k_of_*_s: recovery alone, for 100,000 records, without the time
to start on an empty store, which is measured next to it.
"""

import hashlib
import os
import select
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_service import brain_rss_mib
from benchmarks.replay.served import Served
from benchmarks.rows import Rows, option_parser, say
from kvclient.client import Client
from kvclient.values import RECOVERING, Timeouts
from kvserver.movers import disk_notes
from kvserver.tiers.extents import extents_per_segment
from kvserver.tiers.records import (
    DOCUMENT_FORMAT,
    NO_PARENT,
    NO_SUM,
    DiskRecord,
    GroupDocument,
    NamespaceDocument,
    encode_document,
    pack_disk,
)
from kvserver.transfer.disk import completions, open_store
from kvserver.transfer.native import DiskEngine, create_memfd

CHAIN_CHUNKS = 512
EXTENT_BYTES = 4096
SEGMENT_BYTES = 64 << 20
HEAD_BYTES = 1 << 20
"""More than a device uses besides its segments."""
BATCH = 4096
WAIT_MS = 60_000
ARENA_BYTES = 64 << 20
NAMESPACE = hashlib.sha256(b"bench-recovery").digest()
PATIENT = Timeouts(lookup_s=10.0, backoff_first_s=0.005, backoff_max_s=0.01)
POLL_S = 0.005
RECORDS_TO_TELL = 50_000
"""With fewer records, recovery takes less time than two starts of a server differ."""


class Start(NamedTuple):
    recovered_s: float
    answer_s: float
    lookup_longest_s: float
    rss_mib: float


def disk_bytes_for(records: int) -> int:
    segments = max(1, -(-records // extents_per_segment(SEGMENT_BYTES, EXTENT_BYTES)))
    return segments * SEGMENT_BYTES + HEAD_BYTES


def chains(records: int) -> Iterator[DiskRecord]:
    """Records of chunks in chains, each in the next free extent."""
    per_segment = extents_per_segment(SEGMENT_BYTES, EXTENT_BYTES)
    parent = NO_PARENT
    for number in range(records):
        if number % CHAIN_CHUNKS == 0:
            parent = NO_PARENT
        key = hashlib.sha256(number.to_bytes(8, "little")).digest()
        segment, position = divmod(number, per_segment)
        yield DiskRecord(
            arena_offset=number % BATCH * EXTENT_BYTES,
            namespace=NAMESPACE,
            key=key,
            parent=parent,
            group=0,
            shard=0,
            payload_bytes=EXTENT_BYTES,
            tenant=0,
            extent_bytes=EXTENT_BYTES,
            generation=number + 1,
            sum=NO_SUM,
            offset=segment * SEGMENT_BYTES + position * EXTENT_BYTES,
            device=0,
            stored_s=0,
        )
        parent = key


def fill(directory: Path, records: int) -> None:
    """Writes a store of that many records, and the note that describes their namespace."""
    store, _ = open_store(str(directory), device=0, capacity_bytes=disk_bytes_for(records), segment_bytes=SEGMENT_BYTES)
    arena = create_memfd("bench-recovery", BATCH * EXTENT_BYTES)
    engine = DiskEngine(
        arena_fd=arena, arena_bytes=BATCH * EXTENT_BYTES, stores=[store], engine="auto", depth=64, sum_threads=1
    )
    poll = select.poll()
    poll.register(engine.eventfd, select.POLLIN)
    writing = chains(records)
    for job in count(1):
        batch = list(islice(writing, BATCH))
        if not batch:
            break
        engine.submit(job, "write", b"".join(map(pack_disk, batch)))
        left = len(batch)
        while left:
            assert poll.poll(WAIT_MS), "the device does not answer"
            os.eventfd_read(engine.eventfd)
            for done in completions(engine, BATCH):
                assert done.fault is None, done
                left -= 1
    engine.close()
    store.close()
    os.close(arena)
    pages = [(1, EXTENT_BYTES // 4)]
    group = GroupDocument(block_tokens=4, kind="full", window_tokens=0, shards=1, writers=1, pages=[pages])
    document = NamespaceDocument(format=DOCUMENT_FORMAT, digest=NAMESPACE, chunk_tokens=16, groups=[group])
    disk_notes.save(str(directory), NAMESPACE, encode_document(document), 0)


def one_start(directory: Path, records: int) -> Start:
    """Starts a server on the store, without changing the store."""
    flags = ["--disk-paths", str(directory), "--disk-bytes", str(disk_bytes_for(records))]
    flags += ["--disk-segment-bytes", str(SEGMENT_BYTES), "--http-port", "0"]
    began = time.perf_counter()
    with closing(Served(flags, ARENA_BYTES)) as served:
        client = Client(str(served.socket), engine="bench-recovery", rank=-1, timeouts=PATIENT)
        assert client.wait_connected(60), served.last_words()
        longest_s, answer_s, recovered = 0.0, 0.0, False
        while not recovered:
            asked = time.perf_counter()
            found = client.lookup(NAMESPACE, next(chains(1)).key)
            longest_s = max(longest_s, time.perf_counter() - asked)
            assert found.why in {"", RECOVERING}, found
            answer_s = answer_s or time.perf_counter() - began
            if found.lease is not None:
                client.release(found.lease)
            status = client.status()
            recovered = status["disk_state"] == "ready"
            time.sleep(POLL_S)
        recovered_s = time.perf_counter() - began
        assert status["chunks_on_disk"] == records, status
        rss_mib = brain_rss_mib(served.pid)
        client.close()
    return Start(recovered_s, answer_s, longest_s, rss_mib)


def measure(rows: Rows, parent: Path, *, records: int, runs: int) -> None:
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-recovery-") as name:
        empty, directory = Path(name) / "empty", Path(name) / "filled"
        empty.mkdir()
        directory.mkdir()
        began = time.perf_counter()
        fill(directory, records)
        say(f"{records} records written in {time.perf_counter() - began:.0f} s")
        one_start(empty, 0)  # creates the empty store
        starts = [(one_start(directory, records), one_start(empty, 0)) for _ in range(runs)]
    name = f"{records // 1000}k"
    recovered = [start.recovered_s for start, _ in starts]
    base_s = statistics.median(start.recovered_s for _, start in starts)
    rows.add(f"recovered_{name}_s", recovered, "s")
    rows.add(f"recovered_empty_{name}_s", [start.recovered_s for _, start in starts], "s")
    if records >= RECORDS_TO_TELL:
        rows.add(f"per_100k_of_{name}_s", [(seconds - base_s) / records * 100_000 for seconds in recovered], "s")
    rows.add(f"answer_{name}_s", [start.answer_s for start, _ in starts], "s")
    rows.add(f"lookup_longest_{name}_ms", [start.lookup_longest_s * 1e3 for start, _ in starts], "ms")
    rows.add(f"brain_rss_{name}_mib", [start.rss_mib for start, _ in starts], "MiB")
    rows.add(f"brain_rss_empty_{name}_mib", [start.rss_mib for _, start in starts], "MiB")


def main() -> None:
    parser = option_parser(__doc__, smoke="tiny")
    parser.add_argument("--directory", type=Path, help="on the device to measure; the working directory without")
    parser.add_argument("--records", default="100000,400000")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    if given.smoke:
        given.records, given.runs = "3000", 1
    rows = Rows("recovery", as_json=given.json, config=f"records of {EXTENT_BYTES >> 10} KiB, chains of {CHAIN_CHUNKS}")
    for records in map(int, given.records.split(",")):
        measure(rows, (given.directory or Path.cwd()).resolve(), records=records, runs=given.runs)


if __name__ == "__main__":
    main()
