"""The division of the brain's file descriptors among their uses, so that they never run out.

The limit is known at the start (RLIMIT_NOFILE, hard), and every bound on connections follows from it.
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
"""Offered descriptors that every session may have at any time, however many others have."""
SESSION = 1 + LOCAL_CONNECTIONS_PER_SESSION + 2 + OFFERS_EACH
"""Descriptors of one session: its ZeroMQ connection, its local ones, board, pidfd of its worker, and offers."""
OFFERS_PER_SESSION = 64
OFFERS_MIN = 64
STRANGERS_MIN, STRANGERS_MAX = 32, 1024
"""Bounds on connections without a session, at each of the two doors."""
SILENT_MIN, SILENT_MAX = 32, 448
"""Bounds on HTTP connections that have not sent their request. With 448, a flood of 10,000 connections a second leaves
each of them 45 ms to send it."""
MOVERS = 2 * 64
"""A socket and a pidfd for each possible mover (state.Bounds)."""
EVENTS = 1300
"""Subscribers at the two sockets, refused ones, and connections that ZeroMQ accepts before it reports them
(zmq_connection_limit.py)."""
OTHERS = 192
"""HTTP connections that are being answered (64), the log, the ledger, libraries, and descriptors that are open for a
moment."""


@dataclass(frozen=True, slots=True)
class Share:
    sessions: int
    offers: int
    """Offered descriptors that no mover has yet, of all sessions together, in addition to OFFERS_EACH."""
    strangers: int
    """Connections without a session, at each of the two doors."""
    silent: int
    """HTTP connections that have not sent their request."""


def raise_limit() -> None:
    """Raises the process's limit to what the machine allows. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit(config: Config) -> tuple[Config, Share]:
    """The configuration, with sessions_max reduced to what the descriptors allow, and the shares.

    Logs a reduction. Raises ConfigError when not even one session fits."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = share(config, limit)
    if shared.sessions < config.sessions_max:
        fields = ("sessions_max", config.sessions_max), ("sessions", shared.sessions), ("RLIMIT_NOFILE", limit)
        logs.event(logging.WARNING, "fewer sessions than configured", *fields)
    return msgspec.structs.replace(config, sessions_max=shared.sessions), shared


def share(config: Config, limit: int) -> Share:
    """The shares under a limit of descriptors. Raises ConfigError when not even one session fits."""
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 30
    fixed = OTHERS + MOVERS + (EVENTS if config.events_endpoint else 0)
    spare = limit - fixed - OFFERS_MIN - 2 * STRANGERS_MIN - SILENT_MIN
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
    silent = min(SILENT_MAX, SILENT_MIN + spare // 4)
    spare -= silent - SILENT_MIN
    return Share(sessions, min(sessions * OFFERS_PER_SESSION, OFFERS_MIN + spare), strangers, silent)
