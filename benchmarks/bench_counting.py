"""How much do metrics and logging cost? `python -m benchmarks.bench_counting [--json] [--smoke]`

One server, whose brain counts and logs lookups in one namespace but not in another (half_counted/): no counters, no
histogram, no sketch, no log lines at the default level. Both namespaces hold the same prompts. Each lookup is
followed by one in the other namespace, so that the machine's variations affect both alike.

counting_p50_ratio: medians of a round's lookups as in bench_service, counted / uncounted. counting_rate_ratio:
lookup and release without a pause, which includes the counting done after the answer. The goal for both is 1.02: 2
%.
"""

import os
import random
import time

from benchmarks.bench_service import CHAIN_CHUNKS, PATIENT, PAUSE_S, fill, handle_us, percentile
from benchmarks.half_counted.sitecustomize import UNCOUNTED
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import free_port, serving
from kvclient.client import Client

COUNTED_S_MAX = 20.0
COUNTED = bytes(31) + b"\x01"
NAMESPACES = COUNTED, UNCOUNTED


def turns(client: Client, prompts: list[list[bytes]], count: int, seed: int, pause_s: float) -> list[list[float]]:
    """Runs `count` lookups in each namespace, alternating. Returns microseconds to the answer; with a pause of 0, until
    the lease is released.
    """
    choose, taken = random.Random(seed), list[list[float]]([[], []])
    for _ in range(count):
        for arm in choose.sample((0, 1), 2):
            keys = choose.choice(prompts[arm])
            began = time.perf_counter()
            found = client.lookup(NAMESPACES[arm], keys)
            answered = time.perf_counter()
            assert found.chunks == CHAIN_CHUNKS, found
            assert found.lease is not None
            client.release(found.lease)
            taken[arm].append(((answered if pause_s else time.perf_counter()) - began) * 1e6)
            if pause_s:
                time.sleep(pause_s)
    return taken


def counted_lookups(http_port: int, awaited: int) -> float:
    """The count in /metrics once it reaches `awaited`, or after COUNTED_S_MAX."""
    due_s = time.monotonic() + COUNTED_S_MAX
    while True:
        _, (_, counted) = handle_us(http_port, (0.0, 0.0))
        if counted >= awaited or time.monotonic() > due_s:
            return counted


def run(*, chains: int, count: int, rounds: int, as_json: bool) -> None:
    rows = Rows("counting", as_json=as_json, config=f"{rounds} rounds of {count} lookups of 512 chunks each")
    here = os.path.dirname(__file__)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.path.join(here, "half_counted"), os.environ.get("PYTHONPATH")))
    )
    http_port = free_port()
    flags = "--http-port", str(http_port)
    with serving(flags, (2 * chains << 21) + (64 << 20), engine="bench", timeouts=PATIENT) as (_, client):
        prompts = [fill(client, namespace, chains) for namespace in NAMESPACES]
        turns(client, prompts, count, -1, 0)
        for name, pause_s in (("p50", PAUSE_S), ("rate", 0.0)):
            medians = [
                [percentile(taken, 0.5) for taken in turns(client, prompts, count, number, pause_s)]
                for number in range(rounds)
            ]
            rows.add(f"counted_{name}_us", [one for one, _ in medians], "us")
            rows.add(f"uncounted_{name}_us", [other for _, other in medians], "us")
            rows.add(f"counting_{name}_ratio", [one / other for one, other in medians], "ratio")
        half = (2 * rounds + 1) * count
        counted = counted_lookups(http_port, half)
        assert counted == half, f"{counted} lookups were counted, which is not half of them"


def main() -> None:
    given = option_parser(__doc__, smoke="tiny sizes").parse_args()
    if given.smoke:
        run(chains=8, count=20, rounds=2, as_json=given.json)
    else:
        run(chains=100, count=1000, rounds=11, as_json=given.json)


if __name__ == "__main__":
    main()
