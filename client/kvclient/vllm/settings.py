"""The settings in kv_connector_extra_config. Unknown keys and wrong types are errors at start."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvclient.offload.settings import ConnectorSettings, checked
from kvclient.vllm.devices import PORTABLE
from kvserver.errors import RequestError

FOREIGN = frozenset({"engine_id", "connectors", "kv_connector_module_path"})
"""Keys that vLLM itself may add beside ours."""

SELF_TEST = ("auto", "on", "off")
AWAIT_OTHERS = ("off", "on")
AWAIT_MS_MAX = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Settings(ConnectorSettings):
    """The connector's settings; docs/vllm.md describes each."""

    head_shards: int = 0
    """Into how many shards KV heads are divided, so that engines of other tensor parallel sizes share chunks. Latent
    attention has one shard, whatever number is set. 0: one for each rank, and only engines of the same size share."""
    device: str = ""
    """portable: through torch and the host, for devices that share no memory. Empty: as the platform has it."""
    step_wait_us: int = 500
    """How long a step with other work waits for lookups, for all its requests together."""
    remote_wait_ms: int = 10_000
    """How long a prompt waits for what a remote store brings, from its first lookup on. 0: never."""
    await_others: str = "off"
    """on: a prompt that another engine computes now is waited for, and others may wait for what this one computes."""
    await_wait_ms: int = 30_000
    """How long a prompt waits for another engine, from its first lookup on."""
    await_producer_ms: int = 2_000
    """How long a request that a proxy sent on (do_remote_prefill) waits for the first sign of its prompt."""
    await_blocks_percent: int = 25
    """Share of the engine's blocks that may be filled while another engine computes. Beyond that, prompts wait without
    blocks."""
    store_timeout_ms: int = 30_000
    store_output: bool = True
    """Whether generated tokens are stored too, for the next turn of a conversation."""
    events_endpoint: str = ""
    """The server's events_endpoint, if vLLM's own KV events shall tell of the server's chunks too."""
    self_test: str = "auto"
    """Whether the layout is tested at registration. auto: if the release is newer than the table of releases."""

    def __post_init__(self) -> None:
        if self.self_test not in SELF_TEST:
            raise RequestError("settings", f"self_test={self.self_test!r} must be one of {SELF_TEST}")
        if self.await_others not in AWAIT_OTHERS:
            raise RequestError("settings", f"await_others={self.await_others!r} must be one of {AWAIT_OTHERS}")
        if self.await_blocks_percent > 100:
            raise RequestError("settings", f"await_blocks_percent={self.await_blocks_percent} must be in [0, 100]")
        for name in ("await_wait_ms", "await_producer_ms"):
            if getattr(self, name) > AWAIT_MS_MAX:
                raise RequestError("settings", f"{name}={getattr(self, name)} must be at most {AWAIT_MS_MAX}, an hour")


def parse(extra_config: Mapping[str, object]) -> Settings:
    """Check and convert the settings. RequestError names the key, what was expected and what came."""
    settings = checked(Settings, {name: value for name, value in extra_config.items() if name not in FOREIGN})
    if settings.device not in ("", PORTABLE):
        raise RequestError("settings", f"device={settings.device!r} must be {PORTABLE!r}, or left out")
    return settings
