"""A deliberate bug that no longer fits the code is reported, and hides no other. `make drill` tries all of them."""

from pathlib import Path

import pytest

from tests.drill.bugs import Bug, Stale, change_of
from tests.drill.report import try_all

CODE = "held = 3\nif held > 2:\n    held -= 1\nfreed = held\n"
FITS = Bug("P1", "counts wrong", "pools", r"held -= (\d)", r"held -= 1\1")
STALE = (
    (Bug("P1", "gone", "pools", "held -= 5", "held -= 6"), "gone: found 0 times in pools"),
    (Bug("P1", "anywhere", "pools", "held", "kept"), "anywhere: found 4 times in pools"),
    (Bug("P1", "idle", "pools", "freed", "freed"), "idle: changes nothing in pools/pool.py"),
    (Bug("P1", "torn", "pools", "if held", "if if held"), "torn: leaves no program of pools/pool.py"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools" / "pool.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(("bug", "told"), STALE, ids=[bug.name for bug, _ in STALE])
def test_a_bug_that_no_longer_fits_is_stale(root: Path, bug: Bug, told: str) -> None:
    with pytest.raises(Stale, match=told):
        change_of(bug, root)


def test_a_bug_is_found_in_whatever_file_of_its_folder_and_however_its_lines_are_broken(root: Path) -> None:
    (root / "pools" / "pool.py").rename(root / "pools" / "other.py")
    change = change_of(Bug("P1", "frees", "pools", r"if held > 2: held -= 1", "pass"), root)
    assert (str(change.file), change.text) == ("pools/other.py", "held = 3\npass\nfreed = held\n")
    assert "held -= 11" in change_of(FITS, root).text


def test_what_survives_or_is_stale_fails_the_drill_and_the_others_are_tried(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def notice(bug: Bug) -> str:
        return "a test" if "held -= 11" in change_of(bug, root).text else ""

    survivor = FITS._replace(name="counts nothing", put=r"held -= 2")
    assert try_all([FITS], notice) == 0
    assert try_all([survivor, FITS], notice) == 1
    assert try_all([STALE[0][0], FITS], notice) == 1
    told = capsys.readouterr().out
    assert "SURVIVED counts nothing" in told
    assert "STALE gone" in told
    assert "1 bugs tried, 0 survived, 1 stale" in told
