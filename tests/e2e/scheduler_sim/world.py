"""One seed: an engine, its users, a server, random events; and an end at which nothing may be left."""

from collections import Counter, deque
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import PauseState
from vllm.v1.request import Request, RequestStatus

from kvclient.keys import chunk_keys
from kvclient.vllm import release_differences
from kvclient.vllm.connector import KvServerConnector
from kvclient.vllm.stats import COUNTERS, Stats

from .content import BLOCK_TOKENS, VOCABULARY, Meanings, Slots, continued, cut, require
from .engine import Engine
from .jobs import Jobs
from .neighbour import Neighbour, Played
from .runner import Pipeline, Running
from .server import Clock, SchedulerClient, Server
from .shapes import Day, Options

PROMPT_MAX = 90
LIVE_MAX = 10
STEPS_TO_END_MAX = 6000
LEFT_FREE = 4
"""Blocks that prompts leave free, so that the longest request can finish alone."""

TO_COMPUTE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
TO_GO_ON: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]], "more": 7}
SAID = (
    TO_COMPUTE,
    TO_COMPUTE,
    TO_GO_ON,
    TO_GO_ON,
    None,
    {},
    {"do_remote_prefill": 1},
    TO_COMPUTE | TO_GO_ON | {"do_remote_decode": True},
)
"""Params that a proxy sends with requests. The last two are nonsense."""

MUST_BE_EMPTY = attrgetter(
    "_live",
    "_known_tokens",
    "_unnamed",
    "untold",
    "pins._held",
    "pins._kept",
    "_unchecked._loads",
    "_unchecked._lost",
    "_unchecked._least",
    "_offload._requests",
    "_offload._unasked",
    "_offload._ahead",
    "_offload._pledging._new",
    "_offload._pledging._over",
    "_offload._retrieves._jobs",
    "_offload._awaiting",
    "_offload._stores._jobs",
    "_offload._lookups._in_flight",
)
"""State of the scheduler's half that must be empty after the last request."""


class Outside(NamedTuple):
    """Everything outside the engine."""

    clock: Clock
    server: Server
    client: SchedulerClient
    jobs: Jobs
    slots: Slots
    meanings: Meanings


class Asked(NamedTuple):
    """A user's request."""

    request: Any
    whole: list[int]
    """The prompt and its whole future output."""


class World:
    def __init__(self, options: Options, day: Day, *, rng: Random, outside: Outside, engine: Engine) -> None:
        self.counts: Counter[str] = Counter()
        self._told = Stats()
        """What the connector has counted, as vLLM's scheduler passed it on with its outputs."""
        self._options, self._day, self._rng = options, day, rng
        self._outside, self._engine = outside, engine
        self._scheduler = engine.scheduler
        self._runner = Pipeline(
            options, engine, outside.slots, rng=rng, may_be_wrong=day.gift_fails > 0, meanwhile=self._meanwhile
        )
        self._says_what_it_likes = options.batches > 1 and day.gift_fails > 0
        """vLLM drops a token after another connector's load failed within a step.

        It learns of the failure after it scheduled the next step, and takes that step's token for the first. What it
        computes belongs to the tokens it has sampled, at positions that are off by one.
        """
        self._may_be_stuck = self._says_what_it_likes or not release_differences.reports_failed_requests(
            KVConnectorBase_V1
        )
        Neighbour.played = Played(rng, day, outside.slots, lambda: self._runner.weights, self.counts)
        self._live: dict[str, Asked] = {}
        self._in_flight: deque[tuple[Any, Running]] = deque()
        """Steps whose outputs the scheduler has not received; it is ahead with async scheduling and with stages."""
        self._prompts: list[list[int]] = []
        self._names: list[str] = []
        self._is_ending = False
        outside.jobs.pool = engine.pool

    def event(self) -> None:
        rng, day, server = self._rng, self._day, self._outside.server
        self._outside.clock.now_s += rng.random() * 0.003
        if rng.random() < 0.15 and len(self._live) < LIVE_MAX:
            self._arrive()
        self._meanwhile()
        if self._scheduler._pause_state != PauseState.UNPAUSED and rng.random() < 0.1:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)
        self._step()
        if rng.random() < day.abort:
            self._abort()
        if rng.random() < day.reset:
            self._reset()
        if rng.random() < day.evict:
            server.evict()
        if rng.random() < 0.3:
            server.others_go_on()
        if rng.random() < day.forget:
            self._scheduler.reset_prefix_cache()
        if rng.random() < day.restart:
            self._restart()
        if rng.random() < day.down:
            self._up_or_down()
        if rng.random() < day.pause:
            self._scheduler.set_pause_state(rng.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL)))
        if rng.random() < 0.01:
            self._outside.clock.now_s += rng.choice((0.03, 0.3, 2.5))

    def end(self) -> None:
        """The server recovers and users wait for their requests; then everything must have been returned."""
        self._outside.server.is_up, self._outside.jobs.is_faulty, self._is_ending = True, False, True
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        for steps in range(STEPS_TO_END_MAX):
            self._outside.clock.now_s += 0.003
            if self._may_be_stuck and steps == STEPS_TO_END_MAX // 2:
                self._give_up()
            for _ in range(3):
                self._progress()
            if not self._step() and not self._live:
                break
        else:
            require(False, f"not at an end: {[(name, asked.request.status) for name, asked in self._live.items()]}")
        self._require_nothing_left()
        self.counts["stores no more"] += self._engine.half._unchecked._is_over
        self.counts += self._outside.jobs.counts + self._outside.server.counts

    # ---------------------------------------------------------------- users

    def _arrive(self) -> None:
        rng = self._rng
        output = rng.randint(1, self._day.output_max)
        prompt = self._prompt(output)
        name = self._name()
        wants_all = rng.random() < self._day.unread
        sampling = SamplingParams(
            temperature=0,
            max_tokens=output,
            ignore_eos=True,
            prompt_logprobs=0 if wants_all else None,
            extra_args={"kv_transfer_params": rng.choice(SAID)} if self._options.has_proxy else None,
        )
        request = Request(
            name,
            prompt,
            sampling,
            None,
            block_hasher=self._engine.hasher,
            priority=rng.randrange(3) if self._options.has_priorities else 0,
            arrival_time=float(len(self._names)),
        )
        self._live[name] = asked = Asked(request, continued(prompt, output))
        self._scheduler.add_request(request)
        self._tell_meanings(*asked)

    def _prompt(self, output: int) -> list[int]:
        """A prompt that often shares a prefix with others, and fits into the pool."""
        rng, chunk = self._rng, self._options.chunk_tokens
        base: list[int] = []
        if self._prompts and rng.random() < 0.8:
            base = rng.choice(self._prompts[-8:])
            if rng.random() < 0.5:
                base = base[: rng.randint(1, len(base))]
        fresh = rng.choice((0, 0, rng.randint(1, 30)))
        prompt = (base + [rng.randrange(VOCABULARY) for _ in range(fresh)])[:PROMPT_MAX] or [1]
        if rng.random() < 0.3:
            prompt = prompt + [1] * (-len(prompt) % chunk)  # a prompt that ends with a chunk
        room = (self._options.blocks - LEFT_FREE) * BLOCK_TOKENS // len(self._options.groups) - 14
        prompt = prompt[: max(1, room - output)]
        self._prompts.append(prompt)
        return prompt

    def _name(self) -> str:
        """A new name, or one of a request that is gone, whose jobs may still run."""
        taken = {name for step, _ in self._in_flight for name in step.num_scheduled_tokens}
        free = [name for name in self._names if name not in self._scheduler.requests and name not in taken]
        name = self._rng.choice(free) if free and self._rng.random() < 0.3 else f"r{len(self._names)}"
        self._names.append(name)
        return name

    def _tell_meanings(self, request: Any, tokens: list[int]) -> None:
        """Records the meaning of a request's keys: the weights at its start, and the tokens it will have."""
        known = self._engine.half._live.get(request.request_id)
        if known is not None and known.extra is not None:
            chunk = self._options.chunk_tokens
            keys = cut(chunk_keys(tokens, chunk, extra=known.extra))
            self._outside.meanings.tell(keys, self._runner.weights, tokens, chunk)

    def _tell_what_is_said(self) -> None:
        if self._says_what_it_likes:
            for request, whole in self._live.values():
                tokens = list(request.all_token_ids)
                if tokens != whole[: len(tokens)]:
                    self._tell_meanings(request, tokens)

    def _abort(self) -> None:
        if self._live:
            name = self._rng.choice(list(self._live))
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self._live[name]
            self.counts["aborted"] += 1

    def _give_up(self) -> None:
        """Aborts requests that vLLM no longer schedules.

        It waits for the token it dropped. Or another connector's load has failed whole: 0.32 goes on reserving blocks
        for its request, and in a small pool these are the ones that the request's next load needs. Or a load has ended
        and keeps its blocks: before 0.30 the scheduler looks no further than the first request that does not fit."""
        reserved = getattr(self._scheduler, "_inflight_prefills", ())
        looks_no_further = not release_differences.reports_failed_requests(KVConnectorBase_V1)
        tables = self._scheduler.kv_cache_manager
        stuck = [
            name
            for name, (request, _) in self._live.items()
            if request.num_output_placeholders
            or (request.status == RequestStatus.WAITING and request in reserved)
            or (looks_no_further and request.status != RequestStatus.RUNNING and any(tables.get_block_ids(name)))
        ]
        require(bool(stuck) or not self._live, f"not at an end: {list(self._live)}")
        self.counts["stuck by vLLM itself"] += len(stuck)
        while self._live:
            self._abort()

    # ---------------------------------------------------------------- a step

    def _step(self) -> bool:
        """Runs one step. Returns False if there was nothing to do."""
        scheduler = self._scheduler
        if scheduler.has_requests():
            self._tell_what_is_said()
            step = scheduler.schedule()
            self.counts["preempted"] += len(step.preempted_req_ids or ())
            self._meanwhile()
            self._in_flight.append((step, self._runner.begin(step)))
            if len(self._in_flight) < self._options.batches:
                return True
        elif not self._in_flight:
            return False
        self._meanwhile()
        if not self._is_ending and self._rng.random() < self._day.abort:
            self._abort()
        step, running = self._in_flight.popleft()
        said = scheduler.update_from_output(step, self._runner.end(running))
        self._count(said)
        for output in (output for outputs in said.values() for output in outputs.outputs):
            if output.finish_reason is not None:
                self._require_answered(output)
                self._finish(output.request_id, str(output.finish_reason))
        require(not self._engine.has_given_up, "the connector has a bug, and has given up")
        return True

    def _require_answered(self, output: Any) -> None:
        """A proxy is told what to pass on of each request that was computed for another engine, and of no other."""
        sent, told = self._live[output.request_id].request.kv_transfer_params, output.kv_transfer_params
        is_ours = (
            not self._options.beside and self._options.role != "kv_consumer" and str(output.finish_reason) != "error"
        )
        if sent is not TO_COMPUTE or not is_ours:
            require(not told, f"{output.request_id} is answered with {told}")
            return
        require(told is not None, f"{output.request_id} is not answered")
        self.counts["passed on" if told["do_remote_prefill"] else "answered: not whole"] += 1

    def _count(self, said: Any) -> None:
        for outputs in said.values():
            if outputs.scheduler_stats is None or (self._options.drops_quiet_steps and not outputs.outputs):
                continue
            told = outputs.scheduler_stats.kv_connector_stats
            ours = told.get(KvServerConnector.__name__) if told and self._options.beside else told
            if ours:
                self._told.aggregate(Stats(data=getattr(ours, "data", ours)))

    def _finish(self, name: str, why: str) -> None:
        request, whole = self._live.pop(name)
        if why == "length":
            is_right = list(request.all_token_ids) == whole
            require(is_right or self._says_what_it_likes, f"{name} says something else")
            self.counts["wrong by vLLM itself"] += not is_right
            self._prompts.append(whole[:PROMPT_MAX])
        else:
            may_fail = self._options.on_failed_loads == "fail"
            require(may_fail and why == "error", f"{name} ends with {why}")
        self.counts[f"finished: {why}"] += 1

    def _meanwhile(self) -> None:
        """Advances work in flight, a little or a lot."""
        while self._rng.random() < self._day.pace:
            self._outside.clock.now_s += self._rng.random() * 0.002
            self._progress()

    def _progress(self) -> None:
        if self._rng.random() < 0.3:
            self._outside.client.progress()
        self._outside.jobs.progress()
        if self._rng.random() < 0.3:
            self._runner.progress()

    # ---------------------------------------------------------------- faults

    def _reset(self) -> None:
        """Switches to new weights, if vLLM says that its pool holds nothing of the old ones."""
        try:
            is_done = self._scheduler.reset_prefix_cache(
                reset_running_requests=self._rng.random() < 0.5, reset_connector=True
            )
        except RuntimeError:  # vLLM raises this where requests wait for loads
            is_done = False
        if is_done:
            self.counts["resets"] += 1
            self._runner.weights += 1
        if self._engine.half._keyer._life:
            # Running requests have other keys from now on.
            for asked in self._live.values():
                self._tell_meanings(*asked)

    def _restart(self) -> None:
        self._outside.server.restart()
        self._outside.client.lose_connection()
        self.counts["restarts"] += 1

    def _up_or_down(self) -> None:
        server = self._outside.server
        server.is_up = not server.is_up
        if not server.is_up:
            self._restart()

    # ---------------------------------------------------------------- checks at the end

    def _require_nothing_left(self) -> None:
        server, engine = self._outside.server, self._engine
        require(not self._outside.jobs.under_way, "jobs are left")
        require(not server.waiters, "loads wait that have ended")
        server.expire()
        # An unread answer may have brought a lease.
        require(not server.leases or len(self._outside.client) > 0, f"leases {list(server.leases)} are left")
        require(not server.pledged, f"pledges of {list(server.pledged)} are neither kept nor taken back")
        require(not any(MUST_BE_EMPTY(engine.half)), f"left: {MUST_BE_EMPTY(engine.half)}")
        require(not engine.guarded._promised, f"promises {engine.guarded._promised} are left")
        self._require_counts()
        held = [block.block_id for block in engine.pool.blocks if block.ref_cnt and not block.is_null]
        require(not held, f"blocks {held} belong to nobody")
        require(engine.pool.get_num_free_blocks() == self._options.blocks - 1, "blocks were lost")

    def _require_counts(self) -> None:
        """Requires that every count reached vLLM's metrics, but for those that no step has taken yet."""
        half = self._engine.half
        half._answers = None  # what no answer has taken along yet
        told = self._told.aggregate(Stats(data=half.take_counts())).data
        counted = half._offload.statistics
        for name, value in vars(counted).items():
            if name in COUNTERS:
                require(told.get(name, 0) == value, f"{name} is told as {told.get(name, 0)}; counted {value}")
        for name in ("retrieve", "store"):
            ended, begun = len(told.get(f"{name}_seconds", ())), vars(counted)[f"{name}s"] * self._options.ranks
            require(ended == begun, f"{ended} times of {name}s are told; {begun} were begun on all ranks")
