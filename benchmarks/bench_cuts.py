"""How long does the brain serve nobody else when a large subtree is cut off? `python -m benchmarks.bench_cuts`

The service alone: no process, no bytes. Its index has one namespace: 16 shared chunks, and prompts of 512 chunks that
continue them. Then the prefix is cleared that ends in the first chunk, and the service goes on until all is gone. A
mismatch and a chunk that cannot be read are cut off in the same way.

longest_*: the longest event of a round; on a busy machine other processes make it longer. quiet_*: the longest event if
each counts with its fastest round, which leaves those out. all_*: the sum of all events of a round.

dram: eviction is lru. arc: it is arc. disks: a disk holds every chunk as well. wide: as dram, but one chunk has all
others as its children.
"""

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Literal, NamedTuple, get_args

from benchmarks.rows import Rows, option_parser, say
from kvserver.brain.bounds import bounds_from
from kvserver.config.config import Config
from kvserver.service.base.effects import Ask, Effect, GoOn, Instruct
from kvserver.service.base.events import ArenaGrew, Commanded, Event, Reported, Tick
from kvserver.service.base.events import GoOn as GoneOn
from kvserver.service.service import Service
from kvserver.tiers.extents import extents_per_segment
from kvserver.tiers.records import (
    DOCUMENT_FORMAT,
    NO_PARENT,
    NO_SUM,
    DiskRecord,
    GroupDocument,
    NamespaceDocument,
    Record,
    encode_document,
    pack,
    pack_disk,
)
from kvserver.wire.admin import ClearNamespace
from kvserver.wire.orders import FoundNote, FoundRecords, Listed, Ready, Recover, StartMover, TellRecords

NAMESPACE = sha256(b"bench-cuts").digest()
SHARED_CHUNKS, PROMPT_CHUNKS = 16, 512
SLOT_BYTES = 4096
SLAB_BYTES = 64 << 20
SEGMENT_BYTES = 64 << 20
TOLD_AT_ONCE = 500
Kind = Literal["dram", "arc", "disks", "wide"]


class Chunk(NamedTuple):
    number: int
    key: bytes
    parent: bytes


def tree(chunks: int, kind: Kind) -> Iterator[Chunk]:
    """The chunks of the index, parents first."""
    parent = shared = NO_PARENT
    for number in range(chunks):
        key = sha256(number.to_bytes(8, "little")).digest()
        if number >= SHARED_CHUNKS and (kind == "wide" or (number - SHARED_CHUNKS) % PROMPT_CHUNKS == 0):
            parent = shared
        yield Chunk(number, key, parent)
        parent = key
        if number == SHARED_CHUNKS - 1:
            shared = key


def document() -> bytes:
    group = GroupDocument(4, "full", 0, 1, 1, [[(1, SLOT_BYTES // 4)]])
    return encode_document(NamespaceDocument(DOCUMENT_FORMAT, NAMESPACE, 16, [group]))


def in_dram(chunk: Chunk) -> bytes:
    place = chunk.number * SLOT_BYTES, NAMESPACE, chunk.key, chunk.parent, 0, 0
    return pack(Record(*place, SLOT_BYTES, 0, SLOT_BYTES, chunk.number + 1, NO_SUM))


def on_disk(chunk: Chunk) -> bytes:
    segment, position = divmod(chunk.number, extents_per_segment(SEGMENT_BYTES, SLOT_BYTES))
    return pack_disk(
        DiskRecord(
            arena_offset=0,
            namespace=NAMESPACE,
            key=chunk.key,
            parent=chunk.parent,
            group=0,
            shard=0,
            payload_bytes=SLOT_BYTES,
            tenant=0,
            extent_bytes=SLOT_BYTES,
            generation=chunk.number + 1,
            sum=NO_SUM,
            offset=segment * SEGMENT_BYTES + position * SLOT_BYTES,
            device=0,
            stored_s=0,
        )
    )


class Brain:
    """A service with a full index."""

    def __init__(self, kind: Kind, chunks: int) -> None:
        self._now_ns = 1_000_000_000
        slabs = -(-chunks * SLOT_BYTES // SLAB_BYTES) + 1
        segments = chunks // extents_per_segment(SEGMENT_BYTES, SLOT_BYTES) + 2
        bounds = replace(
            bounds_from(Config()),
            arena_bytes=slabs * SLAB_BYTES,
            slab_bytes=SLAB_BYTES,
            eviction_policy="arc" if kind == "arc" else "lru",
            disk_devices=1 if kind == "disks" else 0,
            disk_directories=("bench",) if kind == "disks" else (),
            disk_segment_bytes=SEGMENT_BYTES,
            disk_device_bytes=segments * SEGMENT_BYTES,
        )
        every = list(tree(chunks, kind))
        self._told = [b"".join(map(on_disk, every[at : at + TOLD_AT_ONCE])) for at in range(0, chunks, TOLD_AT_ONCE)]
        self._service = Service(
            bounds,
            random.Random(1).randbytes,
            documents=[(0, document())],
            records=b"".join(map(in_dram, every)),
        )
        self._service.effects()
        self._obey(self.handle(ArenaGrew(slabs, "")))
        self._obey(self.handle(Tick()))
        status = self._service.status(self._now_ns)
        assert status.chunks == chunks, status
        assert status.chunks_on_disk == (chunks if kind == "disks" else 0), status

    def handle(self, event: Event) -> list[Effect]:
        self._now_ns += 1_000
        return self._service.handle(event, self._now_ns)

    def _obey(self, effects: list[Effect]) -> None:
        """Does what the disk mover does at its start."""
        waiting = list(effects)
        telling = iter([*self._told, b""])
        for effect in waiting:
            match effect:
                case Ask(StartMover(mover)):
                    waiting += self.handle(Reported(mover, Ready(1, "bench", [])))
                case Instruct(mover, Recover()):
                    newest = len(self._told) * TOLD_AT_ONCE
                    waiting += self.handle(Reported(mover, FoundNote(NAMESPACE, document(), 0, newest)))
                    waiting += self.handle(Reported(mover, Listed(newest, 0)))
                case Instruct(mover, TellRecords()):
                    waiting += self.handle(Reported(mover, FoundRecords(next(telling, b""))))

    def clear(self, key: bytes) -> list[float]:
        """Clears the prefix, and lets the service go on until it is gone. Returns the milliseconds of each event."""
        taken: list[float] = []
        event: Event | None = Commanded(1, "bench", ClearNamespace(namespace=NAMESPACE, key=key))
        while event is not None:
            began = time.perf_counter()
            effects = self.handle(event)
            taken.append((time.perf_counter() - began) * 1e3)
            event = GoneOn() if any(isinstance(effect, GoOn) for effect in effects) else None
        assert self._service.status(self._now_ns).chunks == 0
        return taken


def measure(rows: Rows, kind: Kind, chunks: int, *, rounds: int) -> None:
    rounds_ms: list[list[float]] = []
    for number in range(rounds):
        say(f"{chunks} chunks, {kind}, round {number + 1}")
        brain = Brain(kind, chunks)
        gc.collect()
        gc.freeze()  # as the brain does (Shell): nothing that has lived long is looked at
        gc.disable()
        taken = brain.clear(next(tree(1, kind)).key)
        gc.enable()
        gc.unfreeze()
        rounds_ms.append(taken)
    name = f"{kind}_{chunks // 1000}k_ms"
    rows.add(f"longest_{name}", [max(taken) for taken in rounds_ms], "ms")
    rows.add(f"quiet_{name}", [max(min(event) for event in zip(*rounds_ms, strict=True))], "ms")
    rows.add(f"all_{name}", [sum(taken) for taken in rounds_ms], "ms")


def main() -> None:
    parser = option_parser(__doc__, smoke="tiny")
    parser.add_argument("--chunks", default="20000,80000,300000")
    parser.add_argument("--kinds", default=",".join(get_args(Kind)))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.smoke:
        given.chunks, given.rounds = "1000", 1
    rows = Rows("cuts", as_json=given.json, config=f"prompts of {PROMPT_CHUNKS} chunks behind {SHARED_CHUNKS} shared")
    for chunks in map(int, given.chunks.split(",")):
        for kind in given.kinds.split(","):
            measure(rows, kind, chunks, rounds=given.rounds)


if __name__ == "__main__":
    main()
