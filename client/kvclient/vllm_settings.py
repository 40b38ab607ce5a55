"""What a user of vLLM says in kv_connector_extra_config. Unknown keys and wrong types are errors, at the start."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvclient.settings import ConnectorSettings, checked

FOREIGN = frozenset({"engine_id", "connectors", "kv_connector_module_path"})
"""Keys that vLLM itself may put beside ours."""


@dataclass(frozen=True, kw_only=True)
class Settings(ConnectorSettings):
    """See docs/vllm.md for what each is good for."""

    step_wait_us: int = 500
    """What a step that has other work waits for lookups, all its requests together."""
    store_timeout_ms: int = 30_000
    store_output: bool = True
    """Also what was generated is stored, for the next turn of a conversation."""


def parse(extra_config: Mapping[str, object]) -> Settings:
    """RequestError names the key, what was expected and what came."""
    return checked(Settings, {name: value for name, value in extra_config.items() if name not in FOREIGN})
