"""The settings in --kv-transfer-config. Wrong values are errors when the engine starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvclient.offload.settings import ConnectorSettings, checked
from kvserver.errors import RequestError

ROLES = {"offload": (True, True), "kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}
"""Role -> whether the engine stores, and whether it loads."""


@dataclass(frozen=True, kw_only=True)
class Settings(ConnectorSettings):
    """The connector's settings; see docs/atom.md. ATOM's scheduler waits for lookups, and never preempts blocks in a
    store."""

    state_rows: int = 4
    """Rows of GPU memory through which states of requests pass; only for models that have them."""


def parse(transfer: Mapping[str, Any]) -> Settings:
    """The settings in a kv_transfer_config. RequestError if they are wrong."""
    extra = transfer.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping):
        raise RequestError(
            "settings", f"kv_connector_extra_config={extra!r} must be a mapping that names the server's socket"
        )
    return checked(Settings, extra)


def role_of(transfer: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the engine stores, and whether it loads."""
    role = transfer.get("kv_role", "offload")
    if role not in ROLES:
        raise RequestError("settings", f"kv_role={role!r} must be one of {sorted(ROLES)}")
    return ROLES[role]
