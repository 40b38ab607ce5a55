"""KV that another connector loads within a step, doubtful until the engine has checked the load (MultiConnector).

vLLM puts such blocks into its prefix cache at once, so requests of this step and the next may build on them. It learns
of a failure only after both steps have been scheduled. Then it recomputes the blocks in place, over as many steps as
needed. Blocks that other requests computed from them meanwhile stay, and are shared like any others.

So this file tracks blocks. A request stores nothing after a doubtful block, or after a wrong block that was not
recomputed since. Blocks computed after a wrong block are wrong as well.

Asynchronous scheduling (vLLM 0.20.2 to 0.32) is worse. vLLM learns of the failure after it has scheduled the next step
of these requests. It leaves out one token and takes that step's token instead. From then on its scheduler and its
workers count differently: until the request is admitted again, its KV does not match its token ids.

The same happens with pipeline stages, and to any running request that holds a block of the failed load. It may have
found the block in the prefix cache, or got it after the load's request was gone. It may even be that request, preempted
and admitted again. vLLM sets them all back to before tokens that it has scheduled, and this file looks for that.

Release 0.26 counts wrong even after a request was preempted and admitted again (scheduler_sim). So before 0.31 an
engine that schedules ahead, or has Model Runner V2, stores nothing more after such a failure.

Model Runner V2 goes wrong in every engine (vLLM's issue 49250, and by reading 0.32.0). Its workers count computed
tokens by themselves, and go on where they are when the scheduler sets a request back.

Only the blocks of a model with one group are tracked. With several groups, vLLM does not survive such a failure.
"""

from collections.abc import Iterable, Iterator, Sequence

DOUBTFUL_STEPS = 2
"""Further steps of a request after which vLLM has checked its load, at least: vLLM may read a step's outcome after
scheduling the next, and with pipeline stages after more."""


class _Load:
    """Another connector's load whose outcome is unknown."""

    def __init__(
        self, blocks: Sequence[int], *, first_place: int, end_tokens: int, said_tokens: int, steps: int
    ) -> None:
        self.blocks = blocks
        self.first_place = first_place
        """Index of the first loaded block in the request's table."""
        self.end_tokens = end_tokens
        self.said_tokens = said_tokens
        """The request's tokens at admission. If it has more later, the step that loaded went well."""
        self.steps_left = steps
        self.behind: set[int] = set()
        """Blocks that this request and others have computed after the loaded ones since."""


class UncheckedLoads:
    """Doubtful and wrong blocks of one engine. Steps call begin_step(), notice() for all requests, and holds_back()."""

    def __init__(
        self, block_tokens: int, *, steps_ahead: int = 0, workers_go_back: bool = True, recovers: bool = True
    ) -> None:
        """steps_ahead: how many more steps the engine schedules at most before it knows the outcome of one.

        workers_go_back: if a request is set back, its workers compute the tokens that the scheduler says.

        recovers: a request that was set back is computed right once it is admitted again."""
        self._block_tokens, self._steps_ahead = block_tokens, steps_ahead
        self._confuses = steps_ahead > 0 or not workers_go_back
        """Whether a request that is set back is computed wrong until it is admitted again, or for good."""
        self._recovers = recovers or not self._confuses
        self._is_over = False
        """Nothing may be stored any more."""
        self._loads: dict[str, _Load] = {}
        """Request -> its doubtful load."""
        self._wrong: dict[int, int] = {}
        """Wrong block -> how many of its leading tokens are right."""
        self._lost: set[str] = set()
        """Requests whose token counts differ between the engine's scheduler and its workers."""
        self._unheard_steps = 0
        """Steps that may still be scheduled before the last load's outcome is known, this one among them."""
        self._unheard_blocks: set[int] = set()
        """Blocks of the loads whose outcome the engine may still hear, if it does not recover from a failure."""
        self._least: dict[str, int] = {}
        """Request -> the least token with which its next step begins unless a failed load has set it back.

        Only requests that were scheduled while a load's outcome was unknown, in an engine that confuses them."""

    def __bool__(self) -> bool:
        """Whether anything is doubtful or wrong. If not, only admissions matter."""
        is_doubtful = self._loads or self._wrong or self._lost or self._least or self._unheard_steps
        return bool(is_doubtful or self._is_over)

    def begin_step(self) -> None:
        """The engine schedules a step, which may be empty."""
        if not self._unheard_steps:
            self._unheard_blocks.clear()
        self._unheard_steps = max(0, self._unheard_steps - 1)

    def failed(self, blocks: Iterable[int]) -> bool:
        """The engine has heard that loads into these blocks failed. Returns whether nothing is stored from now on."""
        if self._unheard_blocks.isdisjoint(blocks) or self._is_over:
            return False
        self._is_over = True
        return True

    def notice(
        self, name: str, table: Sequence[int], *, begin: int, end: int, known: int | None, said_tokens: int
    ) -> None:
        """The request computes tokens [begin, end) in this step.

        known: leading tokens that the engine or this connector had at admission, or None if it was admitted in an
        earlier step. Another connector loaded the tokens in between.
        """
        load = self._loads.get(name)
        is_set_back = known is None and begin < self._least.pop(name, 0)
        if known is not None:
            self.forget(name, said_tokens=0)
            # A prefix in HBM may be longer, by less than one block, than vLLM told match().
            if begin >= known + self._block_tokens:
                self._begin(name, table, known=known, end=begin, said_tokens=said_tokens)
        elif load is not None and begin < load.end_tokens:
            self._failed(name, begin)
        elif load is not None and is_set_back:
            self._failed(name, 0)  # another request computes the loaded blocks anew, or some of them
        elif load is not None:
            load.steps_left -= 1
            if not load.steps_left:
                del self._loads[name]
        if is_set_back:
            self._lost.add(name)
        if self._wrong and name not in self._lost and not self._is_behind_wrong(table, begin):
            for place, block in self._touched(table, begin, end):
                self._computed(block, until=end - place * self._block_tokens)

    def holds_back(self, name: str, table: Sequence[int], *, begin: int, end: int, said_tokens: int) -> bool:
        """Whether nothing may be stored of the request in this step."""
        if self._is_over:
            return True
        if self._unheard_steps:
            # A step brings one token at least. Drafts and tokens that are not sampled yet may not count in the end.
            self._least[name] = max(begin + 1, min(end, said_tokens))
        held = name in self._loads
        if held:  # its blocks are shared, and the request may end before it recomputes them
            self._loads[name].behind.update(block for _, block in self._touched(table, begin, end))
        before = set(table[: -(-begin // self._block_tokens)])
        for owner, load in self._loads.items():
            if owner != name and not before.isdisjoint((*load.blocks, *load.behind)):
                held = True
                load.behind.update(block for _, block in self._touched(table, begin, end))
        if name in self._lost or self._is_behind_wrong(table, begin):
            held = True
            self._wrong |= {block: 0 for _, block in self._touched(table, begin, end)}
        return held

    def brought(self, table: Sequence[int], *, begin: int, end: int) -> None:
        """Tokens [begin, end) will be loaded, and count only after that. Their blocks' old content is gone."""
        if self._wrong:
            for block in table[begin // self._block_tokens : end // self._block_tokens]:
                self._wrong.pop(block, None)

    def forget(self, name: str, *, said_tokens: int) -> None:
        """The request has finished or starts over. Its load counts as failed if nobody will learn the outcome."""
        self._lost.discard(name)
        self._least.pop(name, None)
        load = self._loads.get(name)
        # In an engine that schedules ahead, the first new tokens may belong to the next steps.
        if load is not None and said_tokens > load.said_tokens + self._steps_ahead:
            del self._loads[name]
        elif load is not None:
            self._failed(name, 0)

    # ---------------------------------------------------------------- helpers

    def _begin(self, name: str, table: Sequence[int], *, known: int, end: int, said_tokens: int) -> None:
        first = known // self._block_tokens
        blocks = table[first : -(-end // self._block_tokens)]
        for block in blocks:
            self._wrong.pop(block, None)  # the block was reallocated and has new content
        steps = max(DOUBTFUL_STEPS, 1 + self._steps_ahead)
        self._loads[name] = _Load(blocks, first_place=first, end_tokens=end, said_tokens=said_tokens, steps=steps)
        if self._confuses:
            self._unheard_steps = 1 + self._steps_ahead
        if not self._recovers:
            self._unheard_blocks.update(blocks)

    def _failed(self, name: str, begin: int) -> None:
        """The load failed: its tokens are wrong from the block boundary `begin` on."""
        load = self._loads.pop(name)
        wrong = load.blocks[max(0, begin // self._block_tokens - load.first_place) :]
        self._wrong |= dict.fromkeys([*wrong, *load.behind], 0)

    def _touched(self, table: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(index, block) of the blocks that hold tokens [begin, end)."""
        first = begin // self._block_tokens
        return enumerate(table[first : -(-end // self._block_tokens)], first)

    def _is_behind_wrong(self, table: Sequence[int], begin: int) -> bool:
        return any(
            block in self._wrong and min(begin - place * self._block_tokens, self._block_tokens) > self._wrong[block]
            for place, block in self._touched(table, 0, begin)
        )

    def _computed(self, block: int, *, until: int) -> None:
        """The block's tokens before `until` are right now."""
        if until >= self._block_tokens:
            self._wrong.pop(block, None)
        elif block in self._wrong:
            self._wrong[block] = until
