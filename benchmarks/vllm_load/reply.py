"""Content and token times of a streamed answer, read from the lines of an event stream and their arrival times."""

import json
from dataclasses import dataclass, field
from typing import Any

DATA = "data:"
END = "[DONE]"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Times are seconds since the request was sent."""

    ttft_s: float | None = None
    """Time to the first token; None if none came."""
    gaps_s: tuple[float, ...] = ()
    """Gaps between consecutive tokens; tokens of one message share its gap evenly."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    """As counted by the endpoint."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Cached tokens of the prompt, if the endpoint tells (vLLM: --enable-prompt-tokens-details)."""
    said: tuple[int, ...] | str = ""
    """Token ids if the endpoint sends them, else text."""
    problem: str = ""


@dataclass
class Reading:
    """A reply while it arrives."""

    _times_s: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    _ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _usage: dict[str, Any] = field(default_factory=dict)
    _problem: str = ""
    ended: bool = False

    def line(self, text: str, at_s: float) -> None:
        """Takes a line of the stream; lines without data (comments, empty ones) are ignored."""
        if not text.startswith(DATA):
            return
        data = text[len(DATA) :].strip()
        if data == END:
            self.ended = True
            return
        message = json.loads(data)
        if "error" in message:
            self._problem = str(message["error"])[:500]
            return
        self._usage = message.get("usage") or self._usage
        for choice in message.get("choices") or []:
            self._choice(choice, at_s)

    def reply(self, total_s: float) -> Reply:
        problem = self._problem or ("" if self.ended else "the stream ended before its end was said")
        counted = self._usage.get("completion_tokens")
        details = self._usage.get("prompt_tokens_details") or {}
        times = self._times_s
        return Reply(
            ttft_s=times[0] if times else None,
            gaps_s=self._gaps_s(counted or len(times)),
            total_s=total_s,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            output_tokens=len(times) if counted is None else counted,
            cached_tokens=details.get("cached_tokens"),
            said=tuple(self._ids) if self._ids else "".join(self._text),
            problem=problem or ("" if times else "no token came"),
        )

    def _choice(self, choice: dict[str, Any], at_s: float) -> None:
        """A message with token ids counts as that many tokens; one with text only counts as one."""
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        ids = choice.get("token_ids") or []
        self._times_s.extend([at_s] * (len(ids) if ids else int(bool(text))))
        self._ids.extend(ids)
        self._text.append(text or "")

    def _gaps_s(self, tokens: int) -> tuple[float, ...]:
        times = self._times_s
        if len(times) < 2:
            return ()
        gaps = _shared_evenly(times)
        if tokens <= len(times):
            return tuple(gaps)
        # text came in pieces of several tokens: only the mean gap is known
        return ((times[-1] - times[0]) / (tokens - 1),) * (tokens - 1)


def _shared_evenly(times_s: list[float]) -> list[float]:
    """Gaps after the first token. Tokens that came together share the time since the previous one evenly."""
    gaps: list[float] = []
    first = 0
    for index in range(1, len(times_s) + 1):
        if index < len(times_s) and times_s[index] == times_s[first]:
            continue
        if first:
            came = index - first
            gaps.extend([(times_s[first] - times_s[first - 1]) / came] * came)
        else:
            gaps.extend([0.0] * (index - 1))
        first = index
    return gaps
