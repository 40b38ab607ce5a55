"""The names and tokens of operators who may command the server.

They come from a file, or without a file from the environment. A token is never logged, never part of the configuration,
and compared in constant time. A file is refused if others than its owner and group may read it, or if it belongs to
another user: no admin API is better than one that is open to everybody.
"""

import hmac
import os
import re
from collections.abc import Mapping
from hashlib import sha256

from kvserver.errors import ConfigError
from kvserver.private_files import secret_problem

ENVIRONMENT = "KVSERVER_ADMIN_TOKEN"
FILE_BYTES_MAX = 65_536
TOKENS_MAX = 64
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 20, 512

_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9._@-]{1,64}):[ \t]+)?(?P<token>[!-~]+)")


class Tokens:
    """Digests of all tokens. The tokens themselves are in no structure that could be printed."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = {name: sha256(token.encode()).digest() for name, token in tokens.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def who(self, token: str) -> str | None:
        """The name that this token belongs to. Every token is compared, so the time does not depend on the match."""
        digest = sha256(token.encode(errors="replace")).digest()
        found = [name for name, known in self._digests.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None


def load(path: str, environment: Mapping[str, str]) -> Tokens:
    """Reads the tokens from a file, or from the environment if the path is empty; none if that has none either.

    path: a file with lines `NAME: TOKEN`, or one token alone. Raises ConfigError, which never quotes the content."""
    if path:
        return Tokens(_parsed(_read(path), path))
    token = environment.get(ENVIRONMENT, "")
    return Tokens(_parsed(token, ENVIRONMENT) if token else {})


def _read(path: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            _check(path, os.fstat(file.fileno()))
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as problem:
        raise _refused(path, problem.strerror or "cannot be read") from None
    if len(content) > FILE_BYTES_MAX:
        raise _refused(path, f"is larger than {FILE_BYTES_MAX} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise _refused(path, "is not ASCII text") from None


def _check(path: str, found: os.stat_result) -> None:
    if why := secret_problem(found):
        raise _refused(path, why)


def _parsed(text: str, source: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(lines) <= TOKENS_MAX:
        raise _refused(source, f"has {len(lines)} tokens; expected 1 to {TOKENS_MAX}")
    tokens: dict[str, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        name = (match["name"] if match else None) or "admin"
        if match is None or name in tokens:
            raise _refused(source, "must have lines NAME: TOKEN with different names, or one token alone")
        if not TOKEN_CHARS_MIN <= len(match["token"]) <= TOKEN_CHARS_MAX:
            raise _refused(
                source,
                f"has a token of {len(match['token'])} characters; {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} will do",
            )
        tokens[name] = match["token"]
    return tokens


def _refused(source: str, why: str) -> ConfigError:
    return ConfigError("admin-token", f"{source} {why}")
