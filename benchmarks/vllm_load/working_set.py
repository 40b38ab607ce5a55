"""The tokens in recent use, each piece counted once."""

from benchmarks.vllm_load.asks import Prompt


class WorkingSet:
    """Forgets pieces that were not used for age_s."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._spans: dict[str, tuple[float, int]] = {}
        """Name -> (time of last use, tokens of its longest piece)."""

    def asked(self, prompt: Prompt, now_s: float) -> None:
        for name, tokens in prompt:
            _, before = self._spans.get(name, (0.0, 0))
            self._spans[name] = (now_s, max(before, tokens))

    def tokens(self, now_s: float) -> int:
        self._spans = {name: seen for name, seen in self._spans.items() if seen[0] >= now_s - self._age_s}
        return sum(tokens for _, tokens in self._spans.values())
