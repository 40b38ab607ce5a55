"""`python -m tests.drill [service cuts pledges digests remote objects offload client device] [--only WORDS]`

Exit status 1 when a bug survives or is stale.
Without a name, all but device: that one builds the native module for each of its bugs. --stale only looks which bugs
no longer fit the code, of all nine; it takes a second."""

import argparse
import sys

from tests.drill import client, cuts, device, digests, objects, offload, pledges, remote, service
from tests.drill.bugs import Bug, change_of
from tests.drill.report import try_all

DRILLS = {
    "service": service,
    "cuts": cuts,
    "pledges": pledges,
    "digests": digests,
    "remote": remote,
    "objects": objects,
    "offload": offload,
    "client": client,
    "device": device,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=__doc__)
    parser.add_argument("drills", nargs="*", choices=[*DRILLS, []], metavar="DRILL")
    parser.add_argument("--only", default="", help="bugs whose name or promise contains this")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.drills or (
        DRILLS if options.stale else ("service", "cuts", "pledges", "digests", "remote", "objects", "offload", "client")
    )
    notices = {
        bug: DRILLS[name].notice
        for name in names
        for bug in DRILLS[name].BUGS
        if options.only in f"{bug.promise} {bug.name}"
    }

    def notice(bug: Bug) -> str:
        return notices[bug](bug) if not options.stale else f"fits {change_of(bug).file}"

    return try_all(list(notices), notice, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
