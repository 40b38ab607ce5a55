"""The job state words of one session, as kvserver._native.Board and the movers treat them."""

FREE, LIVE, SUBMITTED, DONE, ABANDONED, FAILED = range(6)


class Board:
    """One session's board, shared by a client and the movers; it survives either of them."""

    def __init__(self, words: int) -> None:
        self._words = [(0, FREE)] * words

    # ---------------------------------------------------------------- the client's side

    def free_words(self) -> list[int]:
        return [word for word, (_, state) in enumerate(self._words) if state not in (LIVE, SUBMITTED)]

    def begin(self, word: int) -> int:
        generation, state = self._words[word]
        assert state not in (LIVE, SUBMITTED)
        self._words[word] = (generation + 1, LIVE)
        return generation + 1

    def state(self, word: int, generation: int) -> int:
        """The state of the word if it still has this generation, else FAILED: this generation has ended."""
        now, state = self._words[word]
        return state if now == generation else FAILED

    def abandon_store(self, word: int, generation: int) -> int:
        self._move(word, generation, (LIVE, SUBMITTED), ABANDONED)
        return self.state(word, generation)

    def abandon_retrieve(self, word: int, generation: int) -> int:
        self._move(word, generation, (LIVE,), ABANDONED)
        return self.state(word, generation)

    # ---------------------------------------------------------------- the mover's side

    def submit(self, word: int, generation: int) -> bool:
        return self._move(word, generation, (LIVE,), SUBMITTED)

    def finish(self, word: int, generation: int, state: int) -> bool:
        """submitted → done or failed; False when the client has abandoned it."""
        return self._move(word, generation, (SUBMITTED,), state)

    def cancel(self, word: int, generation: int) -> None:
        self._move(word, generation, (LIVE,), FAILED)

    def _move(self, word: int, generation: int, sources: tuple[int, ...], target: int) -> bool:
        if self._words[word][0] == generation and self._words[word][1] in sources:
            self._words[word] = (generation, target)
            return True
        return False
