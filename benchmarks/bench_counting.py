"""What do metrics and logging cost? `python -m benchmarks.bench_counting [--json] [--smoke]`

One server, whose brain counts and logs every lookup of a phase and none of the next (half_counted/): no counters, no
histogram, no sketch of what was asked, no lines at the default level. So both arms are the same process with the same
memory, in turns of a tenth of a second. A counted phase and the two around it give a ratio.

counting_p50_ratio: medians of lookups as in bench_service, counted over not. counting_rate_ratio: seconds of as many
lookups and releases without a pause, with whatever is counted later. Of both 1.02 is the goal: 2 %.
"""

import argparse
import os
import random
import time

from benchmarks.bench_service import CHAIN_CHUNKS, PATIENT, fill, handle_us, lookups, percentile
from benchmarks.half_counted.sitecustomize import PHASE
from benchmarks.rows import Rows
from benchmarks.serving import free_port, serving
from kvclient.client import Client

NAMESPACE = bytes(31) + b"\x01"


def busy_s(client: Client, prompts: list[bytes], seed: int) -> float:
    """Seconds of a phase of lookups and releases, one after the other."""
    chosen = random.Random(seed).choices(prompts, k=PHASE)
    began = time.perf_counter()
    for keys in chosen:
        found = client.lookup(NAMESPACE, keys)
        assert found.chunks == CHAIN_CHUNKS, found
        assert found.lease is not None
        client.release(found.lease)
    return time.perf_counter() - began


def ratios(taken: list[float]) -> list[float]:
    """Of phases in turns, the first counted: each counted one over the mean of the two that are not, around it."""
    return [2 * taken[at] / (taken[at - 1] + taken[at + 1]) for at in range(2, len(taken) - 1, 2)]


def run(*, chains: int, rounds: int, as_json: bool) -> None:
    """rounds: of four phases."""
    rows = Rows("counting", as_json=as_json, config=f"{4 * rounds} phases of {PHASE} lookups of 512 chunks")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.path.join(os.path.dirname(__file__), "half_counted"), os.environ.get("PYTHONPATH")))
    )
    http_port = free_port()
    flags = "--http-port", str(http_port)
    with serving(flags, (chains << 21) + (64 << 20), engine="bench", timeouts=PATIENT) as (_, client):
        prompts = fill(client, NAMESPACE, chains)
        for number in range(4):  # two warm up
            busy_s(client, prompts, -1 - number)
        medians, seconds = [], []
        for number in range(4 * rounds):
            medians.append(percentile(lookups(client, NAMESPACE, prompts, PHASE, number), 0.5))
        for number in range(4 * rounds):
            seconds.append(busy_s(client, prompts, number))
        _, (_, counted) = handle_us(http_port, (0.0, 0.0))
        assert counted == (2 + 4 * rounds) * PHASE, f"{counted} lookups were counted, which is not half of them"
    rows.add("counted_p50_us", medians[0::2], "us")
    rows.add("uncounted_p50_us", medians[1::2], "us")
    rows.add("counting_p50_ratio", ratios(medians), "ratio")
    rows.add("counted_per_s", [PHASE / taken for taken in seconds[0::2]], "1/s")
    rows.add("uncounted_per_s", [PHASE / taken for taken in seconds[1::2]], "1/s")
    rows.add("counting_rate_ratio", ratios(seconds), "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    given = parser.parse_args()
    if given.smoke:
        run(chains=8, rounds=1, as_json=given.json)
    else:
        run(chains=200, rounds=25, as_json=given.json)


if __name__ == "__main__":
    main()
