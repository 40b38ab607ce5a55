"""What another connector has brought within a step, until the engine has looked whether it did (MultiConnector).

vLLM puts such blocks into its prefix cache at once, so that the requests of this step and the next may go on behind
them, and hears of a failure when both have been scheduled. Then it computes them anew, in place and in as many steps as
that takes; what others have computed behind them meanwhile stays. So nothing is stored of a request while there is a
block in doubt before it; and when the load has failed, nothing of those that went on behind it, until they are admitted
anew, nor of who takes over what these have computed.

Blocks are those of the one group that the model has. With several, vLLM does not survive such a failure.
"""

from collections.abc import Sequence

DOUBTFUL_STEPS = 2
"""After so many more steps of a request vLLM has looked at what became of its load: the outcome of one step is read
after the next has been scheduled."""


class _Load:
    """In doubt."""

    def __init__(self, blocks: Sequence[int], *, first_block: int, end_tokens: int, said_tokens: int) -> None:
        self.blocks = blocks
        self.first_block = first_block
        """Its place in the request's table."""
        self.end_tokens = end_tokens
        self.said_tokens = said_tokens
        """Of the request when it was admitted. Once it has more, the step that loaded went well."""
        self.steps_left = DOUBTFUL_STEPS
        self.followers: set[str] = set()
        """Requests that have computed behind it since."""
        self.followers_blocks: set[int] = set()
        """What they computed."""


class Doubts:
    """Of one engine. In each step, notice() for all requests, and then holds_back() for each."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._loads: dict[str, _Load] = {}
        """By the request for which they were made."""
        self._wrong: set[int] = set()
        """Blocks that do not hold what the engine believes, until somebody computes them."""
        self._spoiled: set[str] = set()
        """Requests that have computed behind one of these."""

    def __bool__(self) -> bool:
        """Whether there is anything to look at but admissions."""
        return bool(self._loads or self._wrong or self._spoiled)

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
                first = known // self._block_tokens
                blocks = table[first : self._blocks_until(begin)]
                self._wrong.difference_update(blocks)
                self._loads[name] = _Load(blocks, first_block=first, end_tokens=begin, said_tokens=said_tokens)
        elif load is not None and begin < load.end_tokens:
            self._failed(name, begin)
        elif load is not None:
            load.steps_left -= 1
            if not load.steps_left:
                del self._loads[name]
        first = begin // self._block_tokens
        if self._wrong and self._wrong.isdisjoint(table[:first]):
            self._wrong.difference_update(table[first : end // self._block_tokens])

    def holds_back(self, name: str, table: Sequence[int], *, begin: int, end: int) -> bool:
        """Whether nothing may be stored of the request in this step."""
        before = table[: self._blocks_until(begin)]
        computed = table[begin // self._block_tokens : self._blocks_until(end)]
        held = name in self._loads
        for owner, load in self._loads.items():
            if owner != name and not set(load.blocks).isdisjoint(before):
                load.followers.add(name)
                load.followers_blocks.update(computed)
                held = True
        if name in self._spoiled or not self._wrong.isdisjoint(before):
            self._spoiled.add(name)
            self._wrong.update(computed)
            held = True
        return held

    def forget(self, name: str, *, said_tokens: int) -> None:
        """The request has finished, or begins anew. A load of which nobody will hear any more counts as failed."""
        load = self._loads.get(name)
        if load is not None and said_tokens > load.said_tokens:
            del self._loads[name]
        elif load is not None:
            self._failed(name, 0)
        self._spoiled.discard(name)
        for other in self._loads.values():
            other.followers.discard(name)

    def _failed(self, name: str, begin: int) -> None:
        """What it brought is wrong from token `begin` on."""
        load = self._loads.pop(name)
        self._wrong.update(load.blocks[max(0, begin // self._block_tokens - load.first_block) :])
        self._wrong |= load.followers_blocks
        self._spoiled |= load.followers

    def _blocks_until(self, token: int) -> int:
        return -(-token // self._block_tokens)
