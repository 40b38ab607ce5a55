"""Chunks that engines compute now and have pledged to store, and who awaits them.

A pledge is on chunks that follow a held prefix, so they come in their order. Whoever awaits some of them pins the last
chunk that has come. The pin moves on in the step in which the next chunk becomes servable (Chunks tells this table), so
nothing can take a chunk in between. All else happens at the end of the event (requests/awaits.py).

Rule 1: a chunk is pledged by one session at a time. A pledge begins behind a servable chunk, never behind a pledged
one. So whoever pledges chunks awaits nothing that lies before them, and no two engines await each other.

Rule 2: an engine leaves some of the room for pledges to others, and so does a tenant (SHARES).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add
from typing import Literal, NamedTuple

from kvserver.errors import DeviceError
from kvserver.index.space import Node, Space
from kvserver.service.holdings.chunks import PledgeHolder
from kvserver.service.state.sessions import Engine, Session
from kvserver.service.state.table import Table
from kvserver.wire.messages import KEY_BYTES

DISTRUSTED_MAX = 4096
"""Broken words that are remembered."""


class Pledger(NamedTuple):
    """Who has pledged something, by what outlasts its sessions."""

    tenant: int
    """Tag of the tenant."""
    engine: str
    """Name of the engine within its tenant."""


class Size(NamedTuple):
    """A part of the room for pledges."""

    pledges: int
    chunks: int
    """Chunks that are still to come."""
    slot_bytes: int
    """Slot bytes of all their chunks."""


NOTHING = Size(0, 0, 0)
SHARES = ((1, 1), (7, 8), (3, 4))
"""Shares of the room. All pledges take all of it; those of a tenant so much of what other tenants leave; those of an
engine so much of what other engines leave."""


PledgeEnd = Literal["stored", "withdrawn", "died", "late", "not-stored", "cleared", "silent"]
"""How a pledge ends. stored: all of it came. late: its time is over, or it made no progress. not-stored: a store of it
was refused, cut short or failed. cleared: its chunks, or those before, are served no more. silent: another server
computes it, and is not heard any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class Wait:
    """Somebody awaits pledged chunks.

    Its functions refer to whoever waits. So that one gives the wait away at the end: the brain never collects cycles
    that have lived for a second (Shell._tick)."""

    holder: PledgeHolder
    pledge: "Pledge"
    until: int
    """The depth of the last chunk that it awaits."""
    on_come: Callable[[int], None]
    """(now_ns): that chunk has come. The wait is over."""
    on_end: Callable[[DeviceError, int], None]
    """(error, now_ns): it will not come. The wait is over."""


@dataclass(slots=True, eq=False, kw_only=True)
class Pledge:
    """A session's word that its engine computes these chunks now, and will store them. Or the word of another server
    that it will write them to a store which both use (requests/computed_elsewhere.py)."""

    number: int
    session: Session | None
    """None: it is the word of another server."""
    pledger: Pledger
    space: Space
    after: bytes
    """Key of the chunk before the first that is still to come; empty at the beginning of a prompt."""
    keys: bytes
    """The packed keys of all its chunks."""
    slot_bytes: int
    """Slot bytes of all its chunks."""
    expires_ns: int
    moved_ns: int
    """When it was made, or a chunk of it came last."""
    store: str = ""
    """The store from which chunks of another server come."""
    epoch: int = 0
    """The epoch of the namespace in that store."""
    came: int = 0
    """Chunks of it that have come."""
    waits: dict[Wait, None] = field(default_factory=dict)

    @property
    def producer(self) -> str:
        """The engine that computes it, or the store from which it comes."""
        return self.session.engine.name if self.session is not None else self.store

    def is_of(self, engine: Engine) -> bool:
        """The engine computes it itself."""
        return self.session is not None and self.session.engine is engine

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def to_come(self) -> bytes:
        """The packed keys of the chunks that are still to come."""
        return self.keys[self.came * KEY_BYTES :]

    def due_ns(self, patience_ns: int) -> int:
        """When it ends unless a chunk of it comes before."""
        return min(self.expires_ns, self.moved_ns + patience_ns)

    def advance(self, key: bytes) -> None:
        """The next chunk has come."""
        self.came += 1
        self.after = key

    def moved(self, now_ns: int) -> None:
        self.moved_ns = now_ns


class News(NamedTuple):
    """The news of pledges in one event."""

    advanced: dict[Pledge, None]
    """Pledges of which chunks have come."""
    come: dict[Wait, None]
    """Waits whose last chunk has come."""
    broken: dict[Pledge, PledgeEnd]
    """Pledges whose next chunks will not come."""


class Pledges(Table[Pledge]):
    """All pledges: here, at their session if they have one, and by each key that is still to come."""

    def __init__(self, most: Size) -> None:
        """most: the room for all pledges together."""
        super().__init__()
        self._most = most
        self.taken: dict[tuple[int | str, ...], Size] = {}
        """Room that is taken: by all pledges (), by those of each tenant (its tag,) and of each engine (a Pledger)."""
        self.by_key: dict[tuple[bytes, bytes], Pledge] = {}
        """(namespace, key) of each chunk that is still to come. Empty: nobody has pledged anything."""
        self._distrusted: dict[tuple[Pledger, bytes, bytes], int] = {}
        """(who, namespace, key) of chunks that an engine pledged and did not store -> until when it may not pledge them
        again. The oldest first."""
        self.has_news = False
        self._news = News({}, {}, {})

    def begin(self, pledge: Pledge) -> None:
        self._rows[pledge.number] = pledge
        if pledge.session is not None:
            pledge.session.pledges.add(pledge.number)
        self._take(pledge, Size(1, pledge.chunks, pledge.slot_bytes))
        for key in _split(pledge.keys):
            assert (pledge.space.digest, key) not in self.by_key
            self.by_key[pledge.space.digest, key] = pledge

    def end(self, pledge: Pledge) -> list[Wait]:
        """Ends a pledge. Returns the waits that end with it, in the order in which they began."""
        del self._rows[pledge.number]
        if pledge.session is not None:
            pledge.session.pledges.discard(pledge.number)
        self._take(pledge, Size(-1, pledge.came - pledge.chunks, -pledge.slot_bytes))
        for key in _split(pledge.to_come):
            del self.by_key[pledge.space.digest, key]
        waits = list(pledge.waits)
        pledge.waits.clear()
        return waits

    def room(self, pledger: Pledger) -> Size:
        """The room for further pledges of an engine. Whoever holds much leaves room to who has nothing yet."""
        taken = [self.taken.get(pledger[:depth], NOTHING) for depth in range(len(SHARES))]
        return Size(*(max(0, _left(most, own)) for most, *own in zip(self._most, *taken, strict=True)))

    def _take(self, pledge: Pledge, size: Size) -> None:
        for depth in range(len(SHARES)):
            by = pledge.pledger[:depth]
            self.taken[by] = Size(*map(add, self.taken.get(by, NOTHING), size))
            if self.taken[by] == NOTHING:
                del self.taken[by]

    def distrust(self, pledge: Pledge, until_ns: int) -> None:
        """An engine has broken its word. It may not give it for the same next chunk again before then, nor may another
        session of that name."""
        broken = pledge.pledger, pledge.space.digest, pledge.to_come[:KEY_BYTES]
        self._distrusted.pop(broken, None)
        self._distrusted[broken] = until_ns
        if len(self._distrusted) > DISTRUSTED_MAX:
            del self._distrusted[next(iter(self._distrusted))]

    def is_distrusted(self, pledger: Pledger, space: Space, key: bytes, now_ns: int) -> bool:
        return now_ns < self._distrusted.get((pledger, space.digest, key), 0)

    def wait(self, wait: Wait) -> Wait:
        wait.pledge.waits[wait] = None
        return wait

    def leave(self, wait: Wait) -> None:
        """Gives up a wait. It does nothing after the wait's end."""
        wait.pledge.waits.pop(wait, None)
        self._news.come.pop(wait, None)

    def fail(self, wait: Wait, error: DeviceError, now_ns: int) -> None:
        """Ends one wait: nothing more will come for it."""
        self.leave(wait)
        wait.on_end(error, now_ns)

    def of(self, space: Space, key: bytes) -> Pledge | None:
        """The pledge on a chunk that is still to come."""
        pledge = self.by_key.get((space.digest, key))
        return pledge if pledge is not None and pledge.space is space else None

    def following(self, engine: Engine, space: Space, keys: bytes, held: int) -> tuple[Pledge | None, int]:
        """The pledge on what follows the held chunks of a prompt, and how many of them it brings. An engine awaits
        nothing of its own."""
        at = held * KEY_BYTES
        pledge = self.of(space, keys[at : at + KEY_BYTES])
        if pledge is None or pledge.is_of(engine) or pledge.after != keys[:at][-KEY_BYTES:]:
            return None, 0
        same = _same_keys(keys[at:], pledge.to_come)  # none: keys that are no chain leave out the next one
        return (pledge, same) if same else (None, 0)

    def take_news(self) -> News:
        news, self._news = self._news, News({}, {}, {})
        self.has_news = False
        return news

    # ---------------------------------------------------------------- what Chunks tells

    def servable(self, space: Space, node: Node) -> list[PledgeHolder]:
        """A chunk has become servable. Returns those who await it and pin the chunk before: their pins move to it."""
        pledge = self.of(space, node.key)
        if pledge is None or pledge in self._news.broken:
            return []
        before = node.parent
        assert before is not None
        is_next = pledge.keys[pledge.came * KEY_BYTES : (pledge.came + 1) * KEY_BYTES] == node.key
        is_next = is_next and before.key == pledge.after
        if not is_next or any(wait.holder.tail is not before for wait in pledge.waits):
            self.breaks(pledge, "not-stored")
            return []
        pledge.advance(node.key)
        self._take(pledge, Size(0, -1, 0))
        del self.by_key[space.digest, node.key]
        self._news.advanced[pledge] = None
        self.has_news = True
        holders = [wait.holder for wait in pledge.waits]
        depth = node.depth
        for wait in [wait for wait in pledge.waits if wait.until == depth]:
            del pledge.waits[wait]
            self._news.come[wait] = None
        return holders

    def gave_up(self, space: Space, key: bytes) -> None:
        """The slots reserved for a chunk were given up before it became servable."""
        pledge = self.of(space, key)
        if pledge is not None:
            self.breaks(pledge, "not-stored")

    def cleared(self, space: Space) -> None:
        """Nothing of a namespace is served any more."""
        for pledge in self.values():
            if pledge.space is space:
                self.breaks(pledge, "cleared")

    def breaks(self, pledge: Pledge, how: PledgeEnd) -> None:
        """The next chunks of a pledge will not come. It ends with the event."""
        self._news.broken.setdefault(pledge, how)
        self.has_news = True


def _left(most: int, taken: list[int]) -> int:
    """How much more an engine may take, if so much is taken by all, by its tenant and by itself."""
    shares = zip(taken, SHARES, strict=True)
    return min((most - taken[0] + own) * part // whole - own for own, (part, whole) in shares)


def _same_keys(ours: bytes, theirs: bytes) -> int:
    """How many leading keys are the same."""
    low, high = 0, min(len(ours), len(theirs)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low * KEY_BYTES : middle * KEY_BYTES] == theirs[low * KEY_BYTES : middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
