"""Opens the store that the configuration names. Libraries of stores are imported here, when they are needed."""

import ctypes
from importlib.util import find_spec
from typing import NamedTuple

from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.objects.driver import Driver
from kvserver.remote.objects.mooncake import MooncakeObjects, Transport, mooncake_store
from kvserver.remote.objects.mooncake import Place as MooncakePlace
from kvserver.remote.objects.plugin import PluggedIn
from kvserver.remote.objects.store import NOTES, ObjectStore
from kvserver.remote.secrets import CurrentSecret, SecretSource
from kvserver.remote.store import Store


class Library(NamedTuple):
    """A library that a kind of store needs."""

    module: str
    extra: str
    of: str


VALKEY = Library("glide_sync", "valkey", "a Valkey")
OBJECTS = Library("obstore", "object-stores", "an object store")
MOONCAKE = Library("mooncake", "mooncake", "a Mooncake Store")
LOADED_BY_MOONCAKE = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Libraries of the system that its client loads -> packages of Debian and Ubuntu that have them."""


def check(remote: Remote) -> None:
    """Raises ConfigError if a library is missing, or the user's name or password cannot be read. Asks no store."""
    needed = VALKEY if remote.addresses else OBJECTS if remote.bucket else MOONCAKE if remote.master else None
    if needed is not None and find_spec(needed.module) is None:
        raise ConfigError(
            "remote-library", f"remotes.{remote.name}: {needed.of} needs a library: install kvserver[{needed.extra}]"
        )
    for file, package in LOADED_BY_MOONCAKE.items() if remote.master else ():
        if not _is_loadable(file):
            raise ConfigError(
                "remote-library", f"remotes.{remote.name}: {MOONCAKE.of} needs {file}: install the package {package}"
            )
    if remote.plugin and not _is_installed(remote.plugin.partition(":")[0].partition(".")[0]):
        # Only the outermost package is looked for: anything below would run code of it here.
        raise ConfigError(
            "remote-library", f"remotes.{remote.name}: {remote.plugin} is not installed in this environment"
        )
    _username(remote)
    if (source := _password(remote)) is not None:
        source.read()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # __main__ has no place that it comes from
        return False


def _is_loadable(file: str) -> bool:
    try:
        ctypes.CDLL(file)
    except OSError:
        return False
    return True


def open_store(remote: Remote, *, only_looks: bool = False, arena: memoryview | None = None) -> Store:
    """Opens a store. A Valkey is connected to with its first call; a directory must be there, and an object store must
    do what is needed. Raises StoreError.

    only_looks: the caller changes nothing there. arena: memory that most payloads lie in."""
    if remote.directory:
        return DirectoryStore(remote.directory, only_looks=only_looks)
    if remote.master:
        return _open_mooncake(remote, only_looks=only_looks, arena=arena)
    if remote.bucket or remote.plugin:
        return ObjectStore(open_driver(remote), node=remote.url, only_looks=only_looks)
    from kvserver.remote.valkey import Settings, ValkeyStore  # noqa: PLC0415 - the library is an extra

    settings = Settings(
        addresses=remote.addresses,
        is_cluster=remote.cluster == "yes",
        uses_tls=remote.uses_tls,
        ca_file=remote.ca_file,
        username=_username(remote),
        password=_password(remote),
        prefix=remote.prefix,
        ttl_s=remote.ttl_s,
        connections=remote.threads,
    )
    return ValkeyStore(settings)


def _open_mooncake(remote: Remote, *, only_looks: bool, arena: memoryview | None) -> Store:
    assert remote.master is not None
    transport: Transport = remote.transport  # type: ignore[assignment]  # one of them, as was seen when it was read
    # Over TCP a copy costs little, and the client would open the arena to whoever reaches its ports.
    shared = arena if transport == "rdma" else None
    objects = MooncakeObjects(MooncakePlace(*remote.master, transport), arena=shared, lasting=NOTES)
    return mooncake_store(objects, node=remote.url, only_looks=only_looks)


def open_driver(remote: Remote) -> Driver:
    """The driver of an object store or a plug-in. Raises StoreError."""
    source = _password(remote)
    if remote.plugin:
        password = CurrentSecret(source) if source is not None else None
        return PluggedIn(remote.plugin, dict(remote.own), password)
    from kvserver.remote.objects.clouds import CloudObjects, Place  # noqa: PLC0415 - the library is an extra

    place = Place(
        scheme=remote.scheme,  # type: ignore[arg-type]  # it has a bucket
        bucket=remote.bucket,
        prefix=remote.bucket_prefix,
        endpoint=remote.endpoint,
        region=remote.region,
        username=_username(remote),
        password=source,
        ca_file=remote.ca_file,
    )
    return CloudObjects(place)


def _username(remote: Remote) -> str:
    """The user's name, from the configuration or from a variable. Raises ConfigError, which never quotes it."""
    if not remote.username_env:
        return remote.username
    # Read as a password is: whoever mixes up the two variables must not find a password in a message.
    return SecretSource(variable=remote.username_env, option="username_env").read().reveal()


def _password(remote: Remote) -> SecretSource | None:
    if not remote.password_file and not remote.password_env:
        return None
    return SecretSource(file=remote.password_file, variable=remote.password_env)
