"""The workload: every prompt with its time and worker, listed before anything runs.

Sessions are a closed loop of `users` conversations at any time. Each sends its next request after the recorded
service time and the (cut) recorded think time. When a conversation ends, the next one takes its place. Arrivals keep
the file's order. The clock is simulated, and the run's speed has no influence, so one seed is one workload.

Block ids are global and chained: two prompts share an id exactly if they share the whole prefix up to it.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvserver.errors import ConfigError
from kvserver.sizing.options import TrafficOptions
from kvserver.sizing.trace import (
    ARRIVAL_BLOCK_TOKENS,
    SESSION_BLOCK_TOKENS,
    Arrival,
    Session,
    Trace,
    Turn,
    arrival_prompts,
    session_prompts,
)

START_GAP_S = 2.0
"""Seconds between the first requests of the users."""
SERVICE_S_DEFAULT = 6.1
"""Service time where none was recorded: the median of the recorded ones."""
COMMON_BLOCKS = 1
"""Leading blocks that all conversations of an arrival trace share; sharing more makes it the same conversation."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. `blocks` are its full engine blocks; tokens beyond them are its own and never shared."""

    index: int
    at_s: float
    conversation: int
    worker: int
    tokens: int
    blocks: list[int]
    after: tuple[int, ...]
    """Requests that must end before this one is sent: its author was waiting for them."""


def make_workload(trace: Trace, options: TrafficOptions) -> list[Prompt]:
    if trace.sessions:
        prompts = list(_closed_loop(trace.sessions, options))
    else:
        prompts = list(_arrivals(trace.arrivals, options))
    if not prompts:
        raise ConfigError(
            "workload-empty", f"{trace.name} has no request within context_tokens_max={options.context_tokens_max}"
        )
    return prompts


# ---------------------------------------------------------------- sessions


@dataclass(eq=False)
class _Conversation:
    """A session played by a user, with global block ids."""

    number: int
    session: Session
    prompts: list[list[int]]


@dataclass(eq=False)
class _Line:
    """One sequence of requests in a conversation: the parent's or a sub-agent's. At most one is in flight."""

    conversation: _Conversation
    steps: list[int]
    worker: int
    parent: "_Line | None" = None
    position: int = 0
    children: int = 0
    after: list[int] = field(default_factory=list)

    def next_turn(self) -> Turn | None:
        """The next turn; None at the end and before a sub-agent starts."""
        if self.position >= len(self.steps) or self.steps[self.position] < 0:
            return None
        return self.conversation.session.turns[self.steps[self.position]]

    def ended(self, context_tokens_max: int) -> bool:
        turn = self.next_turn()
        if turn is None:
            return self.position >= len(self.steps)
        return turn.input_tokens > context_tokens_max


class _ClosedLoop:
    def __init__(self, sessions: list[Session], options: TrafficOptions) -> None:
        fitting = [s for s in sessions if s.turns[0].input_tokens <= options.context_tokens_max]
        self.options = options
        self.sessions = sorted(fitting, key=lambda session: session.id)
        self.order = list(range(len(self.sessions)))
        random.Random(options.seed).shuffle(self.order)
        self.placement = _Placement(options)
        self.warm_blocks = warm_prefix_blocks(self.sessions, options.warm_prefix_ratio)
        self.blocks_used = self.warm_blocks
        self.conversations = 0
        self.due: list[tuple[float, int, _Line]] = []
        self.pushes = 0

    def run(self) -> Iterator[Prompt]:
        if not self.sessions:
            return
        for user in range(self.options.users):
            self._start_session(START_GAP_S * user, after=[])
        index = 0
        while self.due:
            now_s, _, line = heapq.heappop(self.due)
            if line.ended(self.options.context_tokens_max):
                self._end_line(now_s, line)
            elif (turn := line.next_turn()) is None:
                self._start_agents(now_s, line)
            else:
                yield self._send(index, now_s, line, turn)
                index += 1

    def _start_session(self, now_s: float, after: list[int]) -> None:
        session = self.sessions[self.order[self.conversations % len(self.order)]]
        prompts, fresh = global_prompts(session, self.warm_blocks, self.blocks_used)
        self.blocks_used += fresh
        conversation = _Conversation(self.conversations, session, prompts)
        self.conversations += 1
        self._push(now_s, _Line(conversation, session.seq, self.placement.home(conversation.number), after=after))

    def _start_agents(self, now_s: float, line: _Line) -> None:
        while line.position < len(line.steps) and line.steps[line.position] < 0:
            agent = -line.steps[line.position]
            line.position += 1
            line.children += 1
            steps = [i for i, turn in enumerate(line.conversation.session.turns) if turn.agent == agent]
            self._push(now_s, _Line(line.conversation, steps, line.worker, parent=line, after=list(line.after)))
        line.after = []  # it goes on after the last requests of its sub-agents

    def _end_line(self, now_s: float, line: _Line) -> None:
        parent = line.parent
        if parent is None:
            self._start_session(now_s, after=line.after)
            return
        parent.children -= 1
        parent.after += line.after
        if parent.children == 0:
            self._push(now_s, parent)

    def _send(self, index: int, now_s: float, line: _Line, turn: Turn) -> Prompt:
        blocks = line.conversation.prompts[line.steps[line.position]]
        line.worker = self.placement.move(line.worker)
        prompt = Prompt(
            index=index,
            at_s=now_s,
            conversation=line.conversation.number,
            worker=line.worker,
            tokens=turn.input_tokens,
            blocks=_engine_blocks(blocks, turn.input_tokens, SESSION_BLOCK_TOKENS, self.options.block_tokens),
            after=tuple(sorted(set(line.after))),
        )
        line.after = [index]
        line.position += 1
        service_s = turn.service_s if turn.service_s >= 0 else SERVICE_S_DEFAULT
        following = line.next_turn()
        think_s = min(max(following.think_s, 0.0), self.options.think_s_max) if following else 0.0
        self._push(now_s + service_s + think_s, line)
        return prompt

    def _push(self, at_s: float, line: _Line) -> None:
        self.pushes += 1  # equal times keep their order, and lines are never compared
        heapq.heappush(self.due, (at_s, self.pushes, line))


def _closed_loop(sessions: list[Session], options: TrafficOptions) -> Iterator[Prompt]:
    requests = options.requests or requests_of_one_pass(sessions, options.context_tokens_max)
    return islice(_ClosedLoop(sessions, options).run(), requests)


def requests_of_one_pass(sessions: list[Session], context_tokens_max: int) -> int:
    """Requests of all fitting sessions, each up to where its parent outgrows the context."""
    requests = 0
    for session in sessions:
        if session.turns[0].input_tokens > context_tokens_max:
            continue
        for step in session.seq:
            if step < 0:
                requests += sum(turn.agent == -step for turn in session.turns)
            elif session.turns[step].input_tokens > context_tokens_max:
                break
            else:
                requests += 1
    return requests


def warm_prefix_blocks(sessions: list[Session], warm_prefix_ratio: float) -> int:
    """Trace blocks that every session's prompts start with."""
    longest = max((s.tool_tokens + s.system_tokens for s in sessions), default=0)
    return int(warm_prefix_ratio * longest) // SESSION_BLOCK_TOKENS


def global_prompts(session: Session, warm_blocks: int, first_id: int) -> tuple[list[list[int]], int]:
    """A session's prompts in ids that no other session uses, and the number of ids used.

    Ids below `warm_blocks` are the warm prefix. The first prompt of the parent and of each sub-agent starts with it,
    and so do the prompts that share blocks with those.
    """
    local = session_prompts(session)
    ids = 1 + max(map(max, filter(None, local)), default=0)
    names = list(range(first_id, first_id + ids))
    agents: set[int] = set()
    for turn, prompt in zip(session.turns, local, strict=True):
        if turn.agent not in agents:
            agents.add(turn.agent)
            for depth, block in enumerate(prompt[:warm_blocks]):
                names[block] = depth
    return [list(map(names.__getitem__, prompt)) for prompt in local], ids


# ---------------------------------------------------------------- arrivals


def _arrivals(arrivals: list[Arrival], options: TrafficOptions) -> Iterator[Prompt]:
    """Prompts in file order. Requests that exceed the context are left out."""
    placement = _Placement(options)
    workers: list[int] = []
    conversations: list[int] = []
    sent_as: list[int | None] = []
    at_s, sent = 0.0, 0
    for arrival, blocks in zip(arrivals, arrival_prompts(arrivals), strict=True):
        if options.requests and sent == options.requests:
            return
        at_s += arrival.gap_ms / 1000
        before = len(workers) - arrival.back if arrival.shared_blocks > COMMON_BLOCKS else None
        conversation = conversations[before] if before is not None else len(conversations)
        worker = placement.move(workers[before]) if before is not None else placement.home(conversation)
        conversations.append(conversation)
        workers.append(worker)
        fits = arrival.input_tokens <= options.context_tokens_max
        sent_as.append(sent if fits else None)
        if not fits:
            continue
        awaited = sent_as[before] if before is not None else None
        yield Prompt(
            index=sent,
            at_s=at_s,
            conversation=conversation,
            worker=worker,
            tokens=arrival.input_tokens,
            blocks=_engine_blocks(blocks, arrival.input_tokens, ARRIVAL_BLOCK_TOKENS, options.block_tokens),
            after=() if awaited is None else (awaited,),
        )
        sent += 1


# ---------------------------------------------------------------- both


class _Placement:
    """Chooses the worker of a conversation: its home, until it moves."""

    def __init__(self, options: TrafficOptions) -> None:
        self.options = options
        self.random = random.Random(f"placement {options.seed}")

    def home(self, conversation: int) -> int:
        return conversation % self.options.workers

    def move(self, worker: int) -> int:
        if self.options.workers == 1 or self.random.random() >= self.options.migrate_ratio:
            return worker
        return (worker + self.random.randrange(1, self.options.workers)) % self.options.workers


def _engine_blocks(trace_blocks: list[int], tokens: int, trace_block_tokens: int, block_tokens: int) -> list[int]:
    """Engine block ids of a prompt, full blocks only. A trace block is a whole number of engine blocks."""
    parts = trace_block_tokens // block_tokens
    full = min(tokens // block_tokens, len(trace_blocks) * parts)
    if parts == 1:
        return trace_blocks[:full]
    return [block * parts + part for block in trace_blocks for part in range(parts)][:full]
