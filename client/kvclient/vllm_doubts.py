"""What another connector has brought within a step, until the engine has looked whether it did (MultiConnector).

vLLM puts such blocks into its prefix cache at once, so that the requests of this step and the next may go on behind
them, and hears of a failure when both have been scheduled. Then it computes them anew, in place and in as many steps as
that takes; what others have computed behind them meanwhile stays, and is shared as any other. So blocks are followed:
nothing is stored of a request behind one that is in doubt, or behind one that turned out wrong and was not computed
since; and what is computed there is wrong as well.

With asynchronous scheduling vLLM (0.20.2 to 0.32) does worse: it hears of the failure when it has scheduled the next
step of these requests, leaves a token out, and takes that step's for it. From then on its scheduler and its workers
count differently: what such a request computes, until it is admitted again, is not what its tokens say.

Blocks are those of the one group that the model has. With several, vLLM does not survive such a failure.
"""

from collections.abc import Iterator, Sequence

DOUBTFUL_STEPS = 2
"""After so many more steps of a request vLLM has looked at what became of its load: the outcome of one step is read
after the next has been scheduled."""


class _Load:
    """In doubt."""

    def __init__(self, blocks: Sequence[int], *, first_place: int, end_tokens: int, said_tokens: int) -> None:
        self.blocks = blocks
        self.first_place = first_place
        """In the request's table."""
        self.end_tokens = end_tokens
        self.said_tokens = said_tokens
        """Of the request when it was admitted. Once it has more, the step that loaded went well."""
        self.steps_left = DOUBTFUL_STEPS
        self.behind: set[int] = set()
        """Blocks in which it and others have computed behind it since."""
        self.followers: set[str] = set()
        """These others."""


class Doubts:
    """Of one engine. In each step, notice() for all requests, and then holds_back() for each."""

    def __init__(self, block_tokens: int, *, is_async: bool = False) -> None:
        """is_async: the engine schedules a step before the one ahead of it is over."""
        self._block_tokens, self._is_async = block_tokens, is_async
        self._loads: dict[str, _Load] = {}
        """By the request for which they were made."""
        self._wrong: dict[int, int] = {}
        """Blocks that do not hold what the engine believes -> how many of their leading tokens are right."""
        self._lost: set[str] = set()
        """Requests of which the engine's scheduler and its workers count differently."""

    def __bool__(self) -> bool:
        """Whether there is anything to look at but admissions."""
        return bool(self._loads or self._wrong or self._lost)

    def notice(
        self, name: str, table: Sequence[int], *, begin: int, end: int, known: int | None, said_tokens: int
    ) -> None:
        """A request computes tokens [begin, end) in this step. known: leading tokens that the engine or this connector
        had when it was admitted, or None if that was in an earlier step; what lies between was brought by another."""
        load = self._loads.get(name)
        if known is not None:
            self.forget(name, said_tokens=0)
            # A prefix in HBM may reach less than a block behind what match() was told of it.
            if begin >= known + self._block_tokens:
                self._begin(name, table, known=known, end=begin, said_tokens=said_tokens)
        elif load is not None and begin < load.end_tokens:
            self._failed(name, begin)
        elif load is not None:
            load.steps_left -= 1
            if not load.steps_left:
                del self._loads[name]
        if self._wrong and name not in self._lost and not self._is_behind_wrong(table, begin):
            for place, block in self._touched(table, begin, end):
                self._computed(block, until=end - place * self._block_tokens)

    def holds_back(self, name: str, table: Sequence[int], *, begin: int, end: int) -> bool:
        """Whether nothing may be stored of the request in this step."""
        held = name in self._loads
        if held:  # the engine has its blocks in its prefix cache as well, and may lose it before they are computed anew
            self._loads[name].behind.update(block for _, block in self._touched(table, begin, end))
        before = set(table[: -(-begin // self._block_tokens)])
        for owner, load in self._loads.items():
            if owner != name and not before.isdisjoint(load.blocks):
                held = True
                load.behind.update(block for _, block in self._touched(table, begin, end))
                load.followers.add(name)
        if name in self._lost or self._is_behind_wrong(table, begin):
            held = True
            self._wrong |= {block: 0 for _, block in self._touched(table, begin, end)}
        return held

    def brought(self, table: Sequence[int], *, begin: int, end: int) -> None:
        """Tokens [begin, end) come from elsewhere, and do not count before they are there. Whatever was in their blocks
        is gone."""
        if self._wrong:
            for block in table[begin // self._block_tokens : end // self._block_tokens]:
                self._wrong.pop(block, None)

    def forget(self, name: str, *, said_tokens: int) -> None:
        """The request has finished, or begins anew. A load of which nobody will hear any more counts as failed."""
        self._lost.discard(name)
        for other in self._loads.values():
            other.followers.discard(name)
        load = self._loads.get(name)
        # Of an asynchronous engine the first token may be the next step's.
        if load is not None and said_tokens > load.said_tokens + self._is_async:
            del self._loads[name]
        elif load is not None:
            self._failed(name, 0)
            self._lost.discard(name)

    # ---------------------------------------------------------------- helpers

    def _begin(self, name: str, table: Sequence[int], *, known: int, end: int, said_tokens: int) -> None:
        first = known // self._block_tokens
        blocks = table[first : -(-end // self._block_tokens)]
        for block in blocks:
            self._wrong.pop(block, None)  # it was given away, and holds something else now
        self._loads[name] = _Load(blocks, first_place=first, end_tokens=end, said_tokens=said_tokens)

    def _failed(self, name: str, begin: int) -> None:
        """What it brought is wrong from token `begin` on, where a block begins."""
        load = self._loads.pop(name)
        wrong = load.blocks[max(0, begin // self._block_tokens - load.first_place) :]
        self._wrong |= dict.fromkeys([*wrong, *load.behind], 0)
        if self._is_async:
            self._lost |= {name, *load.followers}

    def _touched(self, table: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Places and blocks of tokens [begin, end)."""
        first = begin // self._block_tokens
        return enumerate(table[first : -(-end // self._block_tokens)], first)

    def _is_behind_wrong(self, table: Sequence[int], begin: int) -> bool:
        return any(
            block in self._wrong and min(begin - place * self._block_tokens, self._block_tokens) > self._wrong[block]
            for place, block in self._touched(table, 0, begin)
        )

    def _computed(self, block: int, *, until: int) -> None:
        """Its tokens up to there are right."""
        if until >= self._block_tokens:
            self._wrong.pop(block, None)
        elif block in self._wrong:
            self._wrong[block] = until
