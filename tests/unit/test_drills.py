"""The deliberate bugs of the drills still fit the code. The drills themselves take too long for every change."""

from pathlib import Path
from typing import Any

import pytest

from tests.client_drill.mutations import MUTATIONS as OF_CLIENT
from tests.device.mutations import MUTATIONS as OF_DEVICE
from tests.offload_sim.mutations import MUTATIONS as OF_OFFLOAD
from tests.sim.drill import MUTATIONS as OF_SERVICE

ROOT = Path(__file__).resolve().parents[2]

BUGS = [
    *((f"kvserver/{bug.file}", bug) for bug in OF_SERVICE),
    *((f"client/kvclient/{bug.file}", bug) for bug in (*OF_OFFLOAD, *OF_CLIENT)),
    *((bug.file, bug) for bug in OF_DEVICE),
]


@pytest.mark.parametrize(("file", "bug"), [pytest.param(file, bug, id=bug.name) for file, bug in BUGS])
def test_a_bug_has_one_place_to_be_made_and_leaves_a_program(file: str, bug: Any) -> None:
    text = (ROOT / file).read_text()
    assert text.count(bug.old) == 1
    assert bug.new != bug.old
    if file.endswith(".py"):
        compile(text.replace(bug.old, bug.new), file, "exec")
