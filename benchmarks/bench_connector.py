"""How much do vLLM's calls of our scheduler half cost? `python -m benchmarks.bench_connector [--json] [--smoke]`

Needs vLLM (any build; no engine and no model is started). Requests, block hashes, vLLM's block pool and the server
are real; only the scheduler is simulated. Each prompt is new, is matched, gets its blocks, is computed in steps of
2048 tokens, decodes beside 31 others, and finishes. The server holds nothing of these prompts.

Values are microseconds of each call on the scheduler's thread: median over the requests of a round, then over the
rounds, of which the first is not counted. After the slash: the length of the prompt.

Rows "hit": prompts that the server holds, stored before by the connector's own orders, followed by a question of 100
tokens. All whole chunks must match. Between the calls the connector's own worker loads them. No lease may be left.

new: on_new_request. For a short prompt it computes the keys and asks the server. For a long one it starts computing
keys, or takes its block hashes.
match: get_num_new_matched_tokens in a step with other work: right after on_new_request, then in each following step,
a millisecond apart, until it decides.
match that asks: the match that finds a long prompt's keys ready, and asks; with block hashes it is the first one.
step: build_connector_meta between two matches, with another request that decodes.
step that sends: the step that sends a long prompt's question.
events: take_events after a step's forward; events answered: the one that takes the answer.
prefill: build_connector_meta of a step that completes eight chunks, which are stored.
decode: build_connector_meta of a step of 32 decoding requests, per request.
all of match, all of step: all rows of one method together (except decode).
alone: match in an engine without other work, which waits for the answer.
allocated: update_state_after_alloc. reported: update_connector_output with a finished job. finished:
request_finished.
bare send: in the place of new, one system call that wakes a sleeping process, as the question must; bare receive: in
the place of match, one that takes an answer. Both run with equally cold caches; what a call costs above them is our
own.

Only for hits: allocated covers the blocks to be loaded, whose ids the connector asks vLLM for.
step that loads: build_connector_meta of the same step, which carries the order.
allocated again: vLLM continues the request and loads nothing.
step behind the load: the step that computes the question; it is shorter than a chunk, so nothing is stored.

"tokens": keys from token ids; "hashes": from the engine's block hashes (--prefix-caching-hash-algo sha256_cbor).
"""

import contextlib
import itertools
import logging
import random
import socket
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.connector_worker import PlayedWorker
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import PATIENT, serving
from kvclient.client import Client
from kvclient.offload.job_ends import Report
from kvclient.offload.values import Group, Options, StoreOrder
from kvclient.values import StoreResult
from kvclient.vllm.guard import GuardedScheduler
from kvclient.vllm.keys import Keyer
from kvclient.vllm.release_differences import BlockTables, scheduled
from kvclient.vllm.scheduler import Scheduler
from kvserver.wire.messages import FRAME_BYTES_MAX, KEY_BYTES, NAMESPACE_BYTES

BLOCK, CHUNK, STEP = 16, 256, 2048
LENGTHS = (1024, 8192, 32768)
QUESTION = 100
"""Tokens after the loaded prefix: less than a chunk."""
STEP_S = 0.001
DECODING = 32
"""Requests in a step."""
BLOCKS = 40_000
VOCABULARY = 128_000
ARENA_BYTES = 64 << 20
NAMESPACE = b"bench-connector".ljust(32, b".")
CLEAN_S = 10.0
METHODS = {
    "match": ("match at once", "match", "match that asks", "match that decides"),
    "step": ("step", "step that sends", "step that loads", "step behind the load", "prefill"),
}
"""Rows of the calls of one method, in an engine with other work."""
ANSWER = b"an answer"
ANSWERS = f"""
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while peer.recv({FRAME_BYTES_MAX}):
    peer.send({ANSWER})
"""


class Bare:
    """A process that sleeps until it receives a message, and answers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", ANSWERS, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._buffer = bytearray(FRAME_BYTES_MAX)
        self._socket.send(b"started?")
        self._socket.recv(len(ANSWER))

    def send(self, frame: bytes) -> None:
        self._socket.send(frame, int(socket.MSG_DONTWAIT))

    def receive(self) -> None:
        self._socket.recv_into(self._buffer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


class Running(NamedTuple):
    """A request whose prompt is computed."""

    request: Request
    ids: list[int]
    """Ids of its blocks."""


class Bench:
    """Calls with one kind of keys. The server holds only what keep() stored."""

    def __init__(
        self, client: Client, worker: PlayedWorker, *, by_hashes: bool, step_wait_s: float, drawn_by: int
    ) -> None:
        """drawn_by: seed of the prompts. vLLM's init_none_hash() must have been called."""
        self._worker = worker
        self._hasher = get_request_block_hasher(BLOCK, algorithm(by_hashes=by_hashes))
        options = Options(
            chunk_tokens=CHUNK,
            groups=(Group(BLOCK),),
            engine_steps_back=True,
            null_block=0,
            lookup_deadline_s=PATIENT.lookup_s,
        )
        keyer = Keyer(chunk_tokens=CHUNK, hash_block_tokens=BLOCK if by_hashes else 0)
        half = Scheduler(client, options, keyer, store_output=True, step_wait_s=step_wait_s)
        self.half = GuardedScheduler(half, options.groups)
        self._pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.half.use_pool(self._pool)
        self.half.use_namespace({NAMESPACE})
        self._tables = BlockTables({})
        self._names = itertools.count()
        self._random = random.Random(drawn_by)
        self._beside = False
        self.took_us: dict[str, list[float]] = defaultdict(list)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(tokens)]

    def request(self, prompt: list[int]) -> Request:
        sampling = SamplingParams(max_tokens=16)
        return Request(f"r{next(self._names)}", prompt, sampling, None, block_hasher=self._hasher)

    def keep(self, tokens: int) -> "array[int]":
        """Stores a prompt in the server with the connector's own orders, and returns it."""
        prompt = self.prompt(tokens)
        request = self.request(prompt)
        ids = self.admit(request)
        self.prefill(request, ids, self._worker.carry_out)
        self.finish(Running(request, ids))
        return array("i", prompt)

    def miss(self, tokens: int) -> Running:
        request = self.request(self.prompt(tokens))
        ids = self.admit(request)
        self.prefill(request, ids, pretended)
        return Running(request, ids)

    def hit(self, held: "array[int]") -> Running:
        """held: a prompt of keep(). It copies the tokens, because a new request's tokens lie together in memory."""
        request = self.request(held.tolist() + self.prompt(QUESTION))
        ids = self.admit(request, held_tokens=len(held))
        self.load(request, ids, held_tokens=len(held))
        return Running(request, ids)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = call()
        self.took_us[name].append((time.perf_counter() - began) * 1e6)
        return value

    def admit(self, request: Request, *, held_tokens: int = 0) -> list[int]:
        """Runs a request until it has its blocks; in turns with other requests and alone. held_tokens: length of the
        hit.
        """
        self._beside = not self._beside
        other = self._others()
        self._step(step_of(other, other, [], is_new=False))
        self.timed("new", lambda: self.half.new(request))
        matched = self.timed("match at once" if other else "match alone", lambda: self.half.match(request, 0))
        is_later = False
        while matched[0] is None:
            output = step_of(other, other, [], is_new=False)
            had_asked = self.half.busy()
            self.timed("step", lambda output=output: self._step(output))
            if self.half.busy() and not had_asked:
                self._call("step that sends", "step")
                if is_later:
                    self._call("match that asks", "match")
            compute(STEP_S)
            asked = self.half.busy()
            self.timed("events", self.half.collect)
            if asked and not self.half.busy():
                self._call("events answered", "events")
            is_later = True
            matched = self.timed("match", lambda: self.half.match(request, 0))
            if matched[0] is not None:
                self._call("match that decides", "match")
        assert matched == (held_tokens, held_tokens > 0), matched
        blocks = self._pool.get_new_blocks(-(-(request.num_tokens + 16) // BLOCK))
        ids = [block.block_id for block in blocks]
        # as the connector's update_state_after_alloc() does
        tables = KVCacheBlocks((blocks,)).get_block_ids if held_tokens else tuple
        self.timed("allocated", lambda: self.half.allocated(request, tables(), held_tokens))
        return ids

    def load(self, request: Request, ids: list[int], *, held_tokens: int) -> None:
        """Runs the steps from the one that allocated the blocks to the one that computes the rest."""
        other = self._others()
        output = step_of(other, other, [], is_new=False)
        retrieves, _ = self.timed("step that loads", lambda: self._step(output))
        (order,) = retrieves
        assert (order.hbm_tokens, order.end_tokens) == (0, held_tokens), order
        (report,) = self._worker.carry_out([order])
        compute(STEP_S)
        self._report([report])
        self.half.collect()
        self.timed("allocated again", lambda: self.half.allocated(request, (), 0))
        counts = {request.request_id: request.num_tokens - held_tokens}
        output = step_of(counts, {request.request_id: held_tokens}, ids, is_new=True)
        _, stores = self.timed("step behind the load", lambda: self._step(output))
        assert not stores, stores

    def _report(self, reports: list[Report]) -> None:
        self.timed("reported", lambda: self.half.ended(reports, namespaces=(), is_inert=False))

    def _others(self) -> dict[str, int]:
        """Requests that decode beside the measured one -> their tokens in a step."""
        return {"other": 1} if self._beside else {}

    def _call(self, name: str, before: str) -> None:
        """Renames the last call of `before`."""
        self.took_us[name].append(self.took_us[before].pop())

    def bare(self, peer: Bare, tokens: int) -> None:
        """Like admit(), without our code in the calls."""
        self.request(self.prompt(tokens))
        self._step(step_of({}, {}, [], is_new=False))
        frame = bytes(tokens // CHUNK * KEY_BYTES + NAMESPACE_BYTES)
        self.timed("bare send", lambda: peer.send(frame))
        compute(STEP_S)
        self.timed("bare receive", peer.receive)

    def prefill(
        self, request: Request, ids: list[int], carry_out: Callable[[Sequence[StoreOrder]], list[Report]]
    ) -> None:
        for start in range(0, request.num_tokens, STEP):
            end = min(start + STEP, request.num_tokens)
            output = step_of({request.request_id: end - start}, {request.request_id: start}, ids, is_new=not start)
            _, stores = self.timed("prefill", lambda output=output: self._step(output))
            (order,) = stores
            assert order.chunks == (end - start) // CHUNK
            self._report(carry_out(stores))

    def finish(self, running: Running) -> None:
        request, ids = running
        self.timed("finished", lambda: self.half.finished(request.request_id, (ids,)))
        self._tables.forget(request.request_id)
        self._pool.free_blocks(reversed([self._pool.blocks[block] for block in ids]))

    def decode(self, begin: Callable[[int], Running]) -> float:
        """Microseconds per request; finishes all of them."""
        running = [begin(number) for number in range(DECODING)]
        self.took_us.clear()
        for step in range(20):
            counts = {request.request_id: 1 for request, _ in running}
            computed = {request.request_id: request.num_tokens + step for request, _ in running}
            output = step_of(counts, computed, [], is_new=False)
            self.timed("decode", lambda output=output: self._step(output))
        step_us = statistics.median(self.took_us["decode"])
        for each in running:
            self.finish(each)
        return step_us / DECODING

    def _step(self, output: Any) -> Any:
        return self.half.step(lambda: (scheduled(output), self._tables.of_step(output)))


def compute(seconds: float) -> None:
    """Spins, as an engine computes between two steps: a sleeping processor would wake up within the next call."""
    due_s = time.perf_counter() + seconds
    while time.perf_counter() < due_s:
        pass


def step_of(counts: dict[str, int], computed: dict[str, int], ids: list[int], *, is_new: bool) -> Any:
    """The fields of vLLM's SchedulerOutput that are read."""
    new = [SimpleNamespace(req_id=name, num_computed_tokens=computed[name], block_ids=[ids]) for name in counts]
    cached = SimpleNamespace(
        req_ids=list(counts),
        num_computed_tokens=[computed[name] for name in counts],
        new_block_ids=[None] * len(counts),
        resumed_req_ids=set(),
    )
    nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=new if is_new else [],
        scheduled_cached_reqs=nothing if is_new else cached,
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens={},
    )


def algorithm(*, by_hashes: bool) -> Callable[[Any], bytes]:
    """The algorithm of vLLM's block hashes."""
    return sha256_cbor if by_hashes else sha256


def pretended(orders: Sequence[StoreOrder]) -> list[Report]:
    """Reports for stores that nobody has carried out."""
    return [Report(order.job, 0, StoreResult(order.chunks, order.chunks, 1, ""), 0.0) for order in orders]


def measure(
    bench: Bench, peer: Bare, begin: Callable[[int], Running], *, tokens: int, requests: int
) -> dict[str, float]:
    """Runs one round. Returns row -> microseconds. begin: computes the prompt of the request with this number."""
    for number in range(requests):
        bench.finish(begin(number))
        bench.bare(peer, tokens)
    for method, kinds in METHODS.items():
        bench.took_us[f"all of {method}"] = [took for kind in kinds for took in bench.took_us[kind]]
    found = {name: statistics.median(values) for name, values in bench.took_us.items() if values}
    if tokens == LENGTHS[0]:
        found["decode"] = bench.decode(begin)
    return found


def measure_rounds(
    client: Client, peer: Bare, bench: Callable[..., Bench], *, tokens: int, requests: int, rounds: int
) -> dict[str, list[float]]:
    """Returns row -> one value per round. bench: makes a Bench; its argument is the seed of the prompts."""
    keeper = bench(drawn_by=0)
    held = [keeper.keep(tokens) for _ in range(requests)]
    runs: dict[str, list[float]] = defaultdict(list)
    for is_counted in [False] + rounds * [True]:
        misses, hits = bench(drawn_by=1), bench(drawn_by=2)
        found = measure(misses, peer, lambda _, misses=misses: misses.miss(tokens), tokens=tokens, requests=requests)
        found_of_hits = measure(
            hits, peer, lambda number, hits=hits: hits.hit(held[number % requests]), tokens=tokens, requests=requests
        )
        found |= {f"hit {name}": took_us for name, took_us in found_of_hits.items()}
        for name, took_us in found.items() if is_counted else ():
            runs[name].append(took_us)
    check_clean(client)
    assert client.clear(NAMESPACE) == requests * tokens // CHUNK
    return runs


def check_clean(client: Client) -> None:
    """Checks that every lease was used or given back."""
    due_s = time.monotonic() + CLEAN_S
    while (status := client.status())["leases"] or status["pins"]:
        assert time.monotonic() < due_s, (status["leases"], status["pins"])
        time.sleep(0.01)


def main() -> None:
    parser = option_parser(__doc__, smoke="few calls")
    parser.add_argument("--step-wait-us", type=int, default=0, help="as of the connector, whose default is 500")
    given = parser.parse_args()
    for handler in logging.getLogger("vllm").handlers:
        handler.setStream(sys.stderr)  # vLLM logs a line for each request
    requests, rounds = (3, 1) if given.smoke else (30, 5)
    config = f"{requests} requests a round, chunk {CHUNK}, block {BLOCK}, step wait {given.step_wait_us} us"
    rows = Rows("connector", as_json=given.json, config=config)
    with serving((), ARENA_BYTES, engine="bench") as (_, client), contextlib.closing(Bare()) as peer:
        worker = PlayedWorker(client, NAMESPACE, chunk_tokens=CHUNK, block_tokens=BLOCK, blocks=BLOCKS)
        for by_hashes in (False, True):
            init_none_hash(algorithm(by_hashes=by_hashes))  # once: some releases draw a new hash each time
            bench = partial(Bench, client, worker, by_hashes=by_hashes, step_wait_s=given.step_wait_us / 1e6)
            for tokens in LENGTHS:
                runs = measure_rounds(client, peer, bench, tokens=tokens, requests=requests, rounds=rounds)
                for name, values in runs.items():
                    rows.add(f"{'hashes' if by_hashes else 'tokens'} {name}/{tokens}", values, "us")


if __name__ == "__main__":
    main()
