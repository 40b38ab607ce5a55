"""An operator's commands to a running server, and their outcomes.

Commands do not come through the doors of engines: a process that may connect there may only use the cache. They travel
as JSON, one HTTP request each (http/admin.py). There `do` names the command, bytes are hexadecimal, and keys are a
list. Unknown fields are refused. docs/admin.md describes all commands.
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
    """Forgets every chunk of a namespace, or a prefix and all that continues it. Outcome: Cleared, when durable.

    The chunks are never served again, not even after a restart."""

    namespace: bytes
    key: bytes = b""
    """Key of the first chunk that goes, with all its descendants. Empty: every chunk goes."""


class ClearTenant(Command, tag="clear-tenant", frozen=True):
    """Forgets every chunk of all namespaces of a tenant. Outcome: TenantCleared, when that is durable."""

    tenant: str
    """The name that its caches are registered with."""


class Pin(Command, tag="pin", frozen=True):
    """Keeps a prefix in DRAM for a time, and reads its chunks from disk. Outcome: Held."""

    namespace: bytes
    keys: bytes
    """Packed keys of a prompt from its beginning: their longest held part. One key: the prefix that ends there."""
    ttl_ms: int


class Unpin(Command, tag="unpin", frozen=True):
    """Ends a pin before its time. Outcome: LetGo."""

    hold: int


class Warm(Command, tag="warm", frozen=True):
    """Reads the chunks of a prefix that are not in DRAM from disk. Outcome: Held, at once; hold is 0 if there was
    nothing to read."""

    namespace: bytes
    keys: bytes
    """As in Pin."""


class DrainServer(Command, tag="drain", frozen=True):
    """Stops stores, and writes the chunks that would be lost with DRAM to disk. Outcome: Draining, at once; the status
    document shows the progress. Lookups and retrieves go on."""


class Resume(Command, tag="resume", frozen=True):
    """Accepts stores again. Outcome: Draining, because it has no outcome of its own."""


class NewWeights(Command, tag="new-weights", frozen=True):
    """The weights behind a namespace have changed. Its chunks are forgotten as by ClearNamespace. Outcome: Cleared.

    For `quiet_ms` no store is accepted there, so that KV which engines computed before is not kept."""

    namespace: bytes
    quiet_ms: int


class SetLogLevel(Command, tag="log-level", frozen=True):
    """Sets the log level of the brain's process until it ends. Outcome: Changed."""

    level: LogLevel


class Reload(Command, tag="reload", frozen=True):
    """Sets keys of the configuration that can change while the server runs. Outcome: Changed."""

    values: dict[str, int | str]
    """New values of keys in RELOADABLE. The sender has checked them."""


RELOADABLE = (
    *("disk_clean_percent", "disk_job_ms", "disk_write_policy", "job_ttl_ms", "lease_extended_ms", "lease_ttl_ms"),
    *("leases_max", "log_level", "mover_grace_ms", "recompute_tokens_per_s"),
)
"""Keys of the configuration that are read at each use, so that a new value counts from the next use."""

AnyCommand = (
    ClearNamespace | ClearTenant | Pin | Unpin | Warm | DrainServer | Resume | NewWeights | SetLogLevel | Reload
)


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A prefix is kept."""

    id: int
    hold: int
    """Number of the hold, for Unpin."""
    chunks: int
    chunks_on_disk: int
    """Part of `chunks` that is being read from disk."""
    held_bytes: int
    """Bytes that all holds keep in DRAM now, including those being read for them."""
    ttl_ms: int


class TenantCleared(msgspec.Struct, frozen=True, tag="tenant-cleared"):
    id: int
    chunks: int
    namespaces: int


class LetGo(msgspec.Struct, frozen=True, tag="let-go"):
    id: int


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """Keys whose value has changed."""

    id: int
    keys: list[str]


Outcome = Held | LetGo | Changed | Cleared | TenantCleared | Draining | Error
