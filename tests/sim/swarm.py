"""Decisions of a seed made before it runs: sizes, times, and the probability of each operation.

Swarm testing: in each seed some operations never happen and others are very likely, so that no fault hides another.
"""

from dataclasses import replace
from random import Random

from kvserver.brain.bounds import bounds_from
from kvserver.config.config import Config
from kvserver.service.state.bounds import Bounds
from kvserver.tiers.slots import SLOT_ALIGN

from .faults import SUM_RETRIEVE, SUM_STORE
from .shapes import OF_SEVERAL_SIZES, SHAPES, Shape
from .tenants import draw_disk_quotas, draw_quotas

ACTS = {
    # operations of one step, with their weights before the swarm changes them
    "deliver": 30.0,
    "mover": 40.0,
    "supervisor": 7.0,
    "process": 45.0,
    "tick": 3.0,
    "plan-store": 4.0,
    "plan-lookup": 5.0,
    "plan-mixed-lookup": 1.2,
    "plan-pledge": 1.0,
    "plan-pledged-store": 2.0,
    "plan-await": 1.5,
    "unpledge": 0.3,
    "jump": 0.5,
    "grow": 1.0,
    "process-dies": 0.12,
    "process-stalls": 0.2,
    "mover-dies": 0.15,
    "mover-stops": 0.2,
    "resume": 3.0,
    "brain-dies": 0.09,
    "clear": 0.15,
    "drain": 0.05,
    "release": 1.0,
    "unregister": 0.6,
    "abandon": 1.0,
    "status": 0.3,
    "lane": 0.5,
    "give-lane-up": 0.3,
    "repeat": 0.7,
    "nonsense": 2.5,
    "rot": 0.15,
    "dram-rot": 0.4,
    "admin": 0.6,
    "clear-prefix": 0.1,
}
WITH_FULL_GROUP = tuple(shape for shape in SHAPES if any(group.kind == "full" for group in shape.groups))
"""Shapes whose chunks can be on disk."""
ONLY_FULL = tuple(shape for shape in SHAPES if all(group.kind == "full" for group in shape.groups))
HARMFUL = (
    *("process-dies", "process-stalls", "mover-dies", "mover-stops", "brain-dies", "clear", "unregister", "abandon"),
    *("give-lane-up", "nonsense", "repeat", "plan-mixed-lookup", "admin", "clear-prefix"),
)
ALWAYS = ("deliver", "mover", "supervisor", "process", "tick", "resume")

CHANCES = {
    # probability of each small fault or variation where it can occur, before the swarm changes it
    "copy-fails": 0.03,
    "map-fails": 0.03,
    "start-fails": 0.03,
    "reap-waits": 0.6,
    "bad-ids": 0.03,
    "rank-skips": 0.06,
    "rank-differs": 0.08,
    "rank-repeats": 0.06,
    "more-parts": 0.2,
    "copy-waits": 0.05,
    "wrong-parent": 0.03,
    "twin-word": 0.03,
    "foreign-lease": 0.12,
    "same-epoch": 0.8,
    "forged-rival": 0.3,
    "message-waits": 0.35,
    "hasty-client": 0.2,
    "scheduler-registers": 0.15,
    "disk-io": 0.03,
    "disk-torn": 0.2,
    "device-fails": 0.05,
    "memory-lost": 0.15,
    "notes-fail": 0.3,
    "notes-mended": 0.03,
    "go-on-waits": 0.0,
    "disk-away": 0.0,
    # faults that only a digest shows: for each block
    "bytes-on-way": 0.006,
    SUM_STORE: 0.004,
    SUM_RETRIEVE: 0.01,
}
DIGEST_FAULTS = ("bytes-on-way", SUM_STORE, SUM_RETRIEVE)


class Swarm:
    """The random settings of one seed."""

    def __init__(self, rng: Random) -> None:
        self.acts: dict[str, float] = {
            name: weight * _strength(rng) if name not in ALWAYS else weight * rng.choice((0.3, 1.0, 1.0, 2.0))
            for name, weight in ACTS.items()
        }
        self.chances = {name: min(0.9, chance * _strength(rng)) for name, chance in CHANCES.items()}
        self.has_disk = rng.random() < 0.6
        self.shapes = self._shapes(rng, WITH_FULL_GROUP if self.has_disk and rng.random() < 0.9 else SHAPES)
        self.mixes_sizes = self.has_disk and rng.random() < 0.25
        """Models with different record sizes run one after another, on several devices that are too small."""
        if self.mixes_sizes:
            self.shapes = rng.sample(OF_SEVERAL_SIZES, len(OF_SEVERAL_SIZES))
        if self.has_disk:
            for name in ("plan-store", "plan-lookup", "mover"):
                self.acts[name] = max(
                    4.0, 3 * self.acts[name]
                )  # chunks must be stored, leave DRAM and be asked for again
            if self.mixes_sizes or rng.random() < 0.5:
                self._be_gentle(rng)
            if not self.mixes_sizes and rng.random() < 0.3:
                self.acts["drain"] = 0.3
        self.loses_devices = self.has_disk and not self.mixes_sizes and rng.random() < 0.3
        """Of two devices or more, some are away now and then."""
        self.begins_cold = self.has_disk and (self.mixes_sizes or rng.random() < (0.8 if self.loses_devices else 0.5))
        """The devices start with records from an earlier life."""
        self.reads_much = self.begins_cold and not (self.mixes_sizes or self.loses_devices) and rng.random() < 0.6
        if self.reads_much:
            self._read_much(rng)
        self.has_quotas = len(self.shapes) > 1 and rng.random() < (0.3 if self.begins_cold else 0.5)
        self.has_arc = not self.has_disk and not self.has_quotas and rng.random() < 0.6
        if self.has_arc:
            for name in ("plan-store", "plan-lookup", "mover"):  # chunks must be evicted and stored again
                self.acts[name] = max(8.0, 3 * self.acts[name])
            if rng.random() < 0.7:
                self._be_gentle(rng)
        self.engines = rng.choice((1, 2, 2, 3)) if not self.has_disk else rng.choice((1, 1, 2))
        if self.has_quotas:
            self.engines = max(2, self.engines)
        self.depth = rng.choice((6, 8) if self.reads_much else (2, 3, 4) if self.has_arc else (2, 4, 6, 8))
        """Chunks of the longest prefix. Few with ARC: its arena holds few, and else none comes back in time."""
        self.fanout = rng.choice((1, 2, 2, 3))
        """Branches at each chunk."""
        self.pool_blocks = rng.choice((17, 41, 83))
        self.words = rng.choice((2, 5, 11))
        self.step_ms = rng.choice((1, 3, 10))
        """Mean time between two steps. All other times are multiples of it."""
        if self.mixes_sizes:
            self.engines, self.depth, self.fanout = 2, rng.choice((2, 4, 6)), 3
            self.acts["plan-store"], self.acts["mover"], self.acts["tick"] = 20.0, 90.0, 9.0
        if self.loses_devices:
            self._lose_devices(rng)
        self.cuts_much = rng.random() < 0.2
        """Large subtrees are often cut off, and much happens before they are forgotten."""
        if self.cuts_much:
            self.depth, self.fanout = rng.choice((4, 6, 8)), rng.choice((1, 2, 3))
            self.acts["clear-prefix"] = rng.choice((0.5, 2.0))
            self.acts["plan-store"] = max(8.0, self.acts["plan-store"])
            self.acts["mover"] = max(40.0, self.acts["mover"])
            self.chances["go-on-waits"] = rng.choice((0.5, 0.9, 0.97))
        self.pledges_much = rng.random() < 0.2
        """Two engines or more compute each other's prompts, step by step."""
        if self.pledges_much:
            self.shapes = [rng.choice(ONLY_FULL)]
            self.engines, self.depth, self.fanout = 2, rng.choice((3, 5, 8)), rng.choice((1, 2))
            self._be_gentle(rng)
            self.acts.update({"plan-pledge": 2.0, "plan-pledged-store": 9.0, "plan-await": 4.0, "unpledge": 0.2})
            self.acts.update({"plan-store": 0.5, "plan-lookup": 0.5, "mover": 60.0, "process": 60.0, "deliver": 60.0})
            self.chances.update({"rank-skips": 0.0, "foreign-lease": 0.0, "hasty-client": 0.0, "message-waits": 0.1})
            self.pool_blocks, self.words = 83, 11
            self.step_ms = max(3, self.step_ms)  # so that epochs of stores are mostly known
        self.verifies = self.verifies_later = True
        """Digests are on, before and after the first death of a brain."""
        self._choose_digest_faults(rng)
        rate = rng.choice((1_000_000, 10_000_000, 1_000_000_000)) if rng.random() < 0.3 else 0
        self.bounds = replace(self._bounds(rng), verifies=self.verifies, scrub_bytes_per_s=rate)
        self.other_sizes = rng.choice((0.0, 0.0, 0.5))
        """Probability that an engine holds each shard on another number of ranks than its namespace's shape says."""
        self.slabs_at_start = rng.choice((0, 1, *[self.bounds.arena_bytes // self.bounds.slab_bytes] * 5))

    def _be_gentle(self, rng: Random) -> None:
        """Makes faults rare, so that chunks grow old."""
        for name in HARMFUL:
            if rng.random() < 0.7:
                self.acts[name] = 0.0
        for name in self.chances:
            if not name.startswith("disk"):
                self.chances[name] *= 0.2

    def _lose_devices(self, rng: Random) -> None:
        """Makes brains die and operators clear often, while devices come and go. None is drained: a drained device
        keeps no notes, so it cannot tell the others what they missed."""
        self._be_gentle(rng)
        self.acts.update({"brain-dies": rng.choice((0.3, 1.0)), "drain": 0.0, "clear": rng.choice((0.0, 0.5, 2.0))})
        self.acts.update({"admin": rng.choice((0.0, 2.0, 6.0)), "unregister": rng.choice((0.0, 3.0))})
        self.chances["disk-away"] = rng.choice((0.3, 0.9))

    def _read_much(self, rng: Random) -> None:
        """Makes long prefixes be read from disk in many parts, with some read errors."""
        for name in HARMFUL:
            if rng.random() < 0.9:
                self.acts[name] = 0.0
        self._be_gentle(rng)
        self.acts["plan-lookup"], self.acts["plan-store"] = 30.0, rng.choice((1.0, 10.0))
        self.acts["rot"] = rng.choice((0.3, 2.0))
        self.chances["disk-io"] = rng.choice((0.0, 0.1))
        self.chances["more-parts"] = 0.8
        self.chances["hasty-client"] = 0.0
        self.chances["copy-waits"] = rng.choice((0.0, 0.9))

    def _choose_digest_faults(self, rng: Random) -> None:
        """In some seeds there are none. In some there are many, and else little goes wrong."""
        dice = rng.random()
        if dice < 0.2:
            self._be_gentle(rng)
            self.acts.update({"plan-store": 9.0, "plan-lookup": 20.0, "dram-rot": rng.choice((0.0, 2.0))})
            self.chances.update(dict.fromkeys(DIGEST_FAULTS, rng.choice((0.0, 0.08))))
            self.chances["hasty-client"] = 0.0
        elif dice < 0.5:
            self.acts["dram-rot"] = 0.0
            self.chances.update(dict.fromkeys(DIGEST_FAULTS, 0.0))
            self.verifies, self.verifies_later = rng.choice(((True, True), (False, False), (False, True)))
            if self.verifies_later and not self.verifies:
                self.acts["brain-dies"] = max(0.5, self.acts["brain-dies"])

    @staticmethod
    def _tight(rng: Random, narrow: tuple[int, ...], wide: int) -> int:
        return rng.choice(narrow) if rng.random() < 0.1 else wide

    def ms(self, steps: int) -> int:
        return steps * self.step_ms

    @staticmethod
    def _shapes(rng: Random, shapes: tuple[Shape, ...]) -> list[Shape]:
        """The geometry of each namespace; often the same one several times."""
        first = rng.choice(shapes)
        return [first, *(first if rng.random() < 0.4 else rng.choice(shapes) for _ in range(rng.choice((0, 1, 1, 2))))]

    def _bounds(self, rng: Random) -> Bounds:
        slab_units = max(rng.choice((3, 4, 5, 7)), *(shape.slot_units_max() for shape in self.shapes))
        chunks = rng.choice((6, 8, 12) if self.reads_much else (2, 3, 4, 6) if self.has_disk else (1, 3, 6, 9, 16))
        chunks = rng.choice((9, 16, 30)) if self.cuts_much else chunks
        chunks = rng.choice((9, 16, 30)) if self.pledges_much else chunks
        chunk_bytes = max(shape.chunk_units() for shape in self.shapes) * SLOT_ALIGN
        units = chunk_bytes // SLOT_ALIGN * chunks
        chunk_slabs = max(shape.chunk_slabs(slab_units) for shape in self.shapes)
        slabs = max(rng.choice((2, 3)), chunk_slabs, -(-units // slab_units))
        bounds = replace(
            bounds_from(Config()),
            request_lines="none",
            arena_bytes=slabs * slab_units * SLOT_ALIGN,
            slab_bytes=slab_units * SLOT_ALIGN,
            sessions_max=self._tight(rng, (9, 11), 64),
            caches_max=self._tight(rng, (3, 5), 64),
            namespaces_max=self._namespaces_max(rng),
            chunks_max=1000 if self.mixes_sizes else rng.choice((3, 7, 1000, 1000, 1000, 1000)),
            forget_chunks=rng.choice((1, 1, 2) if self.cuts_much else (1, 2, 3, 256)),
            leases_max=self._tight(rng, (1, 4), 64),
            jobs_max=self._tight(rng, (1, 2), 16),
            descriptors_max=rng.choice((3, 7)),
            lease_ttl_ms=self.ms(rng.choice((40, 200, 900))),
            lease_extended_ms=self.ms(rng.choice((10, 150))),
            pledges_max=rng.choice((1, 3, 16)),
            pledges_total_max=rng.choice((2, 5, 64)),
            pledged_percent_max=rng.choice((25, 60, 100)),
            pledge_ttl_ms=self.ms(rng.choice((900, 5000) if self.pledges_much else (60, 900))),
            pledge_patience_ms=self.ms(rng.choice((300, 900) if self.pledges_much else (30, 300))),
            reserve_ttl_ms=self.ms(rng.choice((60, 300, 900))),
            attach_ttl_ms=self.ms(rng.choice((100, 600))),
            job_ttl_ms=self.ms(rng.choice((150, 1500))),
            mover_grace_ms=self.ms(rng.choice((40, 300))),
            mover_start_ms=self.ms(rng.choice((100, 600))),
            eviction_policy="arc" if self.has_arc else "lru",
            tenants=draw_quotas(rng, slabs * slab_units * SLOT_ALIGN, chunk_bytes) if self.has_quotas else (),
            kv_events=rng.random() < 0.8,
            holds_max=rng.choice((1, 3, 64)),
            held_percent_max=rng.choice((20, 50)),
            **self._disk(rng),
        )
        if not (self.has_quotas and self.has_disk and rng.random() < 0.8):
            return bounds
        if not self.begins_cold:
            bounds = self._scarce(rng, bounds)
        return replace(bounds, tenants=draw_disk_quotas(rng, bounds, chunk_bytes))

    @staticmethod
    def _scarce(rng: Random, bounds: Bounds) -> Bounds:
        """Disks too small for the tenants: every stored chunk is written, and room must be made for it."""
        segments = rng.choice((1, 2, 3, 4))
        return replace(
            bounds,
            disk_devices=rng.choice((1, 1, 2)),
            disk_device_bytes=segments * bounds.disk_segment_bytes,
            disk_write_through=True,
            disk_second_touch=False,
            disk_daily_write_bytes=0,
        )

    def _namespaces_max(self, rng: Random) -> int:
        if self.loses_devices:
            return rng.choice((1, 1, 2, 5))  # few, so that notes are forgotten
        return 5 if self.begins_cold else self._tight(rng, (1, 2), 5)

    def _disk(self, rng: Random) -> dict[str, int]:
        """Disk settings: in most seeds there are devices, slightly larger or smaller than the arena."""
        if not self.has_disk:
            return {}
        largest = max(shape.slot_units_max() for shape in self.shapes)
        segment_units = 1 + (largest + 1) * rng.choice((1, 2, 3)) + rng.choice((0, 1))
        segments = rng.choice((3, 4, 5) if self.mixes_sizes else (9, 17, 29) if self.begins_cold else (2, 5, 9, 17))
        return {
            "disk_devices": rng.choice(
                (1, 1, 2, 2, 3, 8) if self.mixes_sizes else (2, 2, 3) if self.loses_devices else (1, 1, 2, 3)
            ),
            "disk_device_bytes": segments * segment_units * SLOT_ALIGN,
            "disk_segment_bytes": segment_units * SLOT_ALIGN,
            "disk_run_tokens": rng.choice((1, 8, 32, 16_384)),
            "disk_write_through": self.mixes_sizes or rng.random() < 0.4,
            "disk_second_touch": not self.mixes_sizes and rng.random() < 0.2,
            "disk_daily_write_bytes": 0 if self.mixes_sizes else rng.choice((0, 0, 0, 24 * 7 * SLOT_ALIGN)),
            "disk_clean_percent": rng.choice((10, 50, 90)),
            "disk_jobs_max": rng.choice((1, 3, 32)),
            "read_room_ms": self.ms(rng.choice((1, 20, 100))),
            "disk_job_ms": self.ms(rng.choice((150, 1500))),
            "disk_restart_ms": self.ms(rng.choice((5, 100))),
            "recompute_tokens_per_s": 0 if self.reads_much else rng.choice((0, 0, 1_000_000, 1_000_000_000)),
            "notes_max": 0 if segments < 17 or self.loses_devices else 1024,
            "prefix_notes_kept": 0 if segments % 2 else 512,
        }


def _strength(rng: Random) -> float:
    return rng.choice((0.0, 0.3, 1.0, 1.0, 1.0, 4.0))
