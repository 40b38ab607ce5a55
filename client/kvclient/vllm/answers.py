"""Steps in which a request gets a token: only those bring statistics to everybody.

Up to 0.27, vLLM's class LLM drops the statistics of a step in which no request says anything: a load that ends, a
prompt that is computed in parts. So what was counted in such a step is told with the next one that says something.
"""

from collections.abc import Iterable

from kvclient.vllm.keys import Request


class Answers:
    """Whether a request has got a token since this was last asked. Never True without one."""

    def __init__(self) -> None:
        self._computing: dict[str, tuple[Request, int]] = {}
        """Requests of the last step that was scheduled, and their tokens when this was last asked."""
        self._has_grown = False

    def scheduled(self, requests: Iterable[Request]) -> None:
        """A step is scheduled. The one before it may not be over yet."""
        known = self._computing
        self._computing = {
            request.request_id: known.get(request.request_id) or (request, request.num_tokens) for request in requests
        }

    def finished(self, name: str) -> None:
        """The request is gone. Its last token came with the step that is just over, or it was aborted."""
        request, tokens = self._computing.pop(name, (None, 0))
        self._has_grown |= request is not None and request.num_tokens > tokens

    def take(self) -> bool:
        has_grown, self._has_grown = self._has_grown, False
        for name, (request, tokens) in self._computing.items():
            if request.num_tokens != tokens:
                has_grown |= request.num_tokens > tokens
                self._computing[name] = request, request.num_tokens
        return has_grown
