"""Progress: plain lines without a terminal; on a terminal a bar that is cleared at the end."""

import io

from rich.console import Console

from kvserver.cli.progress import PLAIN_S, Live, Plain


def test_plain_lines_are_the_first_the_last_and_some_between() -> None:
    lines: list[str] = []
    now_s = 50.0
    with Plain(lines.append, lambda: now_s) as show:
        for second in range(25):
            show(second, 25, f"at {second}")
            now_s += 1.0
    assert lines == ["at 0", f"at {PLAIN_S:.0f}", f"at {2 * PLAIN_S:.0f}", "at 24"]


def test_a_line_is_not_written_twice_at_the_end() -> None:
    lines: list[str] = []
    with Plain(lines.append, lambda: 1.0) as show:
        show(3, 3, "done")
        show(3, 3, "done")
    assert lines == ["done"]


def test_a_terminal_sees_the_line_and_how_far_it_is() -> None:
    terminal = io.StringIO()
    with Live(Console(file=terminal, force_terminal=True, width=80, _environ={})) as show:
        show(1, 4, "a quarter")
        show._progress.refresh()
    assert "a quarter" in terminal.getvalue()
