"""An hour of traffic for the router's index: `python -m tests.sim.router_hour [--minutes 60] [--seed 0]`.

Conversations grow, and leave DRAM for disk, and disk for good, the least recently used first. Messages get lost, and
the server begins anew now and then. The index is compared every ten minutes. It takes a few minutes.
"""

import argparse
from collections import Counter, OrderedDict
from random import Random

from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, Tier

from .content import Path, key_of
from .router import Router
from .shapes import GroupShape, Shape
from .subscriber import Fact

DIGEST = bytes([7]) * 32
SHAPE = Shape("hour", 16, 1, (GroupShape(4, "full", 0, 1, 1, 1, (1000,)),))
REQUESTS_PER_MINUTE = 120
TURN_CHUNKS, DEPTH_MAX = 8, 60
DRAM_CHUNKS, DISK_CHUNKS = 8_000, 40_000
RESTART = 0.0005
"""For each request."""


class Server:
    """Two tiers, each the least recently used first. A chunk is written to disk when it leaves DRAM."""

    def __init__(self) -> None:
        self.tiers: dict[Tier, OrderedDict[Path, None]] = {"dram": OrderedDict(), "disk": OrderedDict()}

    def use(self, path: Path) -> list[KvEvent]:
        """A request stores or reads all chunks of a prompt. Heads are the last to go."""
        events: list[KvEvent] = []
        for depth in range(len(path)):
            chunk = path[: depth + 1]
            if chunk not in self.tiers["dram"]:
                events.append(ChunksStored(DIGEST, "dram", key_of(chunk[:-1]), [key_of(chunk)], SHAPE.chunk_tokens))
        for depth in reversed(range(len(path))):
            for tier in self.tiers.values():
                if path[: depth + 1] in tier or tier is self.tiers["dram"]:
                    tier[path[: depth + 1]] = None
                    tier.move_to_end(path[: depth + 1])
        while len(self.tiers["dram"]) > DRAM_CHUNKS:
            chunk = self.tiers["dram"].popitem(last=False)[0]
            if chunk not in self.tiers["disk"]:
                self.tiers["disk"][chunk] = None
                events.append(ChunksStored(DIGEST, "disk", key_of(chunk[:-1]), [key_of(chunk)], SHAPE.chunk_tokens))
            events.append(ChunksRemoved(DIGEST, "dram", [key_of(chunk)]))
        while len(self.tiers["disk"]) > DISK_CHUNKS:
            events.append(ChunksRemoved(DIGEST, "disk", [key_of(self.tiers["disk"].popitem(last=False)[0])]))
        return events

    def restarted(self) -> list[KvEvent]:
        """What another life of the brain tells."""
        events: list[KvEvent] = [Begun(len(self.tiers["dram"]))]
        for tier, chunks in self.tiers.items():
            for chunk in sorted(chunks, key=len):
                events.append(ChunksStored(DIGEST, tier, key_of(chunk[:-1]), [key_of(chunk)], SHAPE.chunk_tokens))
        return events

    def facts(self) -> set[Fact]:
        return {(DIGEST, key_of(chunk), tier) for tier, chunks in self.tiers.items() for chunk in chunks}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.router_hour", description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, counts, server, brain = Random(options.seed), Counter[str](), Server(), 1
    router = Router(options.seed, {DIGEST: SHAPE}, counts, depth=1, fanout=1, is_large=True)
    router.told(brain, [Begun(0)])
    talks: list[Path] = [(number,) for number in range(40)]
    for minute in range(1, options.minutes + 1):
        for _ in range(REQUESTS_PER_MINUTE):
            place = int(rng.random() * len(talks))
            longer = talks[place] + tuple(int(rng.random() * 3) for _ in range(TURN_CHUNKS))
            counts["requests"] += 1
            counts["chunks asked for"] += len(longer)
            talks[place] = longer if len(longer) < DEPTH_MAX else (int(rng.random() * 1000),)
            router.sees(longer)
            router.told(brain, server.use(longer))
            if rng.random() < RESTART:
                brain += 1
                counts["restarts"] += 1
                for events in batches(server.restarted()):
                    router.told(brain, events)
        if minute % 10 == 0 or minute == options.minutes:
            router.check(server.facts(), set())
            known = {tier: len(chunks) for tier, chunks in server.tiers.items()}
            what = "some of what" if router.ways.is_incomplete else "what"
            print(f"minute {minute}: the index holds {what} the server holds: {known} chunks", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:<40}{count:>12}")


def batches(events: list[KvEvent]) -> list[list[KvEvent]]:
    return [events[at : at + 100] for at in range(0, len(events), 100)]


if __name__ == "__main__":
    main()
