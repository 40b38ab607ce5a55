"""Log lines on standard error: `event key=value …` as text, or one JSON object a line. One line per state change.

Rule 1: logging never blocks, even if standard error is not read (a full pipe, a suspended terminal). A line that cannot
be written at once is dropped, and the next line has the number of dropped lines.
Rule 2: nothing is buffered, so the last line before a crash is written.
"""

import json
import logging
import os
import re
import select
import time

LINE_BYTES_MAX = select.PIPE_BUF
"""A pipe that is ready for writing takes this much at once and whole; longer lines are cut."""

TRACEBACK_CHARS_MAX = 3000
"""Length of the end of a traceback that is kept, which leaves room for the rest of the line."""

_auditor = logging.getLogger("kvserver.audit")
_auditor.setLevel(logging.INFO)

_PLAIN = re.compile(r"[^\s\"=\\]+")


def start(*, level: str, form: str, process: str) -> None:
    """Sends this process's log to standard error. process: its name in each line, such as brain or mover 3."""
    handler = LineHandler(2, JsonLines(process) if form == "json" else TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def event(level: int, name: str, *fields: tuple[str, object]) -> None:
    """Logs one state change."""
    logging.getLogger("kvserver").log(level, name, extra={"fields": fields})


def audit(*fields: tuple[str, object]) -> None:
    """Logs an operator's command, whatever the level is."""
    _auditor.info("admin", extra={"fields": fields})


def set_level(level: str) -> None:
    """Sets the lowest level that this process logs from now on."""
    logging.getLogger().setLevel(level.upper())


class LineHandler(logging.Handler):
    """Writes each line whole and at once to a descriptor, or drops it."""

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        if self.dropped:
            record.__dict__["lines_dropped"] = self.dropped
        line = self.format(record).encode(errors="replace")
        if len(line) >= LINE_BYTES_MAX:
            line = line[: LINE_BYTES_MAX - 4] + "…".encode()
        if self._write(line + b"\n"):
            self.dropped = 0
        else:
            self.dropped += 1

    def _write(self, line: bytes) -> bool:
        try:
            ready = self._poll.poll(0)
            return bool(ready) and bool(ready[0][1] & select.POLLOUT) and os.write(self._descriptor, line) == len(line)
        except OSError:  # closed, or its reader is gone
            return False


class TextLines(logging.Formatter):
    """Lines as text: 2026-01-31T12:00:00.123Z INFO brain cache registered cache=3 blocks=18432"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        said = " ".join(f"{name}={_text(value)}" for name, value in _fields(self, record))
        name = record.getMessage()
        head = f"{_time(record)} {record.levelname} {self._process} {name if name.isprintable() else _text(name)}"
        return f"{head} {said}" if said else head


class JsonLines(logging.Formatter):
    """Lines as JSON: {"time": "…", "level": "info", "process": "brain", "event": "cache registered", "cache": 3}"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
        }
        for name, value in _fields(self, record):
            line.setdefault(name, value if isinstance(value, int | float | str) else str(value))
        return json.dumps(line)


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> list[tuple[str, object]]:
    """The record's own fields, then a traceback if there is one, then the number of lines dropped before it."""
    fields = list(getattr(record, "fields", ()))
    if record.exc_info:
        fields.append(("traceback", formatter.formatException(record.exc_info)[-TRACEBACK_CHARS_MAX:]))
    dropped = getattr(record, "lines_dropped", 0)
    return [*fields, ("lines_dropped", dropped)] if dropped else fields


def _text(value: object) -> str:
    """The value bare if that is unambiguous, else quoted with escapes, so that it stays on one line."""
    text = str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
