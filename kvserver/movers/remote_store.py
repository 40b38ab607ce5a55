"""Opens the store that the configuration names. Libraries of stores are imported here, when they are needed."""

from importlib.util import find_spec

from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.secrets import SecretSource
from kvserver.remote.store import Store

LIBRARY, EXTRA = "glide_sync", "valkey"


def check(remote: Remote) -> None:
    """Raises ConfigError if a library is missing or the password cannot be read. Asks no store."""
    if remote.addresses and find_spec(LIBRARY) is None:
        raise ConfigError(
            "remote-library", f"remotes.{remote.name}: a Valkey needs a library: install kvserver[{EXTRA}]"
        )
    if (source := _password(remote)) is not None:
        source.read()


def open_store(remote: Remote, *, only_looks: bool = False) -> Store:
    """Opens a store. A Valkey is connected to with its first call; a directory must be there. Raises StoreError.

    only_looks: the caller changes nothing there."""
    if remote.directory:
        return DirectoryStore(remote.directory, only_looks=only_looks)
    from kvserver.remote.valkey import Settings, ValkeyStore  # noqa: PLC0415 - the library is an extra

    settings = Settings(
        addresses=remote.addresses,
        is_cluster=remote.cluster == "yes",
        uses_tls=remote.uses_tls,
        ca_file=remote.ca_file,
        username=remote.username,
        password=_password(remote),
        prefix=remote.prefix,
        ttl_s=remote.ttl_s,
        connections=remote.threads,
    )
    return ValkeyStore(settings)


def _password(remote: Remote) -> SecretSource | None:
    if not remote.password_file and not remote.password_env:
        return None
    return SecretSource(file=remote.password_file, variable=remote.password_env)
