"""Remote stores as the operator names them: tables [remotes.NAME] in a file, or "NAME=URL?key=value&…" as a flag, with
spaces between several.

Passwords are named by file or by environment variable, never written here.
"""

import re
from collections.abc import Mapping
from itertools import combinations
from posixpath import normpath
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from kvserver.errors import ConfigError
from kvserver.units import MIB, TIB, parse_bytes

Scheme = Literal["valkey", "valkeys", "redis", "rediss", "file", "s3", "gs", "az", "mooncake", "plugin"]
Write = Literal["reuse", "through", "never"]
Pledged = Literal["wait", "write"]
REMOTES_MAX = 4
"""Stores of one server. Each has a process, connections and bytes in flight of its own."""
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
NAME_CHARS_MAX, TENANT_CHARS_MAX, PREFIX_CHARS_MAX = 32, 64, 256
PORT = 6379
MASTER_PORT = 50_051
"""The usual port of a master of Mooncake."""
ADDRESSES_MAX = 64
VALKEYS = ("valkey", "valkeys", "redis", "rediss")
BUCKETS = ("s3", "gs", "az")
BUCKET = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9._-]{1,221}[a-z0-9]")
ENDPOINT = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/=-]*)?")
REGION = re.compile(r"[a-z0-9-]{0,64}")
PLUGIN = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
OWN_KEY = re.compile(r"[a-z][a-z0-9_-]{0,31}")
OWN_SECRET = re.compile(
    r"password|passwd|passphrase|secret|token|credential|bearer|signature|private|connection_?string"
    r"|key$|key_id$|(^|_)(pass|pwd|pw|pat|pin|sas|sig|auth)(_|$)"
)
"""In names of options, with _ for -."""
OWN_SECRET_VALUE = re.compile(r"//[^/\s]*@|(?i:password|passwd|pwd|accountkey|sharedaccess\w*|sig)\s*=")
"""In their values: a user in a URL, and what connection strings have."""
OWN_KEYS_MAX, OWN_VALUE_CHARS_MAX = 32, 1024
"""Options of a plug-in."""
PIECE = re.compile(r"[A-Za-z0-9_=.-]*[A-Za-z0-9_=-][A-Za-z0-9_=.-]*")
"""A piece of a prefix: no client and no store writes it in another way."""
NOT_BUILT = {"evict": 'write="evict" is not built: expected reuse, through or never'}


class Remote(NamedTuple):
    """One remote store. Sizes in bytes."""

    name: str
    url: str
    write: Write = "reuse"
    """reuse: chunks that are used a second time, on any machine. through: all that is stored. never: nothing."""
    pledged: Pledged = "wait"
    """write: chunks that an engine has pledged are announced before they are there, and written when they are stored.
    wait: they are chunks as all others."""
    tenant: str = "-"
    """Part of all names in the store, so that permissions can be given for it."""
    prefix: str = ""
    """The beginning of all names in a Valkey."""
    cluster: str = "no"
    username: str = ""
    username_env: str = ""
    """Environment variable with the user's name, for those who keep both in one secret."""
    password_file: str = ""
    password_env: str = ""
    endpoint: str = ""
    """URL of an object store that is not the cloud's own."""
    region: str = ""
    """A bucket's region in S3; empty: as the environment says, or us-east-1."""
    transport: str = "tcp"
    """The way that bytes take to and from a Mooncake Store."""
    ca_file: str = ""
    """Certificates that a Valkey's must come from; empty: those of the machine. To an object store they are added."""
    ttl_s: int = 86_400
    """A chunk that is not used for so long is dropped by a Valkey."""
    tokens_min: int = 1024
    """A prefix that would bring fewer tokens is computed instead."""
    read_bytes_in_flight: int = 256 * MIB
    write_bytes_in_flight: int = 64 * MIB
    threads: int = 4
    """Connections that bring payloads, and as many that write them."""
    own: tuple[tuple[str, str], ...] = ()
    """Options that only a plug-in knows."""

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
    def bucket(self) -> str:
        """The bucket or container of an object store; empty for other stores."""
        return urlsplit(self.url).netloc if self.scheme in BUCKETS else ""

    @property
    def bucket_prefix(self) -> str:
        """The beginning of all names in a bucket, without "/" at either end."""
        return urlsplit(self.url).path.strip("/") if self.scheme in BUCKETS else ""

    @property
    def plugin(self) -> str:
        """Module and class of a plug-in, as package.module:Class; empty for other stores."""
        return urlsplit(self.url).netloc if self.scheme == "plugin" else ""

    @property
    def master(self) -> tuple[str, int] | None:
        """Host and port of the master of a Mooncake Store; None for other stores."""
        return _address(urlsplit(self.url).netloc, MASTER_PORT) if self.scheme == "mooncake" else None

    @property
    def place(self) -> tuple[object, ...]:
        """A value that is equal for two names of one place in a store."""
        nodes = "rediss" if self.uses_tls else "redis"
        where: tuple[object, ...] = (nodes, *sorted(self.addresses), self.prefix)
        if self.directory:
            where = ("file", normpath(self.directory))
        elif self.master:
            where = ("mooncake", *self.master)
        elif not self.addresses:
            where = (self.url.rstrip("/"), self.endpoint.rstrip("/"), *sorted(self.own))
        return (*where, self.tenant)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each node of a Valkey; empty for other stores."""
        is_valkey = self.scheme in VALKEYS
        return tuple(map(_address, urlsplit(self.url).netloc.split(","))) if is_valkey else ()


LIMITS = {
    "ttl_s": (60, 366 * 86_400),
    "tokens_min": (0, 1 << 30),
    "read_bytes_in_flight": (MIB, TIB),
    "write_bytes_in_flight": (MIB, TIB),
    "threads": (1, 64),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "write": get_args(Write),
    "pledged": get_args(Pledged),
    "cluster": ("yes", "no"),
    "transport": ("tcp", "rdma"),
}
OPTIONS = tuple(name for name in Remote._fields if name not in ("name", "url", "own"))
_KINDS = {
    **dict.fromkeys(VALKEYS, "Valkey and Redis"),
    "file": "a directory",
    "s3": "S3",
    "gs": "Google",
    "az": "Azure",
    "mooncake": "Mooncake",
    "plugin": "a plug-in",
}
_ONLY_FOR = {
    "prefix": VALKEYS,
    "cluster": VALKEYS,
    "ttl_s": VALKEYS,
    "username": (*VALKEYS, "s3", "az"),
    "username_env": (*VALKEYS, "s3", "az"),
    "password_file": (*VALKEYS, "s3", "az", "plugin"),
    "password_env": (*VALKEYS, "s3", "az", "plugin"),
    "ca_file": (*VALKEYS, *BUCKETS),
    "endpoint": BUCKETS,
    "region": ("s3",),
    "transport": ("mooncake",),
}
"""Options that not every store has -> schemes of those that have them."""
_PLUGIN_OPTIONS = tuple(name for name in OPTIONS if "plugin" in _ONLY_FOR.get(name, ("plugin",)))
"""Options of ours that a plug-in has. It gets all others itself."""


def joined(table: Mapping[str, object]) -> str:
    """The tables of a file, written as the text of a flag. Raises ConfigError."""
    entries = []
    for name, options in table.items():
        if not isinstance(options, dict) or not isinstance(url := options.get("url"), str):
            raise _wrong(name, 'expected a table with url = "valkey://HOST", "file:///DIRECTORY" or "s3://BUCKET"')
        given = {key: _text(value) for key, value in options.items() if key != "url"}
        begin = "&" if "?" in url else "?"
        entries.append(f"{name}={url}" + (f"{begin}{urlencode(given)}" if given else ""))
    return " ".join(entries)


def parse(text: str) -> tuple[Remote, ...]:
    """The stores that a text names. Raises ConfigError."""
    found = tuple(_remote(*entry.partition("=")[::2]) for entry in text.split())
    if len(found) > REMOTES_MAX:
        names = ", ".join(remote.name for remote in found)
        raise ConfigError("config-remote", f"remotes={names}: {len(found)} stores: expected {REMOTES_MAX} at most")
    for remote, other in combinations(found, 2):
        if remote.name == other.name:
            raise _wrong(remote.name, "is named twice: expected a name of its own for each store")
        if remote.place == other.place:
            raise _wrong(other.name, f"is the same place as remotes.{remote.name}: expected each store once")
    return found


def _remote(name: str, url: str) -> Remote:
    if not name or len(name) > NAME_CHARS_MAX or not NAME_CHARS.issuperset(name):
        raise _wrong(name, f"expected a name of 1 to {NAME_CHARS_MAX} characters of a-z, 0-9, - and _")
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its text quotes what may be a password
        raise _wrong(name, "is no URL: expected SCHEME://PLACE, and after a ? key=value with & between them") from None
    if parts.scheme not in get_args(Scheme):
        raise _wrong(name, f"scheme {parts.scheme!r} is unknown: expected one of {', '.join(get_args(Scheme))}")
    _check_place(name, parts)
    remote = Remote(name, parts._replace(query="").geturl())
    if remote.plugin:
        remote = remote._replace(own=_own(name, given))
        given = [(key, text) for key, text in given if key in _PLUGIN_OPTIONS]
    remote = remote._replace(**_options(name, given))
    if not remote.tenant or len(remote.tenant) > TENANT_CHARS_MAX or not NAME_CHARS.issuperset(remote.tenant):
        expected = f"1 to {TENANT_CHARS_MAX} characters of a-z, 0-9, - and _"
        raise _wrong(name, f"tenant={remote.tenant!r} must have {expected}")
    for one, other in (("username", "username_env"), ("password_file", "password_env")):
        if getattr(remote, one) and getattr(remote, other):
            raise _wrong(name, f"has {one} and {other}: expected one of them")
    for file in (remote.password_file, remote.ca_file):
        if file and not file.startswith("/"):
            raise _wrong(name, f"{file!r} must be an absolute path")
    _check_options(remote)
    return remote


def _check_place(name: str, parts: SplitResult) -> None:
    if "@" in parts.netloc:
        raise _wrong(name, "has a user or a password in its URL: expected username, and password_file or password_env")
    if parts.fragment:
        raise _wrong(name, "has a # in its URL")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/" or parts.path[:2] == "//":
            raise _wrong(name, "expected file:///PATH, an absolute path")
        return
    if parts.scheme == "plugin":
        if not PLUGIN.fullmatch(parts.netloc) or parts.path not in ("", "/"):
            raise _wrong(name, f"{parts.netloc + parts.path!r} is no plug-in: expected plugin://PACKAGE.MODULE:CLASS")
        return
    if parts.scheme in BUCKETS:
        _check_bucket(name, parts)
        return
    if parts.path not in ("", "/"):
        raise _wrong(name, f"has a path {parts.path!r}: expected HOST:PORT alone; database numbers are not used")
    nodes = parts.netloc.split(",")
    most = 1 if parts.scheme == "mooncake" else ADDRESSES_MAX
    if not 1 <= len(nodes) <= most:
        raise _wrong(name, f"names {len(nodes)} nodes: expected {'1 master' if most == 1 else f'1 to {most}'}")
    for node in nodes:
        host, port = _address(node)
        if not host or not 1 <= port <= 65_535:
            raise _wrong(name, f"{node!r} is no address: expected HOST or HOST:PORT")


def _check_bucket(name: str, parts: SplitResult) -> None:
    if not BUCKET.fullmatch(parts.netloc):
        raise _wrong(name, f"{parts.netloc!r} is no bucket: expected {parts.scheme}://BUCKET or .../BUCKET/PREFIX")
    path = parts.path.strip("/")
    if len(path) > PREFIX_CHARS_MAX or not all(PIECE.fullmatch(piece) for piece in path.split("/") if path):
        expected = f"at most {PREFIX_CHARS_MAX} characters of A-Z, a-z, 0-9, -, _, = and . with / between them"
        raise _wrong(name, f"prefix {path[:PREFIX_CHARS_MAX]!r} must have {expected}")


def _own(name: str, given: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The options that only a plug-in knows. Raises ConfigError, which never quotes a value."""
    own = [(key, text) for key, text in given if key not in _PLUGIN_OPTIONS]
    for key, text in own:
        if OWN_SECRET.search(key.lower().replace("-", "_")) or OWN_SECRET_VALUE.search(text):
            raise _wrong(name, f"{key[:64]} is not taken literally: expected password_file or password_env")
        if not OWN_KEY.fullmatch(key) or len(text) > OWN_VALUE_CHARS_MAX or not text.isprintable():
            expected = f"a-z, 0-9, _ or -, and at most {OWN_VALUE_CHARS_MAX} characters that can be printed"
            raise _wrong(name, f"option {key[:64]!r} of a plug-in: expected {expected}")
    if len(own) > OWN_KEYS_MAX or len(dict(own)) < len(own):
        raise _wrong(name, f"has {len(own)} options of a plug-in: expected {OWN_KEYS_MAX} different ones at most")
    return tuple(own)


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


def _check_options(remote: Remote) -> None:
    for option, schemes in _ONLY_FOR.items():
        if remote.scheme not in schemes and getattr(remote, option) != Remote._field_defaults[option]:
            kinds = ", ".join(dict.fromkeys(_KINDS[scheme] for scheme in schemes))
            raise _wrong(remote.name, f"{option} is for {kinds}, not for {_KINDS[remote.scheme]}")
    if remote.pledged == "write" and remote.write == "never":
        raise _wrong(remote.name, "has pledged=write and write=never: expected write=reuse or through")
    if remote.endpoint and not _is_endpoint(remote.endpoint):
        # It may have a password or a signature in it.
        raise _wrong(remote.name, "endpoint must be http://HOST:PORT or https://HOST:PORT, and no more than a path")
    if not REGION.fullmatch(remote.region):
        raise _wrong(remote.name, f"region={remote.region[:64]!r} must have at most 64 characters of a-z, 0-9 and -")
    has_password = bool(remote.password_file or remote.password_env)
    if remote.bucket and has_password != bool(remote.username or remote.username_env):
        expected = "username or username_env, and password_file or password_env, or none of them"
        raise _wrong(remote.name, f"expected {expected}: then credentials are found as usual in that cloud")


def _is_endpoint(url: str) -> bool:
    """Whether the library takes it: it ends the process, or its call, for some that it does not."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return ENDPOINT.fullmatch(url) is not None and bool(parts.hostname) and port != 0


def _address(node: str, usual: int = PORT) -> tuple[str, int]:
    """Host and port; a port of -1 is none. IPv6 addresses stand in brackets."""
    host, colon, port = node.rpartition(":") if not node.endswith("]") else (node, "", "")
    if not colon:
        return (host or node).strip("[]"), usual
    return host.strip("[]"), int(port) if port.isdecimal() else -1


def _text(value: object) -> str:
    """A TOML value as the text of a flag."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError("config-remote", f"remotes.{name}: {why}")
