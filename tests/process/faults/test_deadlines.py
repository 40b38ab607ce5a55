"""Jobs that cannot meet their deadline are stopped, and other clients are not affected."""

import os

import msgspec

from kvserver._native import FAILED
from kvserver.wire import messages as wire
from tests.process.bad_input.abuse import GROUP, Abuser, Victim, refusal
from tests.process.engine import prompt
from tests.process.harness import stopped, until

BLOCKS, REGIONS = 240, 65_536
POOL_BYTES = 2 * BLOCKS * REGIONS
LONG_GROUP = msgspec.structs.replace(
    GROUP, blocks=BLOCKS, regions=[wire.RegionRun(0, 0, REGIONS, 2 * BLOCKS, 2, page_bytes=1)]
)
"""Fifteen million pages of one byte, none adjacent to another: the slowest layout for its size."""
STORY = prompt(970, chunks=BLOCKS // 3)
DEADLINE_MS = 1


def ask_late(victim: Victim, abuser: Abuser, request: wire.Store | wire.Retrieve) -> wire.Reply:
    """Sends a request whose deadline passes while its mover is stopped; returns the reply."""
    with stopped(victim.server.mover_pid()):
        number = abuser.send(msgspec.structs.replace(request, deadline_ms=DEADLINE_MS))
        began_s = victim.server.status().uptime_s
        until("the brain to look at its timers", lambda: victim.server.status().uptime_s > began_s + 0.3)
    reply = abuser.raw.zmq.receive()
    assert reply.id == number
    assert abuser.board.state(request.word) == (request.generation, FAILED)
    return reply


def test_a_long_job_is_stopped_at_its_deadline_and_its_mover_lives() -> None:
    """The mover serves all clients, so one client's deadline must not end it."""
    with Victim(mover_grace_ms=60_000, arena_bytes=32 << 20) as victim:
        with Abuser(victim) as abuser:
            os.ftruncate(abuser.pool, POOL_BYTES)
            registration = abuser.registration(abuser.pool, buffer_bytes=POOL_BYTES)
            abuser.cache = abuser.ask(registration, groups=[LONG_GROUP]).cache
            late = ask_late(victim, abuser, abuser.storing(STORY.keys, range(BLOCKS)))
            assert isinstance(late, wire.Stored)
            assert (late.chunks, late.why) == (0, "abandoned")
            victim.serves()
            assert abuser.ask(abuser.storing(STORY.keys, range(BLOCKS))).chunks == STORY.chunks
            retrieve = abuser.retrieving(abuser.lookup(STORY.keys).lease, range(BLOCKS))
            refusal(ask_late(victim, abuser, retrieve), "device", "abandoned", "its time was over")
        victim.unharmed()
