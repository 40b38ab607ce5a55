"""The pipeline stages of a vLLM engine. Each holds other layers, and its worker knows only these.

A chunk has a shard for each stage and tensor rank. The namespace has to say how the layers are divided, and every
worker has to say the same namespace. So the workers tell each other what they hold before any of them goes on.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvserver.errors import RequestError


class Stage(NamedTuple):
    """The part of the model that the workers of one stage hold. Its tensor ranks hold the same layers."""

    layers: list[list[str]]
    """Layer names per group, in the order of the regions."""
    backends: list[str]
    """Each layer's attention backend. Each backend has its own page layout."""
    states: list[str]
    """Types and shapes of the states. Their page sizes do not show them."""
    replicas: int
    """Consecutive tensor ranks that hold the same KV."""


def told_by_all(look: Callable[[], Stage], gather: Callable[[object], Sequence[Any]]) -> list[Stage]:
    """The stages in their order. gather: sends this stage's value to all stages, and returns the values of all.

    RequestError, on every stage, if one cannot be cached. So `look` is called inside: the others must not wait for a
    worker that has given up.
    """
    mine: object = "it has failed, and its log says why"
    try:
        mine = tuple(look())
    except RequestError as problem:
        mine = str(problem)
        raise
    finally:
        told = gather(mine)
    for number, one in enumerate(told):
        if isinstance(one, str):
            raise RequestError("layout", f"pipeline stage {number}: {one}")
    stages = [Stage(*one) for one in told]
    for number, stage in enumerate(stages):
        lacking = [group for group, names in enumerate(stage.layers) if not names]
        if lacking:
            raise RequestError(
                "layout",
                f"pipeline stage {number} has no layers of groups {lacking}; expected layers of every group on every "
                "stage (VLLM_PP_LAYER_PARTITION divides them)",
            )
    shared = math.gcd(*(stage.replicas for stage in stages))
    return [stage._replace(replicas=shared) for stage in stages]
