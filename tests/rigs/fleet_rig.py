"""Two brains with one remote store between them, whose movers obey when the test pumps."""

from array import array
from collections import defaultdict
from typing import Any

from kvserver.config.remotes import parse
from kvserver.index.space import ABSENT
from kvserver.remote.announcement import pack, unpack
from kvserver.remote.chunk_value import decode
from kvserver.service.base.effects import Instruct
from kvserver.service.base.events import Reported, Tick
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    AnnounceRemote,
    FetchRemote,
    ListenRemote,
    Order,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteHeard,
    RemoteIs,
    RemoteNoteRead,
    RemoteProbed,
    Report,
)
from tests.rigs.brain_rig import Rig
from tests.rigs.pledge_scene import Scene

SUM = (9).to_bytes(8, "little")
TICK_MS = 50


class SharedStore:
    """What two servers share."""

    def __init__(self) -> None:
        self.epoch = 77
        self.heads: dict[bytes, bytes] = {}
        """Key -> head of each chunk that is there."""
        self.log: list[int] = []
        """All marks that servers have told."""
        self.refuses: set[type[Order]] = set()
        """Orders that fail."""


class FleetRig(Rig):
    """The brain of one server."""

    def __init__(self, store: SharedStore, options: str = "", **bounds: Any) -> None:
        """options: of the store, as in its URL."""
        self.store = store
        self.waiting: list[tuple[int, Order]] = []
        """(mover, order) of what the movers of stores have not done yet."""
        self.done: defaultdict[type[Order], list[Any]] = defaultdict(list)
        """Orders that they have done."""
        self.holds: set[type[Order]] = set()
        """Orders that are not done for now."""
        self.heard = 0
        super().__init__(remotes=parse(f"fleet=file:///mnt/kv?tokens_min=0{options}"), **bounds)

    def handle(self, event: Any) -> None:
        before = len(self.effects)
        super().handle(event)
        for effect in self.effects[before:]:
            is_new = isinstance(effect, Instruct) and (effect.mover, effect.order) not in self.waiting
            if is_new and "Remote" in type(effect.order).__name__:
                self.waiting.append((effect.mover, effect.order))

    def pump(self) -> None:
        """The movers do what they were told, and what follows from it."""
        while some := [entry for entry in self.waiting if type(entry[1]) not in self.holds]:
            for mover, order in some:
                self.waiting.remove((mover, order))
                self.done[type(order)].append(order)
                self.handle(Reported(mover, self._carry_out(order)))

    def pass_ms(self, milliseconds: int) -> None:
        for _ in range(0, milliseconds, TICK_MS):
            self.now_ns += TICK_MS * 1_000_000
            self.handle(Tick())
            self.pump()

    def store_is(self, problem: str) -> None:
        """The mover of the store tells that it is open, or why not."""
        (tier,) = self.core.remotes
        assert tier.mover is not None
        self.report(tier.mover.number, RemoteIs(problem, []))

    def _carry_out(self, order: Order) -> Report:
        fault = "remote-down" if type(order) in self.store.refuses else ""
        match order:
            case ReadRemoteNote(job):
                return RemoteNoteRead(job, "", "here", self.store.epoch, b"")
            case AnnounceRemote(job):
                self.store.log += unpack(order.marks) if not fault else ()
                return RemoteEnded(job, fault, 1)
            case ListenRemote(job):
                told = self.store.log[self.heard :] if not fault else []
                self.heard += len(told)
                return RemoteHeard(job, fault, pack(told), not fault)
            case ProbeRemote(job, _, _, keys):
                asked = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
                heads = [self.store.heads.get(key, b"") if not fault else b"" for key in asked]
                return RemoteProbed(job, heads, [fault] * len(asked) if fault else [], 1)
            case PutRemote(job, head):
                if not fault:
                    self.store.heads[decode(head).key] = head
                return RemoteEnded(job, fault, 1)
            case FetchRemote(job, head, slots):
                parts = sum(slot != ABSENT for slot in array("q", slots))
                fault = fault or ("" if decode(head).key in self.store.heads else "gone")
                return RemoteEnded(job, fault, 1, SUM * parts if not fault else b"")
            case _:
                raise AssertionError(f"{order} is not for the mover of a store")


class Machine(Scene):
    """A server with an engine that computes and one that awaits."""

    rig: FleetRig

    def __init__(self, store: SharedStore, options: str = "", **bounds: Any) -> None:
        super().__init__(rig=FleetRig(store, options, **bounds))
        self.rig.pass_ms(2_000)


class Fleet:
    """Two servers: one computes prompts for others, one has engines that await them."""

    def __init__(self, options: str = "&pledged=write", **bounds: Any) -> None:
        """options: those of the store on the first server."""
        self.store = SharedStore()
        self.first = Machine(self.store, options, **bounds)
        self.second = Machine(self.store, **bounds)
        self.pass_ms(1_000)

    def pass_ms(self, milliseconds: int) -> None:
        for _ in range(0, milliseconds, TICK_MS):
            self.first.rig.pass_ms(TICK_MS)
            self.second.rig.pass_ms(TICK_MS)
