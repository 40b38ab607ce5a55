"""A wrong value that somebody types is refused in words, by the user's name for it, and nothing of Python shows."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kvserver.cli import main
from kvserver.cli.admin_client import AdminClient, read_token
from kvserver.config.config import KEYS
from kvserver.errors import ConfigError, KvError

INTERNALS = re.compile(
    r"Traceback|\[Errno|codec|invalid literal|\b(int|float) range|valid (int|float)\b|C unsigned|datetime|<class"
    r"|[a-z]Error\b"
)
WRONG = ("", "zz", "-7", "1.5", "nan", "inf", "9" * 400, "/nonexistent/x/y", "日本", '"', "[7")
CONFIG_KEYS = {key.name for key in KEYS} - {"socket"}
"""test_config.py has the values of each kind of key."""
ELSEWHERE = {"serve", "doctor", "replay", "bench"}
"""serve and doctor have the flags of config; replay and bench run programs of a checkout."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command by its words. typer's own types of them are private."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif name not in ELSEWHERE:
            yield (*path, name), command


PROGRAM = typer.main.get_command(main.app)
COMMANDS = dict(commands(PROGRAM))


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner makes all commands anew for each call, which takes longer than the call."""
    monkeypatch.setattr("typer.testing._get_command", lambda app: PROGRAM)


def said(*arguments: str) -> str:
    """What a command says, on both streams. Fails the test at an error that nobody foresaw."""
    try:
        done = CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)
    except KvError as error:
        return str(error)
    return done.output


def test_every_command_is_tried() -> None:
    assert {path[-1] for path in COMMANDS} >= {"status", "top", "explain", "disk", "size", "kvsize", "config"}
    assert len([path for path in COMMANDS if path[0] == "admin"]) == 10


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_wrong_value_is_refused_in_words(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each option and argument of the command gets each wrong value, while nobody serves."""
    monkeypatch.setenv("KVSERVER_ADMIN_TOKEN", "a" * 20)
    monkeypatch.chdir(tmp_path)
    nobody = {"socket": f"--socket={tmp_path}/none", "url": "--url=http://127.0.0.1:1"}
    parameters = COMMANDS[path].params
    there = [flag for name, flag in nobody.items() if any(parameter.name == name for parameter in parameters)]
    fill = ["ab" * 32 for parameter in parameters if parameter.param_type_name == "argument" and parameter.required]
    if path == ("disk",):
        fill = ["inspect"]
    for parameter in parameters:
        for value in WRONG if parameter.name not in CONFIG_KEYS else WRONG[1:7:5] if path == ("config",) else ():
            if parameter.param_type_name == "argument":
                arguments = [*there, "--", *fill, value] if not parameter.required else [*there, "--", value, *fill[1:]]
            elif parameter.name == "help" or getattr(parameter, "is_flag", False):
                continue
            else:
                arguments = [*there, f"{parameter.opts[0]}={value}", "--", *fill]
            text = said(*path, *arguments).replace(value, "") if value else said(*path, *arguments)
            assert not INTERNALS.search(text), (arguments, text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("top", "--refresh", "nan"), "option: refresh=nan must be seconds from 0.1 to 3600"),
        (("top", "--turns", "1.5"), "option: turns=1.5 must be a whole number from 0 to 1000000"),
        (("admin", "unpin", "x"), "option: hold=x must be a whole number from 0 to 9223372036854775807"),
        (("admin", "pin", "ab" * 32, "--for", "inf"), "option: for=inf must be seconds from 0.001 to 2592000"),
        (("size", "mooncake", "--requests", "1.5"), "option: requests='1.5' must be a whole number"),
        (("size", "mooncake", "--token-bytes", "7q"), "option: token_bytes='7q' must be bytes such as 4096 or 16GiB"),
        (("size", "mooncake", "--plot", "/nonexistent/x"), "plot: /nonexistent/x cannot be written: No such file"),
        (("status", "--socket", "x" * 200), "config-socket: socket='xxx"),
    ],
)
def test_a_refusal_names_the_option_and_what_was_expected(arguments: tuple[str, ...], words: str) -> None:
    assert said(*arguments).startswith(words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 99999999999]", "token id 99999999999 must be from 0 to 4294967295"),
        (b"9" * 5000, "must be from 0 to 4294967295"),
        (b"\xff", "is not text in UTF-8"),
        (b"[1, -2]", "expected token ids, as a JSON list"),
    ],
)
def test_a_wrong_file_of_tokens_is_refused_before_anybody_is_asked(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    for arguments in (("explain", "--tokens"), ("admin", "warm", "ab" * 32, "--chunk-tokens", "2", "--tokens")):
        text = said(*arguments, str(file))
        if "server-absent" not in text:  # explain needs the sizes of a server's chunks first
            assert words in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "foo", "https://::1"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        AdminClient(url, "token")


def test_a_token_that_no_header_carries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("日本\n")
    monkeypatch.setenv("KVSERVER_ADMIN_TOKEN", "two words")
    for path in (str(file), ""):
        with pytest.raises(ConfigError, match="printable ASCII without spaces"):
            read_token(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"arena_bytes = 1979-05-27", 'arena_bytes="1979-05-27" must be bytes'),
        (b"jobs_max = true", "jobs_max=true must be a whole number"),
        (b"socket = {a = 1}", 'socket={"a":1} must be text'),
        (b"\xff", "not a TOML file: it is not text in UTF-8"),
    ],
)
def test_a_wrong_value_in_a_file_is_shown_as_it_was_written(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "kvserver.toml"
    file.write_bytes(content)
    assert words in said("config", "--config", str(file))
