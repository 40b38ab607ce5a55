"""Differences between seeds: the engine's policies, shapes and bounds, and the rates of the server's faults."""

from dataclasses import dataclass
from random import Random

from kvclient.offload.values import Group, Options

NULL = 0


@dataclass(frozen=True)
class Ways:
    """The policies of this engine."""

    defers_free: bool
    """It keeps blocks of finished requests while a job needs them, and does not preempt requests with a job.

    It learns its own HBM prefix when it allocates, and stores what earlier steps computed. Otherwise it pins.
    """
    asks_early: bool
    looks_up_in_line: bool
    """A lookup is answered before match() returns to the engine."""
    tells_of_preemptions: bool
    takes_less: bool
    """It sometimes takes less than it is offered."""
    blocks: int
    step_tokens: int
    running_max: int


@dataclass(frozen=True)
class Day:
    """Chances of each fault."""

    store_short: float
    retrieve_fails: float
    evict: float
    restart: float
    down: float
    wipe: float
    preempt: float
    abort: float
    leap: float
    """The clock leaps: answers are late, leases expire."""
    timeout: float
    forget: float
    """The engine's prefix cache is emptied."""
    unkeyed: float
    unread: float


def draw_options(rng: Random) -> Options:
    full = Group(rng.choice((2, 3, 4)))
    block = full.block_tokens
    chunk = block * rng.choice((1, 2, 3))
    groups = [full]
    if rng.random() < 0.3:
        groups.append(Group(block, "window", rng.randint(1, 3 * chunk)))
    if rng.random() < 0.2:
        groups.append(Group(chunk, "state"))
    if rng.random() < 0.15:
        groups.append(Group(chunk))
    rng.shuffle(groups)
    stores, retrieves = rng.choice(((True, True),) * 8 + ((True, False), (False, True)))
    return Options(
        chunk_tokens=chunk,
        groups=tuple(groups),
        ranks=rng.choice((1, 1, 2, 3)),
        stores=stores,
        retrieves=retrieves,
        retrieve_tokens_min=rng.choice((0, 0, 0, 1, 7, 2 * chunk)),
        engine_steps_back=rng.random() < 0.5,
        resumes_output=rng.random() < 0.8,
        null_block=NULL,
        lookup_deadline_s=rng.choice((0.02, 0.1)),
        moment_s=rng.choice((0.02, 0.25)),
        lease_spare_s=rng.choice((0.0, 1.0)),
        ahead_max=rng.choice((0, 1, 3, 32)),
        retrieve_wait_s=rng.choice((0.0, 0.5)),
        retrieves_max=rng.choice((1, 2, 32)),
        stores_max=rng.choice((1, 2, 16, 16, 16)),
        store_chunks_max=rng.choice((1, 3, 2048, 2048, 2048)),
    )


def draw_ways(rng: Random, options: Options, tokens_max: int) -> Ways:
    plain = all(group.kind == "full" for group in options.groups)
    defers_free = plain and rng.random() < 0.35
    whole = sum(-(-tokens_max // group.block_tokens) + 1 for group in options.groups)
    return Ways(
        defers_free=defers_free,
        asks_early=rng.random() < 0.5,
        looks_up_in_line=defers_free or rng.random() < 0.4,
        tells_of_preemptions=rng.random() < 0.7,
        takes_less=plain and not defers_free and rng.random() < 0.3,
        blocks=1 + int(whole * rng.choice((1.2, 2.5, 6))),
        step_tokens=rng.choice((5, 17, 64)),
        running_max=rng.choice((2, 4, 8)),
    )


def draw_day(rng: Random) -> Day:
    def sometimes(chance: float, most: float) -> float:
        return rng.random() * most if rng.random() < chance else 0.0

    if rng.random() < 0.2:
        return Day(*(0.0,) * 10, forget=0.1, unkeyed=0.0, unread=0.0)
    return Day(
        store_short=sometimes(0.4, 0.5),
        retrieve_fails=sometimes(0.4, 1.0),
        evict=sometimes(0.5, 0.2),
        restart=sometimes(0.3, 0.05),
        down=sometimes(0.2, 0.1),
        wipe=0.3,
        preempt=sometimes(0.5, 0.2),
        abort=sometimes(0.5, 0.1),
        leap=sometimes(0.3, 0.1),
        timeout=sometimes(0.3, 0.3),
        forget=sometimes(0.9, 0.5),
        unkeyed=sometimes(0.3, 0.2),
        unread=sometimes(0.3, 0.2),
    )
