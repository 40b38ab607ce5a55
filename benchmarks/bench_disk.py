"""How fast are records written to disk and read back, next to fio on the same file system?

python -m benchmarks.bench_disk [--json] [--directory DIR] [--kinds write,read] [--kib 256,1024,4096] [--depths
1,8,32]
[--rounds 7] [--fio PATH] [--huge-pages] [--recovery-records 100000] [--smoke]

Both use O_DIRECT and io_uring on a preallocated file whose every block was written before, in random order, with the
same number of payloads in flight. Both use the same memory: fio's buffers are at the beginning of our arena. A
virtual disk may be twice as fast with contiguous memory. How much of it is contiguous is a matter of luck, unless
--huge-pages takes 2 MiB at a time (vm.nr_hugepages).

We also compute the digest of each payload, and write two more blocks: zeros over the old header, and the new header.
A round is one run of ours and one of fio; they take turns going first, and the ratio is computed in each round. The
rate is payload bytes / time from the first request to the last completion. A second row has our processor time for
each GB, of all threads. Without fio only our rates are shown.
Recovery: a store full of records of 16 KiB, written but not flushed before.
"""

import argparse
import json
import mmap
import os
import random
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal

from benchmarks.rows import Rows, option_parser, say
from kvserver._native import DiskEngine, DiskStore, create_memfd
from kvserver.tiers.records import DISK_RECORD, NO_SUM
from kvserver.transfer.disk import COMPLETION

SEGMENT_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
WAIT_MS = 60_000

Kind = Literal["write", "read"]


class Ours:
    """A store full of records of one size, and an arena with slots for a round's records, or for fio's buffers."""

    def __init__(
        self,
        directory: Path,
        *,
        file_bytes: int,
        record_bytes: int,
        round_bytes: int,
        depth: int,
        huge_page_bytes: int = 0,
    ) -> None:
        self.record_bytes = record_bytes
        self.store = DiskStore(
            str(directory), device=0, capacity_bytes=file_bytes, segment_bytes=SEGMENT_BYTES, fingerprint=bytes(32)
        )
        per_segment = DiskStore.extents_per_segment(SEGMENT_BYTES, record_bytes)
        self.extents = [
            segment * SEGMENT_BYTES + position * record_bytes
            for segment in range(self.store.segments)
            for position in range(per_segment)
        ]
        self.slots = round_bytes // record_bytes
        least_bytes = max(self.slots, depth) * record_bytes + 4096  # fio's layout of its buffers
        arena_bytes = -(-least_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.fd = create_memfd("arena", arena_bytes, huge_page_bytes)
        self.arena = mmap.mmap(self.fd, arena_bytes)
        if not huge_page_bytes:
            self.arena.madvise(mmap.MADV_HUGEPAGE)  # as a server asks for huge pages before it touches its arena
        block = random.Random(1).randbytes(record_bytes)
        for slot in range(self.slots):
            self.arena[slot * record_bytes : (slot + 1) * record_bytes] = block[slot * 8 :] + block[: slot * 8]
        self.engine = DiskEngine(
            arena_fd=self.fd,
            arena_bytes=arena_bytes,
            stores=[self.store],
            engine="auto",
            depth=depth,
            sum_threads=min(4, os.cpu_count() or 1),
        )
        self.engine.arena_ready(arena_bytes)
        self.generation = 0
        self.cpu_s_per_gb = 0.0
        """Of the last round, over all threads."""
        self.held: dict[int, int] = {}
        """Extent -> generation."""
        self.chooser = random.Random(2)
        for first in range(0, len(self.extents), self.slots):
            self._run("write", self.extents[first : first + self.slots])

    def gb_per_s(self, kind: Kind) -> float:
        """The rate of one round."""
        return self._run(kind, self.chooser.sample(self.extents, self.slots))

    def recovery_s(self) -> tuple[float, int]:
        """Seconds of a recovery, and its number of records."""
        begun = time.perf_counter()
        records = self.store.recover()
        return time.perf_counter() - begun, len(records) // DiskStore.RECORD_BYTES

    def close(self) -> None:
        self.engine.close()
        self.store.close()
        self.arena.close()
        os.close(self.fd)

    def _run(self, kind: Kind, extents: list[int]) -> float:
        packed = bytearray()
        for slot, extent in enumerate(extents):
            if kind == "write":
                self.generation += 1
                self.held[extent] = self.generation
            generation = self.held[extent]
            names = (bytes(32), generation.to_bytes(32, "little"), bytes(32))
            shape = (0, 0, self.record_bytes, 0, self.record_bytes // 4096)
            packed += DISK_RECORD.pack(slot * self.record_bytes, *names, *shape, generation, NO_SUM, extent, 0, 0)
        poll = select.poll()
        poll.register(self.engine.eventfd, select.POLLIN)
        records = bytes(packed)
        cpu_s, begun = time.process_time(), time.perf_counter()
        self.engine.submit(1, kind, records)
        left = len(extents)
        while left:
            assert poll.poll(WAIT_MS), "the device does not answer"
            os.eventfd_read(self.engine.eventfd)
            for completion in COMPLETION.iter_unpack(self.engine.completions(left)):
                assert completion[2] == DiskEngine.DONE, completion
                left -= 1
        gb, seconds = len(extents) * self.record_bytes / 1e9, time.perf_counter() - begun
        self.cpu_s_per_gb = (time.process_time() - cpu_s) / gb
        return gb / seconds


class Fio:
    """The same work by fio, on a file that it lays out and writes the first time.

    memory: a memory file with fio's buffers (`depth` records and a page); fio reads into it and writes from it.
    """

    def __init__(
        self, fio: str, path: Path, *, memory: str, file_bytes: int, record_bytes: int, round_bytes: int, depth: int
    ) -> None:
        self._command = [fio, "--name=bench", f"--filename={path}", f"--size={file_bytes}", f"--bs={record_bytes}"]
        self._command += ["--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", "--output-format=json", "--thread"]
        self._command += [f"--iomem=mmapshared:{memory}"]
        self._round = [f"--io_size={round_bytes}", "--norandommap"]
        if not path.exists():
            self._run("--rw=write", "--bs=1m", "--iodepth=8")

    def gb_per_s(self, kind: Kind) -> float:
        """The rate of one round."""
        return float(json.loads(self._run(f"--rw=rand{kind}", *self._round))["jobs"][0][kind]["bw_bytes"]) / 1e9

    def _run(self, *options: str) -> str:
        return subprocess.run([*self._command, *options], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = option_parser(__doc__, smoke="tiny")
    parser.add_argument("--directory", help="on the device to measure; the working directory without")
    parser.add_argument("--kinds", default="write,read")
    parser.add_argument("--kib", default="256,1024,4096", help="sizes of records")
    parser.add_argument("--depths", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--round-mib", type=int, default=256)
    parser.add_argument("--fio", help="its path; without, whatever PATH has")
    parser.add_argument("--huge-pages", action="store_true", help="an arena of reserved pages of 2 MiB")
    parser.add_argument("--recovery-records", type=int, default=0)
    given = parser.parse_args()
    if given.smoke:
        given.kib, given.depths, given.rounds, given.file_mib, given.round_mib = "128", "2", 2, 129, 8
        given.recovery_records = 500
    given.fio = given.fio or shutil.which("fio")
    if given.fio is None:
        say("no fio here: our rates alone")
    with tempfile.TemporaryDirectory(dir=given.directory or Path.cwd(), prefix="bench-disk-") as name:
        rates(given, Path(name))


def rates(given: argparse.Namespace, directory: Path) -> None:
    beside = "no fio" if given.fio is None else f"fio {_version(given.fio)}"
    rows = Rows("disk", as_json=given.json, config=f"file {given.file_mib} MiB, round {given.round_mib} MiB, {beside}")
    kinds: list[Kind] = ["write", "read"]
    for kib in map(int, given.kib.split(",")):
        for depth in map(int, given.depths.split(",")):
            file_bytes, record_bytes, round_bytes = given.file_mib << 20, kib << 10, given.round_mib << 20
            sizes = {"file_bytes": file_bytes, "record_bytes": record_bytes, "round_bytes": round_bytes}
            ours = Ours(directory, **sizes, depth=depth, huge_page_bytes=given.huge_pages * HUGE_PAGE_BYTES)
            memory = f"/proc/{os.getpid()}/fd/{ours.fd}"
            fio = given.fio and Fio(given.fio, directory / "fio", memory=memory, **sizes, depth=depth)
            say(ours.engine.backend)
            for kind in [kind for kind in kinds if kind in given.kinds]:
                runs, ceilings, cpu_s = [], [], []
                for turn in range(given.rounds):
                    if not fio:
                        runs.append(ours.gb_per_s(kind))
                    elif turn % 2:
                        ceilings.append(fio.gb_per_s(kind))
                        runs.append(ours.gb_per_s(kind))
                    else:
                        runs.append(ours.gb_per_s(kind))
                        ceilings.append(fio.gb_per_s(kind))
                    cpu_s.append(ours.cpu_s_per_gb)
                rows.add(f"{kind}_{kib}k_depth{depth}", runs, "GB/s", ceilings=ceilings)
                rows.add(f"{kind}_{kib}k_depth{depth}_cpu", cpu_s, "s/GB")
            ours.close()
            for half in (DiskStore.FILE, DiskStore.HEADERS):
                (directory / half).unlink()
    if given.recovery_records:
        recovery(rows, directory, given)


def recovery(rows: Rows, directory: Path, given: argparse.Namespace) -> None:
    record_bytes = 16 << 10
    segments = -(-given.recovery_records // DiskStore.extents_per_segment(SEGMENT_BYTES, record_bytes))
    file_bytes = 16384 + segments * SEGMENT_BYTES
    ours = Ours(directory, file_bytes=file_bytes, record_bytes=record_bytes, round_bytes=16 << 20, depth=32)
    found = [ours.recovery_s() for _ in range(given.rounds)]
    say(f"{found[0][1]} records")
    rows.add("recovery_s", [seconds for seconds, _ in found], "s")
    ours.close()


def _version(fio: str) -> str:
    return subprocess.run([fio, "--version"], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
