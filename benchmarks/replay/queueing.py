"""Waiting time in the estimated time to first token: a run's requests, sent again on a simulated clock.

Each worker prefills one request after another, in the order in which they became ready. A request that needs the
disk first waits its turn there; all workers share the disk. A conversation is a closed loop: the time that a request
takes delays all later requests of its author. So an engine that cannot keep up does not diverge: its users slow
down, and fewer requests an hour are answered.

The recorded times already contain the recorded server's time, and ours is added: all rates are a little low.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvserver.sizing.workload import Prompt


class Work(NamedTuple):
    """The service times of one request."""

    disk_s: float
    engine_s: float


class Answered(NamedTuple):
    sent_s: float
    first_token_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s


def answer_all(prompts: Sequence[Prompt], work: Mapping[int, Work]) -> dict[int, Answered]:
    """Send and first-token time of each request. Prompts without work count as never sent."""
    line = _Line(prompts, work)
    while line.due:
        line.next()
    return line.answered


class _Line:
    def __init__(self, prompts: Sequence[Prompt], work: Mapping[int, Work]) -> None:
        self.answered: dict[int, Answered] = {}
        self.due: list[tuple[float, int, bool]] = []
        """(time, request index, disk read done) of each request's next event, as a heap."""
        self._prompts = {prompt.index: prompt for prompt in prompts if prompt.index in work}
        self._work = work
        self._sent_s: dict[int, float] = {}
        self._disk_free_s = 0.0
        self._worker_free_s: dict[int, float] = {}
        self._followers: dict[int, list[Prompt]] = {}
        self._awaits: dict[int, int] = {}
        for prompt in self._prompts.values():
            before = [index for index in prompt.after if index in self._prompts]
            self._awaits[prompt.index] = len(before)
            for index in before:
                self._followers.setdefault(index, []).append(prompt)
            if not before:
                self._send(prompt.index, prompt.at_s)

    def next(self) -> None:
        now_s, index, ready = heapq.heappop(self.due)
        work, worker = self._work[index], self._prompts[index].worker
        if not ready:
            if work.disk_s:
                self._disk_free_s = max(now_s, self._disk_free_s) + work.disk_s
            heapq.heappush(self.due, (self._disk_free_s if work.disk_s else now_s, index, True))
            return
        first_token_s = max(now_s, self._worker_free_s.get(worker, 0.0)) + work.engine_s
        self._worker_free_s[worker] = first_token_s
        self.answered[index] = Answered(self._sent_s[index], first_token_s)
        for follower in self._followers.get(index, ()):
            self._awaits[follower.index] -= 1
            if not self._awaits[follower.index]:
                late_s = max(self._late_s(before) for before in follower.after if before in self.answered)
                self._send(follower.index, follower.at_s + late_s)

    def _late_s(self, index: int) -> float:
        """How much later than its recorded time a request has its first token."""
        return self.answered[index].first_token_s - self._prompts[index].at_s

    def _send(self, index: int, at_s: float) -> None:
        self._sent_s[index] = at_s
        heapq.heappush(self.due, (at_s, index, False))
