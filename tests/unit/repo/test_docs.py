"""Lists in the documents agree with the code: error codes, log events, the frames of the protocol.

Every command, path and link that they give the reader exists."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.wire import messages

ROOT = Path(__file__).resolve().parents[3]
PROTOCOL = (ROOT / "docs" / "PROTOCOL.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
SHOWN = ROOT / "tests" / "e2e" / "README.md"
EXAMPLE = ROOT / "examples" / "pd" / "README.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), EXAMPLE, SHOWN]
FOREIGN = ("vllm.", "atom.", "pytest")
"""Name prefixes of foreign modules."""
WRAPPERS = ("kvclient.atom_serve",)
"""Modules that take another program's flags."""

SPEAKERS = ("service", "wire", "index", "tiers", "transfer/layout.py", "brain")
"""Rooms below kvserver/ that answer clients."""
ERRORS = {"RequestError": 0, "ResourceError": 0, "DeviceError": 0, "Error": 2, "_refuse_frame": 1}
"""Callables that take an error's code, with the position of that argument."""


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
    """The text of a literal argument at that position; empty for anything else."""
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
    places = ("service", "brain", "supervisor", "movers", "cli", "config")
    said = {text for name, arguments in calls(*places) if name == "event" for text in texts(arguments, 1)}
    said |= {text for name, arguments in calls("service") if name == "log" for text in texts(arguments, 0)}
    assert len(said) > 15
    assert said - known == set()


def test_the_protocol_tells_of_every_frame() -> None:
    frames = [*messages.Request.__args__, *messages.Reply.__args__]
    assert [frame.__name__ for frame in frames if not re.search(rf"\b{frame.__name__}\b", PROTOCOL)] == []
    assert f"Protocol number: **{messages.PROTOCOL}**" in PROTOCOL


# ---------------------------------------------------------------- commands, paths and links for the reader


def in_code(text: str) -> str:
    return "\n".join(re.findall(r"^```.*?^```|`[^`]+`", text, re.MULTILINE | re.DOTALL))


def sources_of(module: str) -> str:
    """The source text of a module or package, and of the benchmarks that it imports."""
    path = ROOT / module.replace(".", "/").replace("kvclient/", "client/kvclient/")
    files = list(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    text = "".join(file.read_text() for file in files)
    for name in set(re.findall(r"^from benchmarks\.(\w+)", text, re.MULTILINE)):
        files = [*path.parent.glob(f"{name}.py"), *path.parent.glob(f"{name}/*.py")]
        text += "".join(file.read_text() for file in files)
    return text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_document_exists(document: Path) -> None:
    code = in_code(document.read_text()).replace("\\\n", " ")
    code = re.sub(r'"[^"\n]*"', "", code)  # text passed on to another program
    for module, arguments in re.findall(r"python -m ([\w.]+)([^\n`]*)", code):
        if not module.startswith(FOREIGN):
            sources = sources_of(module)
            if module in WRAPPERS:
                continue
            wrong = [flag for flag in re.findall(r"(?<!\S)--[a-z-]+", arguments) if f'"{flag}"' not in sources]
            assert set(wrong) <= {"--help"}, (module, wrong)
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?<!\S)`?make ([a-z0-9-]+)", code)) <= set(targets)
    cli = (ROOT / "kvserver/cli/main.py").read_text()
    commands = re.findall(r'@app\.command\((?:"(\w+)")?.*\)\n(?:@.*\n)*def (\w+)', cli)
    known = {named or name for named, name in commands} | set(re.findall(r'add_typer\(.*name="(\w+)"', cli))
    assert set(re.findall(r"^`?kvserver ([a-z]+)", code, re.MULTILINE)) <= known


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_path_of_a_document_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("http")]
    assert [link for link in links if not (document.parent / link).exists()] == []
    paths = re.findall(r"`((?:benchmarks|client|csrc|deploy|docs|kvserver|tests|tools)/[\w./*-]+)`", text)
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []
    assert [anchor for anchor in re.findall(r"\]\(#([^)]*)\)", text) if anchor not in anchors(text)] == []


def anchors(text: str) -> list[str]:
    """Link anchors of a document's titles."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_title_of_another_document_leads_there(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+\.md)#([^)]+)\)", document.read_text())
    there = [(name, title) for name, title in links if title in anchors((document.parent / name).read_text())]
    assert there == links


def test_every_benchmark_is_in_the_page_about_performance() -> None:
    page = in_code((ROOT / "docs" / "performance.md").read_text())
    names = [path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"(`|bench[_ ]){name}\b", page)] == []


def test_what_make_bench_runs_is_what_its_page_says() -> None:
    dry = subprocess.run(["make", "-n", "bench", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (run,) = re.findall(r"for which in ([a-z ]+);", dry)
    (told,) = re.findall(r"make bench  .*: ([a-z ]+);", dry)
    assert told == run
    (page,) = re.findall(r"`make bench` runs \w+: (.*?)\.", (ROOT / "docs" / "performance.md").read_text())
    assert re.findall(r"`([a-z]+)`", page) == run.split()


def test_every_test_of_the_page_about_real_vllm_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", SHOWN.read_text())
    assert named
    assert [(path, name) for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()] == []
