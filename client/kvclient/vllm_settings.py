"""What a user of vLLM says in kv_connector_extra_config. Unknown keys and wrong types are errors, at the start."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvclient.settings import checked
from kvclient.values import STAGING_BYTES, Timeouts

MIB = 1 << 20
FOREIGN = frozenset({"engine_id", "connectors", "kv_connector_module_path"})
"""Keys that vLLM itself may put beside ours."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See docs/vllm.md for what each is good for."""

    socket: str
    """Path of the server's socket."""
    chunk_tokens: int = 0
    """Tokens of a chunk. 0: the smallest multiple of all block sizes that has at least 256, or what the shortest window
    allows."""
    min_load_tokens: int = 256
    """A hit that brings fewer tokens than this beyond what the engine has is computed instead."""
    lookup_timeout_ms: int = 20
    """From a request's arrival. A lookup that has not been answered by then is a miss."""
    step_wait_us: int = 500
    """What a step that has other work waits for lookups, all its requests together."""
    load_timeout_ms: int = 10_000
    store_timeout_ms: int = 30_000
    model_id: str = ""
    """Stands for the digest of the model's files; needed where there are none. Models that differ must not share it."""
    weights_epoch: int = 0
    """Changes whenever the weights do without their files, as in reinforcement learning."""
    tenant: str = ""
    store_output: bool = True
    """Also what was generated is stored, for the next turn of a conversation."""
    staging_mib: int = STAGING_BYTES // MIB
    """GPUs: memory that the connector takes beside the KV cache."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            lookup_s=self.lookup_timeout_ms / 1000,
            retrieve_s=self.load_timeout_ms / 1000,
            store_s=self.store_timeout_ms / 1000,
        )


def parse(extra_config: Mapping[str, object]) -> Settings:
    """RequestError names the key, what was expected and what came."""
    return checked(Settings, {name: value for name, value in extra_config.items() if name not in FOREIGN})
