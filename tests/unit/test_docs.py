"""What the documents list is what the code says: error codes, log events, the frames of the protocol."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvserver.wire import messages

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()

SPEAKERS = ("service", "wire", "index", "tiers", "transfer/layout.py", "doors.py", "server.py")
"""Where what a client hears is written, below kvserver/."""
ERRORS = {"RequestError": 0, "ResourceError": 0, "DeviceError": 0, "Error": 2, "_refuse_frame": 1}
"""Callables that take an error's code, and as which argument."""


def calls(*places: str) -> Iterator[tuple[str, list[ast.expr]]]:
    """(name, arguments) of every call below kvserver/."""
    for place in places:
        path = ROOT / "kvserver" / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    yield name, node.args


def texts(arguments: list[ast.expr], position: int) -> list[str]:
    """The text that stands there as a literal."""
    at = arguments[position] if position < len(arguments) else None
    return [at.value] if isinstance(at, ast.Constant) and isinstance(at.value, str) else []


def section(document: str, title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)
    return str(found)


def test_every_error_code_is_documented() -> None:
    said = {code for name, arguments in calls(*SPEAKERS) if name in ERRORS for code in texts(arguments, ERRORS[name])}
    assert len(said) > 40
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", section(PROTOCOL, "Errors"), re.MULTILINE))
    assert said - documented == set()


def test_every_documented_error_code_is_said_by_somebody() -> None:
    files = [*(ROOT / "kvserver").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    code = "\n".join(file.read_text() for file in files)
    documented = re.findall(r"^\| `([a-z-]+)` \|", section(PROTOCOL, "Errors"), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert [name for name in documented if not re.search(rf'"{name}[":]', code)] == []


def test_every_log_event_is_listed() -> None:
    (listed,) = re.findall(r"Log events: (.*?)\.\n", ARCHITECTURE, re.DOTALL)
    known = set(re.findall(r"`([^`]+)`", " ".join(listed.split())))
    places = ("service", "server.py", "holding.py", "supervisor.py", "mover.py", "cli.py")
    said = {text for name, arguments in calls(*places) if name == "event" for text in texts(arguments, 1)}
    said |= {text for name, arguments in calls("service") if name == "log" for text in texts(arguments, 0)}
    assert len(said) > 15
    assert said - known == set()


def test_the_protocol_tells_of_every_frame() -> None:
    frames = [*messages.Request.__args__, *messages.Reply.__args__]
    assert [frame.__name__ for frame in frames if not re.search(rf"\b{frame.__name__}\b", PROTOCOL)] == []
    assert f"Protocol number: **{messages.PROTOCOL}**" in PROTOCOL
