"""Which prompt may be sent now: in simulated-time order within a worker, and only after the requests it waits for.

Workers run in parallel, so without the second rule a conversation that moved could be a turn ahead of itself. There
is always something to send or something running: the earliest prompt that has not ended waits for none.
"""

from collections import deque
from collections.abc import Sequence

from kvserver.sizing.workload import Prompt


class Schedule:
    def __init__(self, prompts: Sequence[Prompt], *, workers: int, in_flight: int) -> None:
        self.running = 0
        self._in_flight_max = in_flight
        self._in_flight = [0] * workers
        self._queues: list[deque[Prompt]] = [deque() for _ in range(workers)]
        self._not_ended = {prompt.index for prompt in prompts}
        for prompt in prompts:
            self._queues[prompt.worker].append(prompt)

    @property
    def finished(self) -> bool:
        return not self._not_ended

    def take(self, worker: int) -> Prompt | None:
        """The worker's next prompt, now running; None if it has to wait or has no more."""
        queue = self._queues[worker]
        if not queue or self._in_flight[worker] >= self._in_flight_max:
            return None
        if any(index in self._not_ended for index in queue[0].after):
            return None
        self._in_flight[worker] += 1
        self.running += 1
        return queue.popleft()

    def ended(self, worker: int, index: int) -> None:
        self._not_ended.remove(index)
        self._in_flight[worker] -= 1
        self.running -= 1
