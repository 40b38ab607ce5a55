"""Remote stores under faults: python -m tests.process.remote_faults --faults 20000

`make test` runs a small part of it. Prints one line a scenario, with what happened and what readers got. Exits with
status 1 when a reader got a byte that no writer wrote, when a request failed or waited too long in an outage (with
servers; a directory needs bindfs), or when a chunk outlived its Clear."""

import argparse
import sys
from functools import partial

from tests.process.campaign import run_campaign
from tests.process.remote_faults.clears import run_clears
from tests.process.remote_faults.outages import KINDS, run_outages
from tests.process.remote_faults.scenarios import (
    run_files,
    run_http_proxy,
    run_mooncake,
    run_objects,
    run_proxy,
    run_values,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20_000, help="in all scenarios together")
    parser.add_argument("--outages", type=int, default=20, help="of a Valkey; of any other store a quarter of them")
    parser.add_argument("--stopped-s", type=float, default=60.0, help="length of each")
    parser.add_argument("--clears", type=int, default=1000, help="with short leases; with usual ones a fiftieth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    options = parser.parse_args()
    share = options.faults // 4
    scenarios = {
        "values": partial(run_values, share, options.seed),
        "files": partial(run_files, share, options.seed),
        "proxy": partial(run_proxy, share, options.seed),
        "proxy, many faults": partial(run_proxy, share, options.seed + 1, 0.12),
        # A call of S3 takes some twenty times as long as one of a Valkey.
        "objects of mooncake": partial(run_mooncake, share // 4, options.seed),
        "objects": partial(run_objects, share // 4, options.seed, kind="s3"),
        "objects of azure": partial(run_objects, share // 4, options.seed, kind="azure"),
        "proxy of s3": partial(run_http_proxy, share // 4, options.seed, kind="s3"),
        "proxy of azure": partial(run_http_proxy, share // 4, options.seed, kind="azure"),
        "outages of a valkey": partial(run_outages, options.outages, options.stopped_s, options.seed),
        "outages of s3": partial(run_outages, options.outages // 4, options.stopped_s, options.seed, kind="s3"),
        "outages of azure": partial(run_outages, options.outages // 4, options.stopped_s, options.seed, kind="azure"),
        "outages of a directory": partial(
            run_outages, options.outages // 4, options.stopped_s, options.seed, kind="directory"
        ),
        **{
            f"outages of a {kind}": partial(
                run_outages, options.outages // 4, options.stopped_s, options.seed, kind=kind
            )
            for kind in KINDS
            if kind.startswith("mooncake")
        },
        "clears, short leases": partial(run_clears, options.clears, options.seed, short=True),
        "clears, usual leases": partial(run_clears, options.clears // 50, options.seed, short=False),
    }
    return run_campaign("remote faults", scenarios, only=options.only)


if __name__ == "__main__":
    sys.exit(main())
