"""`python -m tests.drills_fit`: checks that the deliberate bugs of all drills still fit the code.

`make drill` asks first.
The drills take hours, so a stale bug is reported before they begin. Exit status 1 when there is one."""

from tests.client_drill.mutations import MUTATIONS as OF_CLIENT
from tests.device.mutations import MUTATIONS as OF_DEVICE
from tests.drilling import PACKAGES, ROOT, refuse_stale
from tests.offload_sim.mutations import MUTATIONS as OF_OFFLOAD
from tests.sim.drill import MUTATIONS as OF_SERVICE

DRILLS = (
    (PACKAGES["kvserver"], OF_SERVICE),
    (PACKAGES["kvclient"], (*OF_OFFLOAD, *OF_CLIENT)),
    (ROOT, OF_DEVICE),
)


def main() -> None:
    refuse_stale(*DRILLS)
    print(f"deliberate bugs that fit the code: {sum(len(bugs) for _, bugs in DRILLS)}")


if __name__ == "__main__":
    main()
