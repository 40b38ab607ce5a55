"""The connector settings in an engine's configuration. Unknown keys and wrong types are errors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from kvclient.offload.values import Group
from kvclient.values import STAGING_BYTES, Timeouts
from kvserver.errors import RequestError

MIB = 1 << 20
CHUNK_TOKENS_MIN = 256
"""Smallest automatic chunk. Below it, keys and slots cost more than a finer prefix gains."""
NO_GRAPHS = (
    "this engine runs without CUDA graphs (%s): decoding takes several times as long, and no cache makes up for that"
)
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """Settings common to all connectors. Each engine's manual explains their use there."""

    socket: str
    """Path of the server's socket."""
    chunk_tokens: int = 0
    """Tokens of a chunk. 0: the smallest multiple of the engine's blocks with at least 256 tokens, or fewer if the
    shortest window requires it."""
    min_load_tokens: int = 256
    """Fewest tokens that a retrieve must add to the engine's own. Below this the engine computes them."""
    lookup_timeout_ms: int = 20
    """Time after which a lookup without an answer is a miss."""
    load_timeout_ms: int = 10_000
    store_timeout_ms: int = 10_000
    model_id: str = ""
    """Replaces the digest of the model's files. Required if there are no files. Different models must not share
    an id."""
    weights_epoch: int = 0
    """Raise it whenever the weights change without their files, as in reinforcement learning."""
    tenant: str = ""
    staging_mib: int = STAGING_BYTES // MIB
    """GPU memory that the connector takes besides the KV cache."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            lookup_s=self.lookup_timeout_ms / 1000,
            retrieve_s=self.load_timeout_ms / 1000,
            store_s=self.store_timeout_ms / 1000,
        )


def checked(kind: type[S], given: Mapping[str, object]) -> S:
    """Build a dataclass of str, int and bool fields. RequestError names the key, what was expected and what came."""
    described: Any = kind
    known = {item.name: item for item in fields(described)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RequestError("settings", f"kv_connector_extra_config has unknown keys {unknown}; known: {sorted(known)}")
    missing = [name for name, item in known.items() if item.default is MISSING and name not in given]
    if missing:
        raise RequestError("settings", f"kv_connector_extra_config lacks {missing}; socket names the server's socket")
    for name, value in given.items():
        wanted: Any = known[name].type
        if type(value) is not wanted:  # exact type: True is not a number here
            raise RequestError("settings", f"{name}={value!r} must be of type {wanted.__name__}")
        if isinstance(value, int) and value < 0:
            raise RequestError("settings", f"{name}={value} must not be negative")
    return kind(**given)


def chosen_chunk_tokens(groups: Sequence[Group], wanted: int) -> int:
    """Tokens of a chunk: the user's choice, or the smallest that fits.

    Not longer than the shortest window. A longer chunk may be computed in several steps, and the engine would drop the
    window groups' first blocks before the last ones are computed. Such a chunk could never be stored.
    """
    unit = math.lcm(*(group.block_tokens for group in groups))
    if any(group.kind == "state" for group in groups):
        if wanted not in (0, unit):
            raise RequestError("chunk-tokens", f"chunk_tokens={wanted} must be {unit}: so often a state is kept")
        return unit
    if not wanted:
        windows = [group.window_tokens + 1 for group in groups if group.kind == "window"]
        units = min([-(-CHUNK_TOKENS_MIN // unit), *(window // unit for window in windows)])
        return max(1, units) * unit
    if wanted % unit:
        raise RequestError(
            "chunk-tokens",
            f"chunk_tokens={wanted} must be a multiple of {unit}, of the groups' block sizes "
            f"{[group.block_tokens for group in groups]}",
        )
    return wanted
