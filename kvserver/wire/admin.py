"""Commands that an operator gives to a running server, and how each ends.

Commands do not come through the doors of engines: whoever may connect there may use the cache, and nothing more. They
travel as JSON, one HTTP request each (http/admin.py); `do` names the command, bytes are hexadecimal there, and keys are
a list. Unknown fields are refused. docs/admin.md tells the whole.
"""

from typing import Literal

import msgspec

from kvserver.wire.messages import Cleared, Draining, Error

TTL_MS_MAX = 30 * 86_400_000
QUIET_MS_MAX = 3_600_000
LogLevel = Literal["debug", "info", "warning", "error"]


class Command(msgspec.Struct, tag_field="do", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of all commands."""


class ClearNamespace(Command, tag="clear", frozen=True):
    """Forgets every chunk of a namespace, or of one prefix and all that continues it. Ends in Cleared when that is
    durable: nothing of it is served again, also not after a restart."""

    namespace: bytes
    key: bytes = b""
    """Key of the first chunk that goes, with all below it. Empty: every chunk goes."""


class ClearTenant(Command, tag="clear-tenant", frozen=True):
    """Forgets every chunk of all namespaces of a tenant. Ends in TenantCleared when that is durable."""

    tenant: str
    """As its caches are registered."""


class Pin(Command, tag="pin", frozen=True):
    """Keeps a prefix in DRAM for a time, and brings back what of it is on disk. Ends in Held."""

    namespace: bytes
    keys: bytes
    """Packed, of a prompt from its beginning on: the longest part that is held. Or one key: the prefix that it ends."""
    ttl_ms: int


class Unpin(Command, tag="unpin", frozen=True):
    """Ends a pin before its time. Ends in LetGo."""

    hold: int


class Warm(Command, tag="warm", frozen=True):
    """Brings from disk to DRAM what of a prefix is not there. Ends in Held, while that goes on; hold is 0 when there
    was nothing to bring."""

    namespace: bytes
    keys: bytes
    """As in Pin."""


class DrainServer(Command, tag="drain", frozen=True):
    """No store is taken any more, and what would be lost with DRAM is written to disk. Ends in Draining, at once; the
    status document tells how far it is. Lookups and retrieves go on."""


class Resume(Command, tag="resume", frozen=True):
    """Stores are taken again. Ends in Draining, as there is nothing more to say."""


class NewWeights(Command, tag="new-weights", frozen=True):
    """The weights behind a namespace have changed: what it holds is forgotten as by ClearNamespace, and for `quiet_ms`
    nothing is stored there, so that what engines computed before and have not sent yet is not kept. Ends in Cleared."""

    namespace: bytes
    quiet_ms: int


class SetLogLevel(Command, tag="log-level", frozen=True):
    """Sets the log level of the brain's process until it ends. Ends in Changed."""

    level: LogLevel


class Reload(Command, tag="reload", frozen=True):
    """Gives those keys of the configuration their values that can change while the server runs. Ends in Changed."""

    values: dict[str, int | str]
    """Checked by whoever sends the command; RELOADABLE says which there may be."""


RELOADABLE = (
    *("disk_clean_percent", "disk_job_ms", "disk_write_policy", "job_ttl_ms", "lease_extended_ms", "lease_ttl_ms"),
    *("leases_max", "log_level", "mover_grace_ms", "recompute_tokens_per_s"),
)
"""Keys of the configuration that are looked up whenever they matter, so that a new value counts from the next time."""

AnyCommand = (
    ClearNamespace | ClearTenant | Pin | Unpin | Warm | DrainServer | Resume | NewWeights | SetLogLevel | Reload
)


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A prefix is kept."""

    id: int
    hold: int
    """Names it for Unpin."""
    chunks: int
    chunks_on_disk: int
    """How many of `chunks` are being read from disk."""
    held_bytes: int
    """Bytes that all holds keep in DRAM now, with those that are being read for them."""
    ttl_ms: int


class TenantCleared(msgspec.Struct, frozen=True, tag="tenant-cleared"):
    id: int
    chunks: int
    namespaces: int


class LetGo(msgspec.Struct, frozen=True, tag="let-go"):
    id: int


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """Keys that have another value than before."""

    id: int
    keys: list[str]


Outcome = Held | LetGo | Changed | Cleared | TenantCleared | Draining | Error
