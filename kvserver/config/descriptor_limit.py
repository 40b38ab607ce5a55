"""How the descriptors that a process may have are shared out in the brain, so that they never run out.

The limit is known at the start (RLIMIT_NOFILE, hard), and every number of connections comes from it.
"""

import logging
import resource
from dataclasses import dataclass

import msgspec

from kvserver import logs
from kvserver.config.config import Config
from kvserver.errors import ConfigError

LOCAL_CONNECTIONS_PER_SESSION = 4
OFFERS_EACH = 2
"""Descriptors that any session may have offered at any time, whatever others have."""
SESSION = 1 + LOCAL_CONNECTIONS_PER_SESSION + 2 + OFFERS_EACH
"""Its connection at the ZeroMQ door, those at the local one, its board, a pidfd of its worker, and offers."""
OFFERS_PER_SESSION = 64
OFFERS_MIN = 64
STRANGERS_MIN, STRANGERS_MAX = 32, 1024
"""At each of the two doors."""
MOVERS = 2 * 64
"""A socket and a pidfd of each that there may be (state.Bounds)."""
EVENTS = 1300
"""Subscribers at the two sockets, refused ones, and connections that ZeroMQ accepts before it tells
(connection_limit.py)."""
OTHERS = 192
"""HTTP (64), the log, the ledger, libraries, and descriptors that are open for a moment."""


@dataclass(frozen=True, slots=True)
class Share:
    sessions: int
    offers: int
    """Descriptors that were offered and are with no mover yet, of all sessions together and beside OFFERS_EACH."""
    strangers: int
    """Connections without a session, at each of the two doors."""


def raise_limit() -> None:
    """As many as the machine allows. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit(config: Config) -> tuple[Config, Share]:
    """The configuration with as many sessions as there are descriptors for, which the log tells. Raises ConfigError."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = share(config, limit)
    if shared.sessions < config.sessions_max:
        fields = ("sessions_max", config.sessions_max), ("sessions", shared.sessions), ("RLIMIT_NOFILE", limit)
        logs.event(logging.WARNING, "fewer sessions than configured", *fields)
    return msgspec.structs.replace(config, sessions_max=shared.sessions), shared


def share(config: Config, limit: int) -> Share:
    """Raises ConfigError when not even one session fits."""
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    fixed = OTHERS + MOVERS + (EVENTS if config.events_endpoint else 0)
    spare = limit - fixed - OFFERS_MIN - 2 * STRANGERS_MIN
    sessions = min(config.sessions_max, spare // SESSION)
    if sessions < 1:
        needed = limit - spare + SESSION
        raise ConfigError(
            "descriptors",
            f"the process may have {limit} open files (RLIMIT_NOFILE); expected at least {needed}, and "
            f"{needed + (config.sessions_max - 1) * SESSION} for sessions_max={config.sessions_max}",
        )
    spare -= sessions * SESSION
    strangers = min(STRANGERS_MAX, STRANGERS_MIN + spare // 8)
    spare -= 2 * (strangers - STRANGERS_MIN)
    return Share(sessions, min(sessions * OFFERS_PER_SESSION, OFFERS_MIN + spare), strangers)
