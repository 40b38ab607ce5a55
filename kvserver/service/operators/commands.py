"""The entrance of operators' commands. Each gets one audit line and one reply.

Whether somebody may give commands is decided outside (http/admin.py). A wrong command gets a typed error and changes
nothing.
"""

import dataclasses

from kvserver.errors import KvError, RequestError
from kvserver.service.base.effects import Audit, ChangeLogLevel
from kvserver.service.base.events import Commanded
from kvserver.service.operators import clear_namespaces, clear_prefix, server_drain
from kvserver.service.requests import admission, holds
from kvserver.service.state.core import Core
from kvserver.service.telling.log_sampling import REQUEST_LINES
from kvserver.tiers.prefix_notes import ClearedPrefix
from kvserver.wire.admin import (
    QUIET_MS_MAX,
    RELOADABLE,
    AnyCommand,
    Changed,
    ClearNamespace,
    ClearTenant,
    DrainServer,
    LogLevel,
    NewWeights,
    Pin,
    Reload,
    Resume,
    SetLogLevel,
    Unpin,
    Warm,
)
from kvserver.wire.messages import Draining

AUDITED_CHARS_MAX = 1000
"""Characters of a field that are logged, so that the line has room for the outcome."""
COMMAND_ID = 1
"""Id of the single request that an operator's peer has."""


def command(core: Core, event: Commanded, now_ns: int) -> None:
    """Handles one command. It is answered at once or, if disks must note it first, when they have."""
    try:
        _carry_out(core, event.peer, event.command, now_ns)
    except KvError as error:
        _audit(core, event, error.code)
        core.refuse(event.peer, COMMAND_ID, error)
    else:
        _audit(core, event, "accepted")


def _carry_out(core: Core, peer: int, command: AnyCommand, now_ns: int) -> None:
    match command:
        case ClearNamespace(namespace, b""):
            clear_namespaces.clear(core, peer, COMMAND_ID, namespace, now_ns)
        case ClearNamespace(namespace, key):
            clear_prefix.clear(core, peer, COMMAND_ID, ClearedPrefix(namespace, key), now_ns)
        case ClearTenant(tenant):
            clear_namespaces.clear_tenant(core, peer, COMMAND_ID, tenant, now_ns)
        case NewWeights():
            _new_weights(core, peer, command, now_ns)
        case Pin():
            holds.pin(core, peer, COMMAND_ID, command, now_ns)
        case Warm():
            holds.warm(core, peer, COMMAND_ID, command, now_ns)
        case Unpin():
            holds.unpin(core, peer, COMMAND_ID, command)
        case DrainServer():
            server_drain.begin(core)
            core.answer(peer, Draining(COMMAND_ID))
        case Resume():
            server_drain.resume(core)
            core.answer(peer, Draining(COMMAND_ID))
        case SetLogLevel(level):
            _set_log_level(core, level)
            core.answer(peer, Changed(COMMAND_ID, ["log_level"]))
        case Reload(values):
            core.answer(peer, Changed(COMMAND_ID, _reload(core, values)))


def _new_weights(core: Core, peer: int, command: NewWeights, now_ns: int) -> None:
    if not 0 <= command.quiet_ms <= QUIET_MS_MAX:
        raise RequestError("quiet", f"quiet_ms={command.quiet_ms} must be in [0, {QUIET_MS_MAX}]")
    admission.check_fence(core, command.namespace, now_ns)
    clear_namespaces.clear(core, peer, COMMAND_ID, command.namespace, now_ns)
    admission.fence(core, command.namespace, command.quiet_ms, now_ns)


def _reload(core: Core, values: dict[str, int | str]) -> list[str]:
    """Takes over the values that differ. Returns their names."""
    unknown = sorted(values.keys() - set(RELOADABLE))
    if unknown:
        raise RequestError("reload", f"{', '.join(unknown)} cannot change while the server runs")
    wanted: dict[str, object] = dict(values)
    if "disk_write_policy" in wanted:
        wanted["disk_write_through"] = wanted.pop("disk_write_policy") == "through"
    changed = {name: value for name, value in wanted.items() if getattr(core.bounds, name) != value}
    core.reload(dataclasses.replace(core.bounds, **changed))  # type: ignore[arg-type]
    names = ["disk_write_policy" if name == "disk_write_through" else name for name in changed]
    if "log_level" in changed:
        _set_log_level(core, core.bounds.log_level)
    return sorted(names)


def _set_log_level(core: Core, level: LogLevel) -> None:
    core.reload(dataclasses.replace(core.bounds, log_level=level, request_lines=REQUEST_LINES[level]))
    core.emit(ChangeLogLevel(level))


def _audit(core: Core, event: Commanded, outcome: str) -> None:
    core.emit(Audit((("who", event.who), *_said(event.command), ("outcome", outcome))))


def _said(command: AnyCommand) -> list[tuple[str, object]]:
    """The fields of a command for the audit log. Of several keys only the last is logged, since it names them all."""
    said: list[tuple[str, object]] = [("did", command.__struct_config__.tag)]
    for name in command.__struct_fields__:
        value = getattr(command, name)
        if isinstance(value, bytes):
            value = value[-32:].hex()
        said.append((name, value if isinstance(value, int) else str(value)[:AUDITED_CHARS_MAX]))
    return said
