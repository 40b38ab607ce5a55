"""Token files that are accepted and refused; a refusal never quotes a token."""

import os
from pathlib import Path

import pytest

from kvserver.cli.admin_client import AdminClient, read_token
from kvserver.config.admin_tokens import ENVIRONMENT, TOKENS_MAX, load
from kvserver.errors import ConfigError

GOOD = "a-token-that-is-long-enough"
OTHER = "another:token/that+is=long"


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = folder / "tokens"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


def test_names_belong_to_tokens(tmp_path: Path) -> None:
    tokens = load(written(tmp_path, f"\n# people\nalice: {GOOD}\n  bob:   {OTHER}  \n", 0o640), {})
    assert tokens.who(GOOD) == "alice"
    assert tokens.who(OTHER) == "bob"
    for wrong in ("", GOOD[:-1], GOOD + "x", GOOD.upper(), "alice", "\udcff"):
        assert tokens.who(wrong) is None
    assert GOOD not in repr(vars(tokens))


def test_a_token_alone_is_the_admins(tmp_path: Path) -> None:
    assert load(written(tmp_path, GOOD), {}).who(GOOD) == "admin"
    assert load("", {ENVIRONMENT: GOOD}).who(GOOD) == "admin"
    assert not load("", {})
    assert not load("", {ENVIRONMENT: ""})


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (f"alice: {GOOD}", 0o644, "mode 0644"),
        (f"alice: {GOOD}", 0o660, "mode 0660"),
        ("", 0o600, "0 tokens"),
        ("# nothing\n", 0o600, "0 tokens"),
        (f"alice: {GOOD}\nalice: {OTHER}", 0o600, "different names"),
        (f"{GOOD}\n{OTHER}", 0o600, "different names"),
        (f"alice: {GOOD} {GOOD}", 0o600, "NAME: TOKEN"),
        ("alice: short", 0o600, "5 characters"),
        ("x" * 600, 0o600, "600 characters"),
        (b"alice: \xff" + GOOD.encode(), 0o600, "ASCII"),
        ("a" * 70_000, 0o600, "larger than"),
        ("\n".join(f"n{number}: {GOOD}{number}" for number in range(TOKENS_MAX + 1)), 0o600, "65 tokens"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | bytes, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load(written(tmp_path, content, mode), {})
    assert refused.value.code == "admin-token"
    assert GOOD not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="admin-token"):
            load(str(path), {})


def test_a_caller_has_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_token(written(tmp_path, f"# mine\nalice: {GOOD}\n")) == GOOD
    assert read_token(written(tmp_path, f"{OTHER}\n")) == OTHER
    with pytest.raises(ConfigError, match="has 2 tokens"):
        read_token(written(tmp_path, f"alice: {GOOD}\nbob: {OTHER}\n"))
    monkeypatch.setenv(ENVIRONMENT, GOOD)
    assert read_token("") == GOOD
    monkeypatch.delenv(ENVIRONMENT)
    with pytest.raises(ConfigError, match="token-file"):
        read_token("")


@pytest.mark.parametrize("host", ["10.0.0.7", "kv.example.org", "localhost.example.org", "[2001:db8::1]", "0.0.0.0"])
def test_a_token_is_sent_to_this_machine_alone(host: str) -> None:
    with pytest.raises(ConfigError, match="not on this machine"):
        AdminClient(f"http://{host}:9710", GOOD)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.0.3"])
def test_this_machine_has_several_names(host: str) -> None:
    AdminClient(f"http://{host}:9710", GOOD)
