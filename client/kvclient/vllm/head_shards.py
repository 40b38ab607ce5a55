"""KV in head shards, so that engines of different tensor parallel sizes share chunks.

The setting head_shards says into how many shards a chunk's KV heads are divided, whatever the engine's own number of
ranks is. A rank holds several shards, one after the other, and registers its memory once for each. Or several ranks
hold one shard, and take turns at writing its chunks. The namespace names the number of shards in place of the number of
ranks. Latent attention has one shard, which every rank holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvclient.offload.values import Group
from kvclient.values import CacheSpec
from kvclient.vllm import release_differences
from kvclient.vllm.layout import HeadShard, group_specs, layer_specs, layout_of
from kvserver.errors import RequestError
from kvserver.wire.messages import SEGMENT_BYTES_MIN, STAGING_SEGMENTS

SHARDS_HERE_MAX = 16
"""Most shards on one rank. Each job takes as many of the jobs that the server allows a rank."""

STAGING_BYTES_MIN = STAGING_SEGMENTS * SEGMENT_BYTES_MIN
LATENT_SHARDS = 1


class HeadShards(NamedTuple):
    """How a chunk's KV is divided, whatever the number of ranks is."""

    total: int = 0
    """Shards of each pipeline stage, as the namespace names them. 0: the setting is unset, and ranks divide the KV."""
    here: int = 0
    """Shards of each rank, with a cache for each. 0: heads are not divided, and the rank's memory is one cache."""


def check_head_shards(
    wanted: int,
    kv_config: Any,
    *,
    ranks: int,
    replicas: int,
    heads: int,
    contexts: int,
    has_drafts: bool,
    is_portable: bool,
    is_shuffled: bool,
) -> HeadShards:
    """How the setting divides the KV. RequestError names what the setting does not fit.

    ranks: the tensor parallel size. replicas: ranks that hold the same KV. heads: KV heads of the whole model; 0 for
    latent attention. contexts: the decode context parallel size.
    """
    if contexts > 1:
        raise _refusal(wanted, f"decode_context_parallel_size={contexts} divides tokens; expected 1")
    if replicas != (expected := max(1, ranks // (heads or LATENT_SHARDS))):
        raise _refusal(wanted, f"{replicas} of {ranks} ranks hold the same KV; expected {expected}")
    specs = [spec for group in kv_config.kv_cache_groups for spec in layer_specs(group)]
    if not heads:
        return _latent_shards(wanted, specs)
    if has_drafts:
        raise _refusal(wanted, "a draft model, whose heads may be divided in another way")
    if is_portable:
        raise _refusal(wanted, "device portable has one copy of every block; expected a device that shares its memory")
    if is_shuffled:
        raise _refusal(wanted, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT, by which the heads of a block are not apart")
    if heads % wanted:
        raise RequestError("settings", f"head_shards={wanted} must divide the model's {heads} KV heads")
    has_a_head_each = wanted == heads and ranks % heads == 0
    if wanted % ranks and not has_a_head_each:
        raise RequestError("settings", f"head_shards={wanted} must be a multiple of tensor_parallel_size={ranks}")
    here = max(1, wanted // ranks)
    if here > SHARDS_HERE_MAX:
        raise RequestError(
            "settings", f"head_shards={wanted} gives each of {ranks} ranks {here}; expected at most {SHARDS_HERE_MAX}"
        )
    heads_here = max(1, heads // ranks)
    for spec in specs:
        if not release_differences.has_a_slot_for_each_head(spec):
            raise _refusal(wanted, f"the KV heads of {type(spec).__name__} cannot be told apart in its blocks")
        if spec.num_kv_heads != heads_here:
            raise _refusal(
                wanted, f"each of {ranks} ranks holds {spec.num_kv_heads} KV heads of a layer; expected {heads_here}"
            )
    return HeadShards(wanted, here)


def _latent_shards(wanted: int, specs: Sequence[Any]) -> HeadShards:
    """One shard, whatever number is set: there are no heads to divide, and the bytes do not depend on it."""
    for spec in specs:
        if not release_differences.is_latent(spec):
            raise _refusal(wanted, f"{type(spec).__name__} beside latent attention, whose ranks hold the same KV")
    return HeadShards(LATENT_SHARDS)


def head_shard_specs(
    spec: CacheSpec,
    groups: Sequence[Group],
    kv_config: Any,
    kv_caches: Mapping[str, Any],
    *,
    here: int,
    ranks: int,
    rank: int,
    replicas: int,
) -> list[CacheSpec]:
    """The specs of one rank's shards, made from that of all its memory.

    here: shards of each rank. ranks, rank: in all pipeline stages, numbered stage by stage. replicas: consecutive ranks
    that hold the same shard. If there are several, each rank holds one shard.
    """
    staging_bytes = max(1, spec.staging_bytes // here // STAGING_BYTES_MIN) * STAGING_BYTES_MIN
    layouts = [layout_of(kv_config, kv_caches, shard=HeadShard(number, here)) for number in range(here)]
    return [
        replace(
            spec,
            name=f"{spec.name}.{number}",
            groups=group_specs(
                groups,
                layout,
                blocks=kv_config.num_blocks,
                ranks=ranks * here,
                rank=rank * here + number,
                replicas=replicas,
            ),
            staging_bytes=staging_bytes,
        )
        for number, layout in enumerate(layouts)
    ]


def _refusal(wanted: int, what: str) -> RequestError:
    return RequestError("unsupported", f"head_shards={wanted}: {what}")
