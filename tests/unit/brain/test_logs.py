"""Log lines: their two forms, and a reader who stops reading stops nobody."""

import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from kvserver import logs
from kvserver.logs import LINE_BYTES_MAX, JsonLines, LineHandler, TextLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def record(event: str = "cache registered", **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("kvserver", logging.WARNING, "", 0, event, (), None)
    made.__dict__["fields"] = tuple(fields.items())
    return made


def test_a_text_line_is_an_event_and_its_fields() -> None:
    line = TextLines("brain").format(record(cache=3, engine="a b", namespace="ab12", empty="", mode="x=y"))
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == 'WARNING brain cache registered cache=3 engine="a b" namespace=ab12 empty="" mode="x=y"'


def test_what_a_client_sent_cannot_forge_a_line() -> None:
    line = TextLines("brain").format(
        record(engine='x\n2026-01-01 ERROR "', tab="a\tb", escape="\x1b[2J", next="\u2028")
    )
    assert line.splitlines() == [line]
    assert "\x1b" not in line
    assert TextLines("brain").format(record("a\nb")).endswith(' WARNING brain "a\\nb"')


def test_a_json_line_is_one_object_with_numbers_as_numbers() -> None:
    line = JsonLines("mover 3").format(record(cache=3, share=0.5, engine="x\ny", path=None))
    assert "\n" not in line
    said = json.loads(line)
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "warning",
        "process": "mover 3",
        "event": "cache registered",
        "cache": 3,
        "share": 0.5,
        "engine": "x\ny",
        "path": "None",
    }


def test_a_field_cannot_replace_what_the_line_says_of_itself() -> None:
    assert json.loads(JsonLines("brain").format(record(level="debug", event="other")))["level"] == "warning"


def test_a_full_pipe_drops_lines_and_says_how_many(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = LineHandler(writer, TextLines("brain"))
    while handler.dropped < 5:
        handler.emit(record(padding="x" * 1000))
    while _read(reader):
        continue
    handler.emit(record("after"))
    handler.emit(record("later"))
    after, later = _read(reader).decode().splitlines()
    assert after.endswith("WARNING brain after lines_dropped=5")
    assert later.endswith("WARNING brain later")


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = LineHandler(writer, TextLines("brain"))
    handler.emit(record())
    os.close(writer)
    assert handler.dropped == 1


def test_a_long_line_is_cut_and_stays_a_line(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    LineHandler(writer, TextLines("brain")).emit(record(padding="é" * LINE_BYTES_MAX))
    written = _read(reader)
    assert len(written) <= LINE_BYTES_MAX
    assert written.endswith("…\n".encode())
    assert written.count(b"\n") == 1


def test_a_traceback_is_a_field_whose_end_is_kept() -> None:
    try:
        exec("\n" * 5 + "raise ValueError('y' * 9000 + 'the end')")
    except ValueError as error:
        failed = record()
        failed.exc_info = (type(error), error, error.__traceback__)
    said = json.loads(JsonLines("brain").format(failed))
    assert said["traceback"].endswith("the end")
    assert len(said["traceback"]) == logs.TRACEBACK_CHARS_MAX


def test_start_sends_events_of_a_level_to_standard_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logs.start(level="info", form="json", process="brain")
    logs.event(logging.DEBUG, "not this")
    logs.event(logging.INFO, "mover ready", ("mover", 7), ("pid", 11))
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "mover ready"
    assert json.loads(line)["pid"] == 11


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""
