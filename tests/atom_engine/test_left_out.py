"""KV that ATOM never computes, with no connector at all: which of it these tests ignore, and that none of it is stored.

Blocks have 32 tokens, chunks 64. A prompt of 120 tokens with 40 of output is recomputed in chunks that end at 64 and
at 128; there ATOM takes the prompt for computed.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.forwards import Forwards
from tests.atom_engine.memory import Memory, Shape
from tests.atom_engine.rig import Rig, config_of, prompt
from tests.atom_engine.scheduler import Batch, Scheduler
from tests.atom_engine.sequence import Sequence

SHAPE = Shape(form="mla", layers=1, blocks=10)
PROMPT, LAST_CHUNK = 120, 128
STEPS_MAX = 200
MAKERS = [pytest.param({}, id="at once")]
if ATOM_DIR:
    MAKERS.append(pytest.param({"deferred_output": True}, id="a step late"))


class NoConnector:
    """A connector that does nothing: the stand-in scheduler always asks one. ATOM's own scheduler has none here."""

    def get_num_new_matched_tokens(self, seq: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, seq: Any) -> None:
        pass

    def adjust_prefill_chunk_after_alloc(self, seq: Any, chunk: int) -> int:
        return chunk

    def should_park_partial_prefill_for_load(self, seq: Any) -> bool:
        return False

    def build_connector_meta(self) -> None:
        pass

    def should_defer_free(self, seq: Any) -> bool:
        return False

    def request_finished(self, seq: Any) -> None:
        pass


class Rank:
    """One rank: its memory and its forwards."""

    def __init__(self) -> None:
        self.memory = Memory(SHAPE, 0)
        self.forwards = Forwards([self.memory], SHAPE.block_tokens)

    def flip(self, seq: Any, at: int) -> None:
        """Flips one bit of a token. MLA has all bytes of a token in a row."""
        (tensor,) = self.memory.tensors
        block, place = divmod(at, SHAPE.block_tokens)
        row = seq.block_table[block] * SHAPE.block_tokens + place
        tensor.pool.map[row * tensor.stride()[0] * tensor.element_size() + 5] ^= 1


class Engine(Rank):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        config = config_of("", SHAPE, model="m", max_num_batched_tokens=64, **options)
        config.kv_transfer_config = {}
        self.scheduler: Any
        if ATOM_DIR:
            from tests.atom_engine.real import RealScheduler  # noqa: PLC0415  (it needs all of ATOM)

            self.scheduler = RealScheduler(config)
            assert self.scheduler.kv_connector is None
        else:
            self.scheduler = Scheduler(config, NoConnector())

    def add(self, tokens: list[int], max_tokens: int) -> Any:
        seq = self.scheduler.sequence(tokens, max_tokens=max_tokens)
        self.scheduler.add(seq)
        return seq

    def step(self) -> Batch:
        batch: Batch = self.scheduler.schedule()
        for block in self.scheduler.take_spoiled():
            self.memory.spoil(block)
        self.forwards.run(batch)
        self.scheduler.postprocess(batch)
        return batch

    def until(self, what: str, probe: Callable[[], object]) -> None:
        for _ in range(STEPS_MAX):
            if probe():
                return
            self.step()
        raise AssertionError(f"{what}: not in {STEPS_MAX} steps")

    def with_a_gap(self) -> tuple[Any, Batch]:
        """A sequence that decodes again after a preemption, and its first decoding step."""
        ahead = self.add(prompt(1, PROMPT), 50)
        seq = self.add(prompt(2, PROMPT), 70)
        self.until("the one ahead ends", lambda: ahead.is_finished)
        assert self.scheduler.preemptions
        assert seq.num_tokens > LAST_CHUNK
        self.scheduler.forget_prefixes()  # otherwise it continues with blocks that are still there
        while (batch := self.step()).is_prefill:
            assert batch.seqs == [seq]
        return seq, batch


@pytest.fixture(params=MAKERS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param)
    yield made
    made.memory.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.memory.close()


# ---------------------------------------------------------------- ATOM alone


def test_output_behind_the_chunk_that_reaches_the_prompts_end_is_never_computed(engine: Engine) -> None:
    """Recorded here, so that a difference seen with the connector is not mistaken for this one."""
    seq, batch = engine.with_a_gap()
    (first,) = batch.first
    gap = list(range(LAST_CHUNK, first))
    assert first - LAST_CHUNK >= 32
    assert engine.forwards.left_out(seq, first) == gap
    for at in range(first):
        assert bool(engine.memory.wrong(seq.block_table, seq.token_ids, at, at + 1)) == (at in gap), at
    engine.until("its end", lambda: seq.is_finished)


def test_a_prompt_that_goes_on_behind_such_output_attends_to_the_gap(engine: Engine) -> None:
    """ATOM publishes the blocks as if they were complete."""
    seq, _ = engine.with_a_gap()
    engine.until("its end", lambda: seq.is_finished)
    engine.add([*seq.token_ids[:165], *prompt(3, 40)], 1)  # its prefix in HBM ends between blocks, at 160
    with pytest.raises(AssertionError, match="wrong pieces before 160"):
        engine.step()


# ---------------------------------------------------------------- errors that are noticed


@pytest.mark.parametrize("at", [0, 63, PROMPT - 1, PROMPT, LAST_CHUNK - 1, -1])
def test_a_wrong_byte_beside_the_gap_is_noticed(engine: Engine, at: int) -> None:
    """Wrong bytes in the prompt, in recomputed output, and in tokens computed after the gap."""
    seq, batch = engine.with_a_gap()
    engine.flip(seq, at if at >= 0 else batch.first[0])
    with pytest.raises(AssertionError, match="attends to 1 wrong pieces"):
        engine.step()


def sequence(tokens: int, prompt_tokens: int) -> Sequence:
    seq = Sequence(prompt(4, tokens))
    seq.num_prompt_tokens, seq.block_table = prompt_tokens, [7, 2, 5]
    return seq


def forward(rank: Rank, seq: Sequence, first: int, end: int, *, is_prefill: bool) -> None:
    rank.forwards.run(Batch([seq], [first], [end - first], None, is_prefill))


def test_what_was_left_out_is_looked_at_when_it_has_been_computed(rank: Rank) -> None:
    seq = sequence(71, 40)
    forward(rank, seq, 0, 64, is_prefill=True)
    forward(rank, seq, 70, 71, is_prefill=False)
    assert rank.forwards.left_out(seq, 71) == [64, 65, 66, 67, 68, 69]
    forward(rank, seq, 0, 67, is_prefill=True)  # preempted once more, and given the same blocks
    assert rank.forwards.left_out(seq, 71) == [67, 68, 69, 70]
    forward(rank, seq, 70, 71, is_prefill=False)
    assert rank.forwards.left_out(seq, 71) == [67, 68, 69]
    for at in (66, 70):
        rank.flip(seq, at)
    assert len(rank.forwards.wrong(seq, 71)) == 2


def test_what_was_left_out_is_known_before_its_sequence_goes_on(rank: Rank) -> None:
    """ATOM publishes the block after the chunk that it takes for the last; an equal sequence comes next."""
    seq, other = sequence(71, 40), sequence(71, 40)
    forward(rank, seq, 0, 64, is_prefill=True)
    forward(rank, other, 68, 71, is_prefill=True)
    assert rank.forwards.left_out(other, 71) == [64, 65, 66, 67]


def test_what_was_left_out_in_blocks_of_others_is_looked_at(rank: Rank) -> None:
    """Gaps are identified by block and by all tokens: only one of the two being equal is not enough."""
    seq = sequence(71, 40)
    forward(rank, seq, 0, 64, is_prefill=True)
    forward(rank, seq, 70, 71, is_prefill=False)
    assert len(rank.forwards.left_out(seq, 71)) == 6
    other = sequence(71, 40)
    other.token_ids[0] += 1
    elsewhere = sequence(71, 40)
    elsewhere.block_table = [7, 2, 6]
    longer = sequence(71, 67)
    assert [rank.forwards.left_out(one, 71) for one in (other, elsewhere)] == [[], []]
    assert rank.forwards.left_out(longer, 71) == [67, 68, 69], "what is its prompt is none of it"


def test_a_prompt_that_is_not_computed_to_its_end_is_an_error(rank: Rank) -> None:
    seq = sequence(41, 40)
    forward(rank, seq, 0, 32, is_prefill=True)
    with pytest.raises(AssertionError, match="wrong pieces before 40"):
        forward(rank, seq, 40, 41, is_prefill=False)


# ---------------------------------------------------------------- with the connector


@pytest.mark.parametrize("options", MAKERS)
def test_a_prompt_that_has_a_gap_in_hbm_is_stored_up_to_the_gap_only(
    make_rig: Callable[..., Rig], options: dict[str, Any]
) -> None:
    """KV computed after the gap is as wrong as the gap. A sequence that computes everything stores everything."""
    rig = make_rig(shape=SHAPE, max_num_batched_tokens=64, chunk_tokens=64, **options)
    ahead = rig.add(prompt(1, PROMPT), max_tokens=50)
    seq = rig.add(prompt(2, PROMPT), max_tokens=90)
    rig.until("both to be computed", lambda: seq.num_cached_tokens == PROMPT)
    # A request under a store is not preempted, so a slow store would leave the gap to the one ahead.
    rig.idle_until("their stores to end", lambda: not rig.connector.has_pending_work())
    rig.until("the one ahead ends", lambda: ahead.is_finished)
    rig.scheduler.forget_prefixes()
    rig.drain()
    longer = [*seq.token_ids[:200], *prompt(3, 40)]
    rig.orders.clear()
    with mock.patch.object(rig.forwards, "wrong", return_value=[]):
        rig.run(longer)
    assert rig.scheduler.preemptions
    assert rig.stored_tokens() == [(64, LAST_CHUNK)]
    for loaded in (LAST_CHUNK, 192):
        rig.forget_hbm()
        rig.orders.clear()
        rig.run(longer)
        assert [load.end_tokens for load in rig.loads()] == [loaded]


# ---------------------------------------------------------------- states


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in keeps no checkpoints; ATOM_DIR names a checkout that does")
@pytest.mark.parametrize("keeps_forks", [False, True])
def test_a_state_that_is_read_after_two_passes_of_prefills_is_another_requests(keeps_forks: bool) -> None:
    """A checkpoint of recurrent layers hands the slot on: the next forward reads the old one, which is pinned for two
    passes. If prefills take more passes than that, ATOM gives the slot to one of them.

    With keeps_forks the rig keeps such slots, as all other tests need it.
    """
    shape = Shape(form="gdn", layers=1, blocks=20, slots=3)
    config = config_of("", shape, model="m", max_num_batched_tokens=64, state_checkpoint_interval_tokens=64)
    config.kv_transfer_config = {}
    from tests.atom_engine.real import RealScheduler  # noqa: PLC0415  (it needs all of ATOM)

    scheduler = RealScheduler(config)
    scheduler.keeps_forks = keeps_forks
    memory = Memory(shape, 0)
    forwards = Forwards([memory], shape.block_tokens)

    def step() -> None:
        batch = scheduler.schedule()
        assert batch is not None
        forwards.run(batch)
        scheduler.postprocess(batch)

    seq = scheduler.sequence(prompt(1, 40), max_tokens=60)
    scheduler.add(seq)
    while seq.state_fork_src < 0:
        step()
    scheduler.add(scheduler.sequence(prompt(2, 256), max_tokens=1))
    wrong = nullcontext() if keeps_forks else pytest.raises(AssertionError, match="goes on at 64: wrong state")
    with wrong:
        while not scheduler.is_idle:
            step()
    memory.close()


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in keeps no checkpoints; ATOM_DIR names a checkout that does")
def test_what_such_a_request_says_is_not_stored_when_a_later_prompt_finds_it_in_hbm(
    make_rig: Callable[..., Rig],
) -> None:
    """ATOM gives the state away in decode, between 128 and the next forward, and publishes what follows."""
    shape = Shape(form="gdn", layers=1, blocks=40, slots=3)
    rig = make_rig(shape=shape, chunk_tokens=64, max_num_batched_tokens=64, state_checkpoint_interval_tokens=64)
    rig.scheduler.keeps_forks = False
    wrong: list[int] = []
    has_state = rig.forwards._has_state

    def noted(seq: Any, first: int, slot: int) -> bool:
        if not has_state(seq, first, slot):
            wrong.append(first)
        return True

    with mock.patch.object(rig.forwards, "_has_state", noted):
        seq = rig.add(prompt(1, 100), max_tokens=120)
        rig.until("a fork", lambda: seq.state_fork_src >= 0 and seq.num_tokens > 128)
        rig.add(prompt(2, 256))
        rig.add(prompt(3, 256))
        rig.until("it to end", lambda: seq.is_finished)
        rig.drain()
        assert wrong == [128]
        rig.orders.clear()
        later = rig.add([*seq.token_ids[:200], *prompt(4, 130)])
        rig.until("the later one to end", lambda: later.is_finished)
        rig.drain()
    assert later.prefix_cache_hit_tokens == 192
    assert all(end <= 128 for _, end in rig.stored_tokens())
