"""The settings in kv_connector_extra_config. Unknown keys and wrong types are errors at start."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvclient.offload.settings import ConnectorSettings, checked

FOREIGN = frozenset({"engine_id", "connectors", "kv_connector_module_path"})
"""Keys that vLLM itself may add beside ours."""


@dataclass(frozen=True, kw_only=True)
class Settings(ConnectorSettings):
    """The connector's settings; docs/vllm.md describes each."""

    step_wait_us: int = 500
    """How long a step with other work waits for lookups, for all its requests together."""
    store_timeout_ms: int = 30_000
    store_output: bool = True
    """Whether generated tokens are stored too, for the next turn of a conversation."""
    events_endpoint: str = ""
    """The server's events_endpoint, if vLLM's own KV events shall tell of the server's chunks too."""


def parse(extra_config: Mapping[str, object]) -> Settings:
    """Check and convert the settings. RequestError names the key, what was expected and what came."""
    return checked(Settings, {name: value for name, value in extra_config.items() if name not in FOREIGN})
