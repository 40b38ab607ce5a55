"""`python -m tests.e2e.scheduler_sim.drill --model FOLDER`: breaks the connector on purpose, one bug at a time.

Reports what was noticed. Exit status 1 if a bug survives. Each bug is patched in while seeds run, until one fails.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from kvclient.offload.decide import Offload
from kvclient.offload.job_ends import Ends
from kvclient.offload.lookups import Lookups
from kvclient.offload.pledging import Pledging
from kvclient.vllm import connector as vllm
from kvclient.vllm import release_differences
from kvclient.vllm.keys import Keyer
from kvclient.vllm.other_connectors import UncheckedLoads
from kvclient.vllm.pins import Pins
from tests.drill.report import try_all

from .run import run_seed

SEED0 = 500_000
"""Not the seeds that run by default."""
EVENTS = 400

_computed = Offload.computed
_errors = vllm.KvServerConnector.get_block_ids_with_load_errors
_stats = vllm.KvServerConnector.get_kv_connector_stats
_init = UncheckedLoads.__init__
_forget = UncheckedLoads.forget


class Bug(NamedTuple):
    promise: str
    """Of tests/drill."""
    name: str
    owner: Any
    attribute: str
    replacement: Any
    beside: bool = False
    """The bug matters only beside another connector."""
    awaits: bool = False
    """It matters only where other engines are awaited."""


def _freed_by_the_first(pins: Any, job: int, rank: int) -> None:
    if job in pins._held:
        pins._free(job)


def _never_ahead(doubts: Any, block_tokens: int, *, steps_ahead: int = 0, workers_go_back: bool = True) -> None:
    _init(doubts, block_tokens)


def _told_by_the_first_rank(connector: Any) -> set[int]:
    return _errors(connector) if connector._rank == 0 else set()


def _untold_by_idle_steps(connector: Any) -> Any:
    counted = _stats(connector)
    return counted if connector.role != vllm.KVConnectorRole.SCHEDULER or connector._scheduler.busy() else None


def _forgotten(doubts: Any, name: str, *, said_tokens: int) -> None:
    doubts._loads.pop(name, None)
    _forget(doubts, name, said_tokens=said_tokens)


BUGS = (
    Bug("P1", "blocks of stores are not pinned", Pins, "pin", lambda pins, order: None),
    Bug("P1", "one rank's report frees the blocks of a store", Pins, "reported", _freed_by_the_first),
    Bug(
        "P1",
        "the next token counts as computed",
        Offload,
        "computed",
        lambda offload, request, tokens, now_s: _computed(offload, request, tokens + 1, now_s),
    ),
    Bug("P1", "keys stay the same behind a reset", Keyer, "reset", lambda keyer: None),
    Bug("P2", "a pledge that nobody keeps stays", Pledging, "stops", lambda pledging, it: None),
    Bug(
        "P2", "another engine is waited for without end", Lookups, "is_in_time", lambda lookups, it, answer, now_s: True
    ),
    Bug(
        "P2",
        "two connectors of one engine answer a proxy",
        release_differences,
        "is_made_by",
        lambda module: False,
    ),
    Bug(
        "P2",
        "a load waits whose request fails if it ends short",
        vllm,
        "_recomputes",
        lambda transfer: True,
        awaits=True,
    ),
    Bug(
        "P2",
        "loads wait in any number of blocks",
        vllm.KvServerConnector,
        "_await_tokens_max",
        lambda connector, transfer, kv_config: 1 << 30,
        awaits=True,
    ),
    Bug("P1", "all of a load that ended short came", Ends, "_wrong_blocks", lambda ends, order, right: (), awaits=True),
    Bug("P5", "leases are not given back", Lookups, "release", lambda lookups, lease: None),
    Bug(
        "P2",
        "failed loads are not told of",
        vllm.KvServerConnector,
        "get_block_ids_with_load_errors",
        lambda connector: set(),
    ),
    Bug(
        "P2",
        "failed loads are told of by the first stage's first rank alone",
        vllm.KvServerConnector,
        "get_block_ids_with_load_errors",
        _told_by_the_first_rank,
    ),
    Bug(
        "P1",
        "what another connector brings is there",
        UncheckedLoads,
        "holds_back",
        lambda doubts, *_, **__: False,
        True,
    ),
    Bug(
        "P1", "what it failed to bring for a request that is gone is right", UncheckedLoads, "forget", _forgotten, True
    ),
    Bug(
        "P7",
        "what an idle step has counted is not told",
        vllm.KvServerConnector,
        "get_kv_connector_stats",
        _untold_by_idle_steps,
    ),
    Bug(
        "P7",
        "what is counted in a step without an answer is told at once, and older releases drop it",
        vllm.KvServerConnector,
        "_may_lose_counts",
        lambda connector, config: False,
    ),
    # A former bug: wrong KV, from requests that vLLM itself confuses.
    Bug(
        "P1",
        "an engine that is a step ahead sets requests back as others do",
        UncheckedLoads,
        "__init__",
        _never_ahead,
        True,
    ),
    # A former bug: wrong output, because a window was taken for a prefix.
    Bug(
        "P1",
        "failed loads of windows alone are told by block",
        vllm,
        "_fails_by_block",
        lambda groups: len(groups) == 1,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.scheduler_sim.drill", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="most seeds for one bug")
    parser.add_argument("--model", type=Path, required=True, help="folder of a llama")
    options = parser.parse_args()
    return try_all(BUGS, lambda bug: _noticed(bug, options.seeds, options.model))


def _noticed(bug: Bug, seeds: int, model: Path) -> str:
    """The failing seed and its message; empty if none failed."""
    with mock.patch.object(bug.owner, bug.attribute, bug.replacement):
        for number in range(1, seeds + 1):
            outcome = run_seed(SEED0 + number, EVENTS, model, beside=bug.beside, awaits=bug.awaits)
            if outcome.problem:
                return f"{number}: {outcome.problem}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
