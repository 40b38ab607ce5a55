"""Passwords are named, read from where they are, and never shown."""

import copy
import logging
import os
import pickle
from pathlib import Path

import msgspec
import pytest

from kvserver.errors import ConfigError
from kvserver.remote.secrets import Secret, SecretSource

PASSWORD = "k3ep-this-t0-yourself"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text(PASSWORD + "\n")
    return path


def test_a_secret_is_not_in_anything_that_shows_it() -> None:
    secret = Secret(PASSWORD)
    record = logging.LogRecord("kvserver", logging.INFO, __file__, 1, "%s %r", (secret, secret), None)
    shown = (
        str(secret),
        repr(secret),
        f"{secret}",
        f"{secret!r:>40}",
        record.getMessage(),
        str([secret]),
        str(dir(secret)),
    )
    assert all(PASSWORD not in text for text in shown)
    for write in (pickle.dumps, msgspec.json.encode, copy.copy):
        with pytest.raises(TypeError):
            write(secret)
    assert secret.reveal() == PASSWORD


def test_a_secret_is_taken_out_of_texts_of_others() -> None:
    assert Secret(PASSWORD).scrub(f"AUTH {PASSWORD} failed for {PASSWORD}") == "AUTH *** failed for ***"
    assert Secret("").scrub("nothing") == "nothing"


def test_a_file_or_a_variable_has_the_secret(file: Path) -> None:
    assert SecretSource(file=str(file)).read() == Secret(PASSWORD)
    assert SecretSource(variable="KV_PASSWORD", environment={"KV_PASSWORD": PASSWORD}).read() == Secret(PASSWORD)


def test_the_secret_itself_is_not_taken_for_its_place_and_not_quoted() -> None:
    for wrong in ({"file": "a", "variable": "b"}, {}, {"variable": f"{PASSWORD}!"}):
        with pytest.raises(ConfigError, match="remote-secret") as refused:
            SecretSource(**wrong)
        assert PASSWORD not in str(refused.value)
    with pytest.raises(ConfigError, match="username_env: is no name of an environment variable") as refused:
        SecretSource(variable=f"{PASSWORD}!", option="username_env")
    assert PASSWORD not in str(refused.value)


def test_a_file_that_others_may_read_or_that_is_no_text_is_refused_without_being_quoted(file: Path) -> None:
    source = SecretSource(file=str(file))
    for mode in (0o604, 0o620, 0o602):
        file.chmod(mode)
        _refused(source, f"{mode:04o}")
    file.chmod(0o640)
    assert source.read() == Secret(PASSWORD)
    for content in (b"", b"\n", PASSWORD.encode() + b"\nmore", b"\xff" + PASSWORD.encode(), PASSWORD.encode() * 1000):
        file.write_bytes(content)
        _refused(source, str(file))
    file.unlink()
    _refused(source, "No such file")
    os.mkfifo(file, 0o600)
    _refused(source, "is no file")
    _refused(SecretSource(variable="KV_PASSWORD", environment={}), r"\$KV_PASSWORD")


def _refused(source: SecretSource, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        source.read()
    assert PASSWORD not in str(refused.value)


def test_a_file_that_changed_is_known_until_it_is_read_again(file: Path) -> None:
    source = SecretSource(file=str(file))
    assert not source.changed()
    source.read()
    assert not source.changed()
    replaced = file.with_name("new")
    replaced.touch(mode=0o600)
    replaced.write_text(PASSWORD[::-1] + "\n")
    replaced.rename(file)
    assert source.changed()
    assert source.read() == Secret(PASSWORD[::-1])
    assert not source.changed()
    file.unlink()
    assert not source.changed()
