"""The table in README.md of this folder: which test covers which of ATOM's scenarios."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.atom_engine.conftest import ATOM_DIR

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md").read_text()
COMMIT, SCENARIOS = "ffdf3bb", 233
NAMES = re.compile(r"`([a-z0-9_]+)`")
ROWS = [
    (scenario, test)
    for scenarios, test in re.findall(r"^\| (`.+`) \| `(.+::.+)` \|$", PAGE, re.M)
    for scenario in NAMES.findall(scenarios)
]


@cache
def functions_of(path: str) -> dict[str, str]:
    """Test function -> docstring."""
    body = ast.parse((ROOT / path).read_text()).body
    return {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}


def scenarios_told() -> Counter[str]:
    """How often each scenario occurs on the page."""
    return Counter(name for name in NAMES.findall(PAGE) if name != COMMIT)


def test_every_scenario_is_told_once() -> None:
    told = scenarios_told()
    assert [name for name, times in told.items() if times > 1] == []
    assert len(told) == SCENARIOS


@pytest.mark.parametrize(("scenario", "test"), ROWS, ids=[scenario for scenario, _ in ROWS])
def test_the_test_that_shows_it_is_there_and_names_it(scenario: str, test: str) -> None:
    path, name = test.split("::")
    assert name in functions_of(path)
    if path.startswith(("tests/atom_engine/", "tests/unit/atom/")):
        assert scenario in re.findall(r"\w+", functions_of(path)[name])


def test_both_pages_count_them() -> None:
    """Shown and not ours."""
    counts = (len(ROWS), len(set(scenarios_told())) - len(ROWS))
    manual = (ROOT / "docs" / "atom.md").read_text()
    in_manual = r"has the (\d+) of five files\. .+ show (\d+); (\d+) are not ours"
    assert re.findall(in_manual, manual) == [tuple(map(str, (SCENARIOS, *counts)))]
    in_page = r"(\d+) are shown, (\d+) not ours"
    assert re.findall(in_page, PAGE) == [tuple(map(str, counts))]


@pytest.mark.skipif(not ATOM_DIR, reason="ATOM_DIR names a checkout, whose tests are read")
def test_they_are_the_scenarios_that_atom_has() -> None:
    files = re.findall(r"^## .+ \(`(test_\w+\.py)`\)$", PAGE, re.M)
    assert len(files) == 5
    has = {
        name
        for file in files
        for name in re.findall(r"^ *(?:async )?def test_(\w+)", (Path(ATOM_DIR) / "tests" / file).read_text(), re.M)
    }
    assert set(scenarios_told()) == has
