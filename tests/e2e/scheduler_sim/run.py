"""Runs one seed: the events of a world, and then its end."""

from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvclient.vllm import release_differences
from tests.rigs.seeds import Outcome, failure

from .content import Meanings, Slots
from .engine import Engine, stand_ins
from .jobs import Jobs, RankClient, computed
from .server import Clock, SchedulerClient, Server
from .shapes import draw_day, draw_options
from .world import Outside, World


def run_seed(seed: int, events: int, model: Path, *, beside: bool = False, awaits: bool = False) -> Outcome:
    """Runs `events` events, then the end checks.

    model: a folder, of which only the configuration is read. beside: there is another connector that sometimes
    fails; otherwise the seed decides. awaits: other engines compute prompts too, which are awaited.
    """
    rng = Random(seed)
    options = draw_options(
        rng,
        beside=beside,
        awaits=awaits,
        has_windows=release_differences.reports_failed_requests(KVConnectorBase_V1),
        has_stages=release_differences.knows_stages(KVConnectorBase_V1),
    )
    day = draw_day(rng, options, beside=beside)
    clock, slots, meanings = Clock(), Slots(options.ranks, options.blocks), Meanings()
    server = Server(options, rng, clock, partial(computed, meanings, options))
    jobs = Jobs(options, day, rng=rng, server=server, slots=slots, meanings=meanings)
    asking = SchedulerClient(server, rng, clock)
    clients: dict[int, object] = {-1: asking} | {rank: RankClient(rank, jobs) for rank in range(options.ranks)}
    outside = Outside(clock, server, asking, jobs, slots, meanings)
    done = 0
    with stand_ins(clock, clients.__getitem__), closing(Engine(options, model)) as engine:
        try:
            world = World(options, day, rng=rng, outside=outside, engine=engine)
            while done < events:
                world.event()
                done += 1
            world.end()
        except Exception as problem:  # any failure must be reported with its seed
            return failure(seed, done, problem, more=f" {options} {day}")
    return Outcome(seed, done, world.counts, "")
