"""The simulator's own books of pledges: who has pledged which chunk, and for how long anybody may count on it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvserver.service.base.effects import Effect, Log

from .memory import Wrong

MS = 1_000_000
SHARES = (7 / 8, 3 / 4)
"""Of what the others leave of the room for pledges: what a tenant may take, and an engine."""
DISTRUSTED_PATIENCES = 4
"""An engine that broke its word gives it for the same chunk again after so many times the patience."""


@dataclass(eq=False)
class PledgeFacts:
    session: int
    engine: object
    """The engine of the session, which tells engines with one name apart."""
    name: str
    tenant: str
    digest: bytes
    held: int
    before: bytes
    """The packed keys of the chunks that were held."""
    keys: list[bytes]
    """Its chunks, behind those that were held."""
    slot_bytes: int
    """Of all of them."""
    expires_ns: int
    store: str = ""
    """The store from which it comes, if another server computes it."""
    moved_ns: int = 0
    """When something of it was published, or became servable, last."""
    came: set[bytes] = field(default_factory=set)
    """Chunks of which something was published, or which became servable with one before them. They may have been
    evicted, and pledged again, since."""


class PledgePromises:
    """A chunk has one pledge, a pledge has a bound, and whoever awaits it is told the truth about it."""

    def __init__(self, counts: Counter[str], *, ttl_ms: int, patience_ms: int, room: tuple[int, int, int]) -> None:
        """room: the most pledges, chunks that are to come, and slot bytes of all of them."""
        self._counts = counts
        self.ttl_ms = ttl_ms
        self._patience_ms = patience_ms
        self._room = room
        self.living: dict[int, PledgeFacts] = {}
        self._broken: dict[tuple[str, bytes, bytes], int] = {}
        """(engine's name, namespace, key) of the chunk at which a word was broken -> when it is trusted again."""

    def made(self, number: int, facts: PledgeFacts, ttl_ms: int, now_ns: int) -> None:
        taken = {(other.digest, key) for other in self.living.values() for key in other.keys if key not in other.came}
        if number in self.living or any((facts.digest, key) in taken for key in facts.keys):
            raise Wrong(f"pledge {number} is on chunks that are pledged already")
        if now_ns < self._broken.get((facts.name, facts.digest, facts.keys[0]), 0):
            raise Wrong(f"pledge {number} of {facts.name} is believed, which broke its word for that chunk just before")
        facts.expires_ns = now_ns + min(ttl_ms, self.ttl_ms) * MS
        self.living[number] = facts
        self._check_shares(facts)

    def _check_shares(self, facts: PledgeFacts) -> None:
        """Whoever has just pledged something has left some of the room to others."""
        everybody = list(self.living.values())
        tenants = [other for other in everybody if other.tenant == facts.tenant]
        engines = [other for other in tenants if other.name == facts.name]
        taken, by_tenant, by_engine = map(_sizes, (everybody, tenants, engines))
        for what, mine, share in ("tenant", by_tenant, SHARES[0]), ("engine", by_engine, SHARES[1]):
            for most, of_all, own in zip(self._room, taken, mine, strict=True):
                if own > share * (most - of_all + own):
                    raise Wrong(f"pledges of one {what} take {mine} of {self._room}, all together {taken}")

    def awaited(self, engine: object, producer: str, digest: bytes, keys: list[bytes], first: int) -> int:
        """The pledge on the awaited chunks keys[first:]. Raises Wrong unless there is one, of another engine.

        The latest one counts: chunks of an earlier one may have come, gone and been pledged again."""
        for number, facts in reversed(self.living.items()):
            if facts.digest == digest and keys[first] in facts.keys:
                at = facts.keys.index(keys[first])
                if facts.engine is engine or (facts.store or facts.name) != producer:
                    raise Wrong(f"an engine awaits {producer}, and pledge {number} is of {facts.name}")
                if facts.keys[at : at + len(keys) - first] != keys[first:] or facts.held + at != first:
                    raise Wrong(f"more is awaited than pledge {number} promises, or something else")
                self._counts["chunks awaited"] += len(keys) - first
                return number
        raise Wrong(f"chunk {first} of a prompt is awaited, and nobody has pledged it")

    def published(self, digest: bytes, key: bytes, now_ns: int) -> None:
        for facts in self.living.values():
            if facts.digest == digest and key in facts.keys:
                facts.moved_ns = now_ns
                facts.came.add(key)

    def servable(self, servable: Callable[[bytes, bytes], int], now_ns: int) -> None:
        """Chunks that a disk or a store holds come without being published. servable: (namespace, packed keys of a
        prompt) -> how many leading chunks are servable."""
        for facts in self.living.values():
            came = facts.keys[: max(0, servable(facts.digest, facts.before + b"".join(facts.keys)) - facts.held)]
            if not facts.came.issuperset(came):
                facts.moved_ns = now_ns
                facts.came.update(came)

    def ended(self, effects: Sequence[Effect], now_ns: int) -> dict[int, int]:
        """The pledges that end now -> how many leading chunks of their prompts came."""
        ends = [dict(effect.fields) for effect in effects if isinstance(effect, Log) and effect.event == "pledge ended"]
        found: dict[int, int] = {}
        for end in ends:
            number, came = int(str(end["pledge"])), int(str(end["came"]))
            facts = self.living.pop(number)
            self._counts[f"pledge {end['how']}"] += 1
            if end["how"] == "stored" and came != len(facts.keys):
                raise Wrong(f"pledge {number} is said to be stored, and {came} of {len(facts.keys)} chunks came")
            patience_ns = self._patience_ms * MS
            if end["how"] == "not-stored" or (end["how"] == "late" and now_ns >= facts.moved_ns + patience_ns):
                self._counts["pledge broken"] += 1
                until_ns = now_ns + DISTRUSTED_PATIENCES * patience_ns
                self._broken[facts.name, facts.digest, facts.keys[came]] = until_ns
            found[number] = facts.held + came
        return found

    def check(self, now_ns: int, living: set[int], sessions: set[int]) -> None:
        """After a tick no pledge is left whose time is over, or whose session is."""
        if living != self.living.keys():
            raise Wrong(f"pledges {living} live, and {set(self.living)} were made and did not end")
        for number, facts in self.living.items():
            if not facts.store and facts.session not in sessions:
                raise Wrong(f"pledge {number} outlives its session")
            if now_ns >= min(facts.expires_ns, facts.moved_ns + self._patience_ms * MS):
                raise Wrong(f"pledge {number} lives longer than its time, or without progress")


def _sizes(pledges: Sequence[PledgeFacts]) -> tuple[int, int, int]:
    """How many they are, chunks of them that are to come, and slot bytes."""
    to_come = sum(len(facts.keys) - len(facts.came) for facts in pledges)
    return len(pledges), to_come, sum(facts.slot_bytes for facts in pledges)
