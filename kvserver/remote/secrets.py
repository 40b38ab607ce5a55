"""Passwords: named by the configuration, kept in files or environment variables, and never printed.

The configuration says where a password is, never what it is. A file is read again when it changes, so a password can
be rotated without a restart.
"""

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Never

from kvserver.errors import ConfigError
from kvserver.private_files import secret_problem

BYTES_MAX = 4096
SHOWN = "***"
TEXT_CHARS_MAX = 300
_HIDDEN = (
    (re.compile(r"//[^/\s\"'@]*@"), f"//{SHOWN}@"),
    (re.compile(r"(?i)\b(sig|[\w-]*signature|[\w-]*token|[\w-]*credential)=[^&\s\"')]+"), rf"\1={SHOWN}"),
)
"""Secrets wherever they come from: a user in a URL, and a signature."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """A text that is not shown by print, repr, format, msgspec or pickle."""

    __slots__ = ("__text",)

    def __init__(self, text: str) -> None:
        self.__text = text

    def reveal(self) -> str:
        """The text itself, for the one call that needs it."""
        return self.__text

    def scrub(self, text: str) -> str:
        """A text of somebody else, such as a library's error, without this secret in it."""
        return text.replace(self.__text, SHOWN) if self.__text else text

    def __repr__(self) -> str:
        return SHOWN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reveal() == self.__text

    def __hash__(self) -> int:
        return hash(self.__text)

    def __reduce__(self) -> Never:
        raise TypeError("a secret is not written anywhere")


def safe_text(of: object, secret: Secret | None = None) -> str:
    """One short line that may be shown: a text of somebody else, an error or an answer, without secrets."""
    try:
        text = str(of)
    except Exception:  # some classes fail there
        text = f"{type(of).__name__} without a text"
    text = secret.scrub(text) if secret is not None else text
    text = " ".join(text[: 9 * TEXT_CHARS_MAX].split())
    for pattern, shown in _HIDDEN:
        text = pattern.sub(shown, text)
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]} …"


class SecretSource:
    """The place of a secret: a file or an environment variable."""

    def __init__(
        self,
        *,
        file: str = "",
        variable: str = "",
        option: str = "password_env",
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises ConfigError unless exactly one of them is named. option: the one that names the variable."""
        if bool(file) == bool(variable):
            raise _refused("password_file, password_env", "expected one of them")
        if variable and not _VARIABLE.fullmatch(variable):
            # It may be the password itself.
            raise _refused(option, "is no name of an environment variable; the value itself is not taken")
        self._file = file
        self._variable = variable
        self._environment = environment
        self._seen: tuple[int, int, int] | None = None

    @property
    def where(self) -> str:
        return self._file or f"${self._variable}"

    def read(self) -> Secret:
        """The secret as it is now. Raises ConfigError, which never quotes it."""
        text = self._environment.get(self._variable, "") if self._variable else self._read_file()
        text = text.rstrip("\r\n")
        if not text:
            raise _refused(self.where, "is empty or not set")
        if not text.isprintable():
            raise _refused(self.where, "has more than one line, or characters that cannot be typed")
        return Secret(text)

    def changed(self) -> bool:
        """Whether the file is another one than at the last read(). A file that cannot be looked at has not changed."""
        if not self._file or self._seen is None:
            return False
        try:
            return _state(os.stat(self._file)) != self._seen
        except OSError:
            return False

    def _read_file(self) -> str:
        try:
            # Without O_NONBLOCK a named pipe would wait for a writer.
            with open(os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                _check(self._file, found)
                content = file.read(BYTES_MAX + 1)
        except OSError as problem:
            raise _refused(self._file, problem.strerror or "cannot be read") from None
        if len(content) > BYTES_MAX:
            raise _refused(self._file, f"is larger than {BYTES_MAX} bytes")
        self._seen = _state(found)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise _refused(self._file, "is not UTF-8 text") from None


class CurrentSecret:
    """The secret as it is now, for all connections."""

    def __init__(self, source: SecretSource) -> None:
        self._source = source
        self._reading = threading.Lock()
        self._secret: Secret | None = None

    def current(self) -> Secret:
        """Reads it again if its file has changed. Raises ConfigError if it could never be read."""
        with self._reading:
            if self._secret is None:
                self._secret = self._source.read()
            elif self._source.changed():
                # Whoever rotates it may have emptied the file first.
                with suppress(ConfigError):
                    self._secret = self._source.read()
            return self._secret


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check(path: str, found: os.stat_result) -> None:
    if why := secret_problem(found):
        raise _refused(path, why)


def _refused(source: str, why: str) -> ConfigError:
    return ConfigError("remote-secret", f"{source}: {why}")
