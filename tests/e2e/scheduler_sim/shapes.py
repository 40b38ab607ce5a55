"""Differences between seeds: the engine's shape and options, and the rates of faults."""

from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from .content import BLOCK_TOKENS

WINDOW = 10
CONTEXTS = 2


class Kind(NamedTuple):
    """The kind of a group of layers."""

    window: int
    """Number of tokens it attends to, including the present one; 0: all."""

    def first(self, end: int) -> int:
        """The first token whose KV is needed to compute the token after `end` tokens."""
        return max(0, end - (self.window - 1)) if self.window else 0


FULL, SLIDING = Kind(0), Kind(WINDOW)


@dataclass(frozen=True)
class Options:
    """The settings of vLLM and the connector."""

    is_async: bool
    has_new_runner: bool
    """This runner receives a resumed request as if it were new."""
    tensor_ranks: int
    groups: tuple[Kind, ...]
    chunk_tokens: int
    blocks: int
    step_tokens: int
    running_max: int
    role: str
    has_priorities: bool
    on_failed_loads: str
    min_load_tokens: int
    step_wait_us: int
    beside: str
    """Position of another connector: before ours, after it ("behind"), or none ("")."""
    stages: int
    """Pipeline stages, each with its own ranks."""
    await_others: bool = False
    await_wait_ms: int = 0
    await_producer_ms: int = 0
    await_blocks_percent: int = 0
    has_proxy: bool = False
    """A proxy for prefill/decode disaggregation says of some requests where they are computed, or something wrong."""
    contexts: int = 1
    """Ranks over which vLLM deals out the tokens of a block. Here each of them holds them all."""

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor_ranks

    @property
    def recovers(self) -> bool:
        """Whether the engine is taken for one that computes a request right after a failure set it back.

        In a third of the seeds it is not, whatever vLLM's release."""
        return self.blocks != 40

    @property
    def drops_quiet_steps(self) -> bool:
        """As older releases do, with their class LLM: what is counted in a step without an answer gets lost."""
        return not self.has_new_runner

    @property
    def batches(self) -> int:
        """Steps in flight at once."""
        return self.stages + self.is_async


@dataclass(frozen=True)
class Day:
    """Chances of each fault, by event or job."""

    abort: float
    reset: float
    forget: float
    """Empties the engine's own prefix cache."""
    pause: float
    unread: float
    """A prompt whose log-probabilities are wanted: nothing may be read from a cache."""
    load_fails: float
    store_short: float
    gives: float
    """The other connector offers part of a prompt."""
    gift_fails: float
    evict: float
    restart: float
    down: float
    pace: float
    """How much of the work in flight advances between two calls of the engine."""
    output_max: int


def draw_options(rng: Random, *, beside: bool, awaits: bool, has_windows: bool, has_stages: bool) -> Options:
    """beside: another connector may fail, as in draw_day(). awaits: prompts of other engines are awaited.

    has_windows, has_stages: whether this release of vLLM can run them with the connector.
    """
    is_full = beside or awaits
    groups = rng.choice(((FULL,), (FULL,), (FULL,), (FULL, SLIDING), (SLIDING,))) if not is_full else (FULL,)
    groups = groups if has_windows else (FULL,)
    places = ("before", "before", "behind", "") if groups == (FULL,) else ("",)
    options = Options(
        is_async=rng.random() < 0.6,
        has_new_runner=rng.random() < 0.5,
        tensor_ranks=rng.choice((1, 1, 2)),
        groups=groups,
        chunk_tokens=BLOCK_TOKENS * rng.choice((1, 2, 3) if groups == (FULL,) else (1, 2)),
        blocks=rng.choice((24, 40, 90)),
        step_tokens=rng.choice((8, 16, 64)),
        running_max=rng.choice((2, 4, 8)),
        role=rng.choice(("kv_both",) * 6 + ("kv_producer", "kv_consumer")),
        has_priorities=rng.random() < 0.3,
        on_failed_loads=rng.choice(("recompute", "recompute", "recompute", "fail")),
        min_load_tokens=rng.choice((0, 0, 9)),
        step_wait_us=rng.choice((0, 500)),
        beside=rng.choice(places[:3] if beside else places),
        stages=rng.choice((1, 1, 2, 3) if has_stages else (1,)),
    )
    if groups == (FULL,) and not beside and (awaits or rng.random() < 0.4):
        options = replace(
            options,
            await_others=rng.random() < 0.7,
            await_wait_ms=rng.choice((20, 400, 4000)),
            await_producer_ms=rng.choice((30, 700)),
            await_blocks_percent=rng.choice((25, 60, 100)) if awaits else rng.choice((0, 25, 60)),
            has_proxy=rng.random() < 0.6,
        )
    may_deal_out = groups == (FULL,) and options.tensor_ranks == CONTEXTS
    return replace(options, contexts=CONTEXTS) if may_deal_out and rng.random() < 0.5 else options


def draw_day(rng: Random, options: Options, *, beside: bool) -> Day:
    failures: tuple[float, ...] = (0.3, 1.0) if beside else (0, 0.3, 1.0) if options.beside else (0,)
    return Day(
        abort=rng.choice((0, 0.02, 0.08)),
        reset=rng.choice((0, 0, 0.03)),
        forget=rng.choice((0, 0.1, 0.4)),
        pause=rng.choice((0, 0, 0.02)),
        unread=rng.choice((0, 0, 0.2)),
        load_fails=rng.choice((0, 0, 0.3, 1.0)),
        store_short=rng.choice((0, 0, 0.3)),
        gives=rng.choice((0.2, 0.8)) if options.beside else 0,
        gift_fails=rng.choice(failures),
        evict=rng.choice((0, 0.05)),
        restart=rng.choice((0, 0, 0.01)),
        down=rng.choice((0, 0, 0.02)),
        pace=rng.choice((0.1, 0.5, 0.9)),
        output_max=rng.choice((3, 12, 40)),
    )
