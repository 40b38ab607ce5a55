"""Charts are well-formed, and points lie where their values say."""

import xml.etree.ElementTree as ET

import pytest

from kvserver.sizing.chart import Line, Panel, draw, round_up, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_without_points_is_still_one() -> None:
    panel = Panel("a & b", [Line("<none>", [])], ticks(1.0), ticks(1.0))
    assert "a < b" in "".join(ET.fromstring(draw("a < b", [panel], "x")).itertext())


@pytest.mark.parametrize("dots", [False, True])
def test_points_lie_between_the_ends_of_the_axes_and_what_is_too_high_lies_at_the_top(dots: bool) -> None:
    """840 wide, 64 left and 24 right of the panel, which is 200 high below 62."""
    panel = Panel("", [Line("one", [(2.0, 0.0), (3.0, 5.0), (6.0, 17.0)])], [(2.0, "2"), (6.0, "6")], ticks(10.0), 200)
    root = ET.fromstring(draw("", [panel], "", dots=dots))
    if dots:
        found = [f"{dot.get('cx')},{dot.get('cy')}" for dot in root.iter(f"{SVG}circle")]
    else:
        (line,) = root.iter(f"{SVG}polyline")
        found = line.get("points", "").split()
    assert found == ["64.0,262.0", "252.0,162.0", "816.0,62.0"]


def test_one_size_alone_lies_in_the_middle() -> None:
    (line,) = ET.fromstring(draw("", [Panel("", [Line("one", [(3.0, 1.0)])], [(3.0, "8")], ticks(1.0))], "")).iter(
        f"{SVG}polyline"
    )
    assert line.get("points", "").startswith("440.0,")


@pytest.mark.parametrize(("value", "rounded"), [(0.0, 1.0), (0.13, 0.15), (1.0, 1.0), (61.0, 80.0), (90.0, 100.0)])
def test_the_end_of_an_axis_is_a_round_number(value: float, rounded: float) -> None:
    assert round_up(value) == pytest.approx(rounded)
