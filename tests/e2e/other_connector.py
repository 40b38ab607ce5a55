"""A connector to run beside ours in MultiConnector: it claims to have prompts, and then fails to load them.

It loads within a step, as some connectors do, and reports the failure after the step, so that vLLM computes the
tokens. It offers each prompt that begins with MARK once, and no other prompt.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as interface
from vllm.logger import init_logger

log = init_logger("vllm.other_connector")

MARK = 7
BLOCKS = 16
"""Blocks that it offers for a prompt."""


@dataclass
class Step(interface.KVConnectorMetadata):
    """The blocks it had to fill in this step."""

    blocks: set[int] = field(default_factory=set)


class LoadsOnly(interface.KVConnectorBase_V1, interface.SupportsHMA):
    """A connector that stores nothing and holds no blocks."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Unreliable(LoadsOnly):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._offered: set[tuple[int, ...]] = set()
        self._blocks: set[int] = set()

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        prompt = tuple(request.prompt_token_ids)
        if prompt[0] != MARK or num_computed_tokens or request.cache_salt or prompt in self._offered:
            return 0, False
        self._offered.add(prompt)
        return BLOCKS * self._block_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._blocks.update(blocks.get_block_ids()[0][:BLOCKS])

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        blocks, self._blocks = self._blocks, set()
        return Step(blocks)

    # worker

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self._blocks = step.blocks
        if self._blocks:
            log.info("brings nothing into %d blocks", len(self._blocks))

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._blocks = self._blocks, set()
        return blocks
