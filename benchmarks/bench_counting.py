"""What do metrics and logging cost? `python -m benchmarks.bench_counting [--json] [--smoke]`

Two servers side by side, alike but that the brain of one neither counts lookups nor logs them (uncounted/): no
counters, no histogram, no sketch of what was asked, no lines at the default level. The lookups of bench_service, of the
one and the other in turns, in both orders; a pair gives a ratio.

counted_us, uncounted_us: medians of a round's lookups. counting_ratio: of the two in a pair, 1.02 is the goal's 2 %.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.bench_service import PATIENT, fill, handle_us, lookups, percentile
from benchmarks.rows import Rows
from benchmarks.serving import free_port, serving
from kvclient.client import Client

UNCOUNTED = str(Path(__file__).resolve().parent / "uncounted")
NAMESPACE = bytes(31) + b"\x01"


@contextmanager
def filled(chains: int, *, counted: bool) -> Iterator[tuple[Client, list[bytes]]]:
    """A client of a server that holds so many prompts, and their keys."""
    before = os.environ.get("PYTHONPATH")
    if not counted:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (UNCOUNTED, before)))
    try:
        http_port = free_port()
        flags = "--http-port", str(http_port)
        with serving(flags, (chains << 21) + (64 << 20), engine="bench", timeouts=PATIENT) as (_, client):
            prompts = fill(client, NAMESPACE, chains)
            lookups(client, NAMESPACE, prompts, 1, 0)
            _, (_, lookups_counted) = handle_us(http_port, (0.0, 0.0))
            assert lookups_counted == counted
            yield client, prompts
    finally:
        if not counted:
            os.environ.pop("PYTHONPATH")
            os.environ.update({} if before is None else {"PYTHONPATH": before})


def run(*, chains: int, count: int, pairs: int, as_json: bool) -> None:
    rows = Rows("counting", as_json=as_json, config=f"{pairs} pairs of {count} lookups of 512 chunks")
    with ExitStack() as stack:
        arms = [stack.enter_context(filled(chains, counted=counted)) for counted in (True, False)]
        taken: tuple[list[float], list[float]] = [], []
        for pair in range(-1, pairs):
            for arm in (0, 1) if pair % 2 else (1, 0):
                client, prompts = arms[arm]
                median_us = percentile(lookups(client, NAMESPACE, prompts, count, pair), 0.5)
                if pair >= 0:  # the first warms up
                    taken[arm].append(median_us)
    rows.add("counted_us", taken[0], "us")
    rows.add("uncounted_us", taken[1], "us")
    rows.add("counting_ratio", [one / other for one, other in zip(*taken, strict=True)], "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    given = parser.parse_args()
    if given.smoke:
        run(chains=8, count=20, pairs=2, as_json=given.json)
    else:
        run(chains=200, count=1000, pairs=21, as_json=given.json)


if __name__ == "__main__":
    main()
