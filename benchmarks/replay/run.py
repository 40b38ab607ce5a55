"""Runs a replay: one server, some engine workers, all prompts in order, and the result.

No run can hang: a worker that dies closes its pipe, a dead server turns into misses at the client's deadlines, and a
run in which nothing ends for stall_s_max is given up. All started processes are stopped.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from time import monotonic, sleep

from benchmarks.replay import pipe
from benchmarks.replay.crew import Crew
from benchmarks.replay.link import Control
from benchmarks.replay.options import Arm, ReplayOptions
from benchmarks.replay.progress import Progress
from benchmarks.replay.result import ArmResult, ReplayResult, Restart, byte_problems
from benchmarks.replay.seen import Seen, joined, seen_in
from benchmarks.replay.served import Served
from benchmarks.replay.summing import cost_model, sources_of, sum_up
from kvserver.errors import ResourceError
from kvserver.sizing.outcome import Outcome
from kvserver.sizing.schedule import Schedule
from kvserver.sizing.trace import load
from kvserver.sizing.workload import Prompt, make_workload
from kvserver.wire.status import Status

TURN_S = 0.5
"""Longest wait until server, stall clock and progress are checked again."""

POLL_S = 0.05
RESTART_WINDOW = 100
"""Number of requests before and after a restart that are compared."""


def run(options: ReplayOptions, progress: Callable[[Progress], None]) -> ReplayResult:
    """Replays the trace against every arm.

    Raises KvError if it cannot start; later problems are in ReplayResult.problems.
    """
    workload = make_workload(load(options.trace), options)
    arms: list[ArmResult] = []
    problems: list[str] = []
    for arm in options.arms:
        arm_run = _ArmRun(arm, options, workload, progress)
        arms.append(arm_run.run())
        problems += arm_run.problems + byte_problems(arms[-1])
    return ReplayResult(
        name=options.name,
        trace=options.trace,
        seed=options.seed,
        workers=options.workers,
        users=options.users,
        token_bytes=options.block_bytes // options.block_tokens,
        cost_model=cost_model(options).formula(),
        arms=arms,
        problems=problems,
    )


class _ArmRun:
    """One pass of the workload against one server."""

    def __init__(
        self, arm: Arm, options: ReplayOptions, workload: list[Prompt], progress: Callable[[Progress], None]
    ) -> None:
        self.problems: list[str] = []
        self._arm = arm
        self._options = options
        self._workload = workload
        self._progress = progress
        self._schedule = Schedule(workload, workers=options.workers, in_flight=options.in_flight)
        self._outcomes: list[Outcome] = []
        self._here = 0
        self._left = 0
        self._hbm_evictions = 0
        self._server: Served | None = None
        self._server_ended = False
        self._seen = Seen()
        """Counters of the killed server; later those of the whole run."""
        self._sent, self._may_send = 0, len(workload)
        self._so_far = Progress(arm.name, len(workload))
        self._started_s = monotonic()

    def run(self) -> ArmResult:
        with ExitStack() as stack:
            self._show()
            socket = self._options.socket
            if socket is None:
                served = Served(self._arm.serve_flags, self._options.arena_bytes, self._options.disk_dir)
                self._server = stack.enter_context(closing(served))
                socket = self._server.socket
            control = stack.enter_context(closing(Control(socket)))
            self._await_server(control)
            crew = stack.enter_context(closing(Crew(self._options, socket)))
            self._until(crew, lambda: self._here == self._options.workers, self._options.start_s_max)
            wall_s, restarted_s = self._play(crew, control)
        return sum_up(
            self._arm.name,
            self._workload,
            self._outcomes,
            self._options,
            hbm_evictions=self._hbm_evictions,
            seen=self._seen,
            restart=self._restart_seen(restarted_s),
            wall_s=wall_s,
        )

    def _await_server(self, control: Control, killed: int = 0, caches: int = 0) -> None:
        """Waits until the server serves; after a restart also until `caches` caches are registered again.

        killed: incarnation of the server that was killed.
        """
        give_up_s = monotonic() + self._options.start_s_max
        while not control.connected(TURN_S):
            self._show()
            ended = self._server.problem() if self._server else ""
            if ended or monotonic() > give_up_s:
                words = self._server.last_words() if self._server else f"{self._options.socket} does not answer"
                raise ResourceError(
                    "server-start", ended or f"not ready after {self._options.start_s_max:g} s: {words}"
                )
        # Wait until our own server has its whole arena and its disks: results should not depend on page fault speed.
        while self._server and monotonic() < give_up_s:
            status = control.status()
            if status is not None and status.incarnation != killed and _serves(status) and status.caches >= caches:
                return
            self._show()
            sleep(POLL_S)

    def _play(self, crew: Crew, control: Control) -> tuple[float, float]:
        """Sends all prompts and ends the workers in good order, which checks their pools.

        A dead worker or a stall ends the run early. Returns the seconds of the run, and those of a restart.
        """
        self._so_far.phase, self._started_s = "running", monotonic()
        wall_s = restarted_s = 0.0
        try:
            if self._options.restart_after:
                self._may_send = self._options.restart_after
                self._until(crew, self._all_sent_have_ended, self._options.stall_s_max)
                restarted_s = self._restart(control)
                self._may_send = len(self._workload)
            self._until(crew, lambda: self._schedule.finished, self._options.stall_s_max)
            wall_s = monotonic() - self._started_s
            self._so_far.phase = "stopping"
            self._look_at(control)
            for worker in range(self._options.workers):
                crew.send(worker, pipe.Stop())
            self._until(crew, lambda: self._left == self._options.workers, self._options.stall_s_max)
        except ResourceError as error:
            self.problems.append(f"{self._arm.name}: {error}")
        return wall_s or monotonic() - self._started_s, restarted_s

    def _all_sent_have_ended(self) -> bool:
        return self._schedule.running == 0 and len(self._outcomes) >= min(self._may_send, len(self._workload))

    def _restart(self, control: Control) -> float:
        """Restarts the server. No request is in flight, so only kept chunks link the two halves of the run."""
        assert self._server is not None
        status = control.status()
        self._look_at(control)
        self._server.restart()
        began_s = monotonic()
        if status is not None:
            self._await_server(control, killed=status.incarnation, caches=self._options.workers)
        return monotonic() - began_s

    def _look_at(self, control: Control) -> None:
        status = control.status()
        if status is not None:
            self._seen = joined(self._seen, seen_in(status))

    def _restart_seen(self, ready_s: float) -> Restart | None:
        after = self._options.restart_after
        if not after or len(self._outcomes) < after:
            return None
        window = min(RESTART_WINDOW, after)
        return Restart(
            requests=after,
            ready_s=ready_s,
            window=window,
            before=sources_of(self._outcomes[after - window : after]),
            after=sources_of(self._outcomes[after : after + window]),
        )

    def _until(self, crew: Crew, reached: Callable[[], bool], silence_s_max: float) -> None:
        """Sends and receives until `reached`. Raises ResourceError if all workers are silent for `silence_s_max`."""
        heard_s = monotonic()
        while not reached():
            self._send_what_may_go(crew)
            for message in crew.receive(TURN_S):
                heard_s = monotonic()
                self._hear(message)
            self._show()
            self._look_after_server()
            if monotonic() - heard_s > silence_s_max:
                raise ResourceError(
                    "stalled", f"no worker said anything for {silence_s_max:g} s while {self._so_far.phase}"
                )

    def _send_what_may_go(self, crew: Crew) -> None:
        if self._so_far.phase != "running":
            return
        for worker in range(self._options.workers):
            while self._sent < self._may_send and (prompt := self._schedule.take(worker)) is not None:
                self._sent += 1
                crew.send(worker, pipe.Begin(prompt.index, prompt.tokens, prompt.blocks))

    def _hear(self, message: pipe.FromWorker) -> None:
        match message:
            case pipe.Here():
                self._here += 1
            case pipe.Over(outcome=outcome):
                self._schedule.ended(outcome.worker, outcome.index)
                self._outcomes.append(outcome)
                self._so_far.count(outcome)
            case pipe.Left():
                self._left += 1
                self._hbm_evictions += message.hbm_evictions
            case pipe.Broken():
                raise AssertionError("the crew turns it into an error")

    def _look_after_server(self) -> None:
        """Records a server that ended as a problem, but goes on: the rest shows that engines work without it."""
        ended = self._server.problem() if self._server and not self._server_ended else ""
        if ended:
            self._server_ended = True
            self.problems.append(f"{self._arm.name}: after {len(self._outcomes)} requests {ended}")

    def _show(self) -> None:
        self._so_far.elapsed_s = monotonic() - self._started_s
        self._progress(self._so_far)


def _serves(status: Status) -> bool:
    arena = status.arena
    return (arena.slabs_ready == arena.slabs_total or arena.problem != "") and status.disk_state in ("", "ready")
