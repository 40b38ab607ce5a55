"""Engines, their sessions, and the connections of each."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvserver.service.holdings.accounts import Account
from kvserver.service.state.table import Table

if TYPE_CHECKING:
    from kvserver.service.state.caches import Cache


@dataclass(slots=True, eq=False)
class Engine:
    """An engine: all sessions with the same (engine, epoch)."""

    name: str
    epoch: int
    ranks: int
    sessions: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    accounts: set[Account] = field(default_factory=set)
    """Accounts of the caches that the engine has registered; empty without quotas. Lookups find chunks of these
    accounts only."""


@dataclass(slots=True, eq=False)
class Session:
    """One client process."""

    number: int
    token: bytes
    engine: Engine
    rank: int
    software: str
    attached_peer: int = 0
    peers: set[int] = field(default_factory=set)
    offered: set[int] = field(default_factory=set)
    caches: dict[str, "Cache"] = field(default_factory=dict)
    jobs: set[int] = field(default_factory=set)
    pledges: set[int] = field(default_factory=set)
    ended: bool = False

    def attach(self, peer: int) -> None:
        """This connection is held for as long as the process lives."""
        self.attached_peer = peer

    def end(self) -> None:
        self.ended = True


class Sessions(Table[Session]):
    """All sessions by number, token and connection, and all engines."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: dict[tuple[str, int], Engine] = {}
        self.by_token: dict[bytes, Session] = {}
        self.by_peer: dict[int, Session] = {}

    def engine(self, name: str, epoch: int, ranks: int) -> Engine:
        """The engine of that name. A new one is kept once it has a session."""
        return self.engines.get((name, epoch)) or Engine(name, epoch, ranks)

    def open(self, session: Session, peer: int) -> None:
        engine = self.engines.setdefault((session.engine.name, session.engine.epoch), session.engine)
        engine.sessions.add(session.number)
        self._rows[session.number] = self.by_token[session.token] = session
        self.join(session, peer)

    def join(self, session: Session, peer: int) -> None:
        """The connection belongs to the session from now on."""
        self.by_peer[peer] = session
        session.peers.add(peer)

    def leave(self, peer: int) -> Session | None:
        """Takes away a closed connection. Returns the session that it belonged to."""
        session = self.by_peer.pop(peer, None)
        if session is not None:
            session.peers.discard(peer)
        return session

    def close(self, session: Session) -> tuple[int, ...]:
        """Removes a session, and its engine with the last one. Returns the connections that it had."""
        session.end()
        del self._rows[session.number]
        del self.by_token[session.token]
        peers = tuple(sorted(session.peers))
        for peer in peers:
            self.leave(peer)
        engine = session.engine
        engine.sessions.discard(session.number)
        if not engine.sessions:
            del self.engines[engine.name, engine.epoch]
        return peers
