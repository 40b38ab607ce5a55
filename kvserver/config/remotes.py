"""Remote stores as the operator names them: a table [remotes.NAME] in a file, or "NAME=URL?key=value&…" as a flag.

Passwords are named by file or by environment variable, never written here.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from kvserver.errors import ConfigError
from kvserver.units import MIB, TIB, parse_bytes

Scheme = Literal["valkey", "valkeys", "redis", "rediss", "file"]
Write = Literal["reuse", "through", "never"]
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
NAME_CHARS_MAX, TENANT_CHARS_MAX = 32, 64
PORT = 6379
ADDRESSES_MAX = 64
NOT_BUILT = {"evict": 'write="evict" is not built: expected reuse, through or never'}


class Remote(NamedTuple):
    """One remote store. Sizes in bytes."""

    name: str
    url: str
    write: Write = "reuse"
    """reuse: chunks that are used a second time, on any machine. through: all that is stored. never: nothing."""
    tenant: str = "-"
    """Part of all names in the store, so that permissions can be given for it."""
    prefix: str = ""
    """The beginning of all names in a Valkey."""
    cluster: str = "no"
    username: str = ""
    password_file: str = ""
    password_env: str = ""
    ca_file: str = ""
    """Certificates that a Valkey's must come from; empty: those of the machine."""
    ttl_s: int = 86_400
    """A chunk that is not used for so long is dropped by a Valkey."""
    tokens_min: int = 1024
    """A prefix that would bring fewer tokens is computed instead."""
    read_bytes_in_flight: int = 256 * MIB
    write_bytes_in_flight: int = 64 * MIB
    threads: int = 4
    """Connections that bring payloads, and as many that write them."""

    @property
    def scheme(self) -> Scheme:
        scheme: Scheme = self.url.partition(":")[0]  # type: ignore[assignment]  # checked when it was read
        return scheme

    @property
    def uses_tls(self) -> bool:
        return self.scheme in ("valkeys", "rediss")

    @property
    def directory(self) -> str:
        """The path of a shared directory; empty for other stores."""
        return unquote(urlsplit(self.url).path) if self.scheme == "file" else ""

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each node that is named; empty for a directory."""
        return () if self.scheme == "file" else tuple(map(_address, urlsplit(self.url).netloc.split(",")))


LIMITS = {
    "ttl_s": (60, 366 * 86_400),
    "tokens_min": (0, 1 << 30),
    "read_bytes_in_flight": (MIB, TIB),
    "write_bytes_in_flight": (MIB, TIB),
    "threads": (1, 64),
}
CHOICES: dict[str, tuple[str, ...]] = {"write": get_args(Write), "cluster": ("yes", "no")}
OPTIONS = tuple(name for name in Remote._fields if name not in ("name", "url"))


def joined(table: Mapping[str, object]) -> str:
    """The tables of a file, written as the text of a flag. Raises ConfigError."""
    entries = []
    for name, options in table.items():
        if not isinstance(options, dict) or not isinstance(url := options.get("url"), str):
            raise _wrong(name, 'expected a table with url = "valkey://HOST" or "file:///DIRECTORY"')
        given = {key: _text(value) for key, value in options.items() if key != "url"}
        entries.append(f"{name}={url}" + (f"?{urlencode(given)}" if given else ""))
    return " ".join(entries)


def parse(text: str) -> tuple[Remote, ...]:
    """The stores that a text names. Raises ConfigError."""
    found = tuple(_remote(*entry.partition("=")[::2]) for entry in text.split())
    if len(found) > 1:
        names = ", ".join(remote.name for remote in found)
        raise ConfigError("config-remote", f"remotes={names}: several stores are not built: expected one")
    return found


def _remote(name: str, url: str) -> Remote:
    if not name or len(name) > NAME_CHARS_MAX or not NAME_CHARS.issuperset(name):
        raise _wrong(name, f"expected a name of 1 to {NAME_CHARS_MAX} characters of a-z, 0-9, - and _")
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as why:
        raise _wrong(name, f"is no URL: {why}") from None
    if parts.scheme not in get_args(Scheme):
        raise _wrong(name, f"scheme {parts.scheme!r} is unknown: expected one of {', '.join(get_args(Scheme))}")
    _check_place(name, parts)
    remote = Remote(name, parts._replace(query="").geturl())._replace(**_options(name, given))
    if not remote.tenant or len(remote.tenant) > TENANT_CHARS_MAX or not NAME_CHARS.issuperset(remote.tenant):
        expected = f"1 to {TENANT_CHARS_MAX} characters of a-z, 0-9, - and _"
        raise _wrong(name, f"tenant={remote.tenant!r} must have {expected}")
    if remote.password_file and remote.password_env:
        raise _wrong(name, "has password_file and password_env: expected one of them")
    for file in (remote.password_file, remote.ca_file):
        if file and not file.startswith("/"):
            raise _wrong(name, f"{file!r} must be an absolute path")
    if remote.directory and (foreign := _only_for_valkey(remote)):
        raise _wrong(name, f"{foreign} is for Valkey and Redis, not for a directory")
    return remote


def _check_place(name: str, parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise _wrong(name, "has a user or a password in its URL: expected username, and password_file or password_env")
    if parts.fragment:
        raise _wrong(name, "has a # in its URL")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            raise _wrong(name, "expected file:///PATH, an absolute path")
        return
    if parts.path not in ("", "/"):
        raise _wrong(name, f"has a path {parts.path!r}: expected HOST:PORT alone; database numbers are not used")
    nodes = parts.netloc.split(",")
    if not 1 <= len(nodes) <= ADDRESSES_MAX:
        raise _wrong(name, f"names {len(nodes)} nodes: expected 1 to {ADDRESSES_MAX}")
    for node in nodes:
        host, port = _address(node)
        if not host or not 1 <= port <= 65_535:
            raise _wrong(name, f"{node!r} is no address: expected HOST or HOST:PORT")


def _options(name: str, given: list[tuple[str, str]]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, text in given:
        if key in ("password", "token", "secret"):  # the value is not shown
            raise _wrong(name, f"{key} is not taken literally: expected password_file or password_env")
        if key not in OPTIONS:
            raise _wrong(name, f"unknown key {key!r}; keys are url, {', '.join(OPTIONS)}")
        if key in options:
            raise _wrong(name, f"names {key} twice")
        options[key] = _value(name, key, text)
    return options


def _value(name: str, key: str, text: str) -> object:
    if key == "write" and text in NOT_BUILT:
        raise _wrong(name, NOT_BUILT[text])
    if key in CHOICES and text not in CHOICES[key]:
        raise _wrong(name, f"{key}={text!r} must be {' | '.join(CHOICES[key])}")
    if key in LIMITS:
        value = parse_bytes(text) if key.endswith("_in_flight") else (int(text) if text.isdecimal() else None)
        least, most = LIMITS[key]
        if value is None or not least <= value <= most:
            raise _wrong(name, f"{key}={text!r} must be a whole number in [{least}, {most}]")
        return value
    if not text.isprintable():
        raise _wrong(name, f"{key} has characters that cannot be printed")
    return text


def _only_for_valkey(remote: Remote) -> str:
    """The first option that was given and that a directory does not have; empty if there is none."""
    names = ("prefix", "cluster", "username", "password_file", "password_env", "ca_file", "ttl_s")
    return next((name for name in names if getattr(remote, name) != Remote._field_defaults[name]), "")


def _address(node: str) -> tuple[str, int]:
    """Host and port; a port of -1 is none. IPv6 addresses stand in brackets."""
    host, colon, port = node.rpartition(":") if not node.endswith("]") else (node, "", "")
    if not colon:
        return (host or node).strip("[]"), PORT
    return host.strip("[]"), int(port) if port.isdecimal() else -1


def _text(value: object) -> str:
    """A TOML value as the text of a flag."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError("config-remote", f"remotes.{name}: {why}")
