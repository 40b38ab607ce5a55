"""Agents and chat on one server: writes a key log (docs/OPERATING.md) for `kvserver size` of two traces at a time.

    python -m benchmarks.mixed_traffic claude-code mooncake --users 16 > mixed.jsonl
    kvserver size mixed.jsonl --pool-tokens 0 --blocks-per-chunk 8 --policy arc

The first trace is sessions, of so many users at any time, for as long as the arrivals of the second last; both in the
order of their recorded clocks. Agents are worker 0, chat is worker 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from heapq import merge
from itertools import takewhile
from operator import itemgetter

from kvserver.replay.options import ReplayOptions
from kvserver.replay.trace import load
from kvserver.replay.workload import Prompt, make_workload

BLOCK_TOKENS, BLOCKS_PER_CHUNK = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions")
    parser.add_argument("arrivals")
    parser.add_argument("--users", type=int, default=16)
    options = parser.parse_args()
    replay = ReplayOptions(
        requests=0, users=options.users, workers=1, block_tokens=BLOCK_TOKENS, context_tokens_max=100_000
    )
    chat = make_workload(load(options.arrivals), replay)
    agents = make_workload(load(options.sessions), replay)
    during = takewhile(lambda prompt: prompt.at_s <= chat[-1].at_s, agents)
    for _, line in merge(_lines("agents", 0, during), _lines("chat", 1, iter(chat)), key=itemgetter(0)):
        sys.stdout.write(line)


def _lines(name: str, worker: int, prompts: Iterator[Prompt]) -> Iterator[tuple[float, str]]:
    """When, and the line of the key log."""
    for prompt in prompts:
        ends = prompt.blocks[BLOCKS_PER_CHUNK - 1 :: BLOCKS_PER_CHUNK]
        entry = {"keys": [f"{name} {block}" for block in ends], "tokens": prompt.tokens, "worker": worker}
        yield prompt.at_s, json.dumps(entry) + "\n"


if __name__ == "__main__":
    main()
