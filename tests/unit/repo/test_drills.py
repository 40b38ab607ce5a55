"""A deliberate bug that no longer fits the code is reported before a drill begins. `make drill` checks all of them."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.drilling import refuse_stale

CODE = "held = 3\nif held > 2:\n    held -= 1\nfreed = held\n"


class Planted(NamedTuple):
    name: str
    old: str
    new: str
    file: str = "pool.py"


FITS = Planted("counts wrong", "held -= 1", "held -= 2")
STALE = (
    (Planted("gone", "held -= 5", "held -= 6"), "gone: its text stands 0 times in pool.py, expected once"),
    (Planted("anywhere", "held", "kept"), "anywhere: its text stands 4 times in pool.py, expected once"),
    (Planted("idle", "freed", "freed"), "idle: it changes nothing in pool.py"),
    (Planted("torn", "if held", "if if held"), "torn: what it leaves of pool.py is no program"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pool.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(("bug", "told"), STALE, ids=[bug.name for bug, _ in STALE])
def test_a_bug_that_no_longer_fits_ends_the_drill_and_is_named(folder: Path, bug: Planted, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        refuse_stale((folder, [FITS, bug]))


def test_all_that_are_stale_are_named_whichever_drill_they_are_of(folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        refuse_stale((folder, [STALE[0][0], FITS]), (folder, [STALE[2][0]]))
    for words in (STALE[0][1], STALE[2][1], "no longer fit the code: 2"):
        assert words in str(ended.value)


def test_bugs_that_fit_are_not_refused(folder: Path) -> None:
    refuse_stale((folder, [FITS]), (folder, [FITS]))
