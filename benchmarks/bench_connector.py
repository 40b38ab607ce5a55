"""What do vLLM's calls of our scheduler half cost? `python -m benchmarks.bench_connector [--json] [--smoke]`

Needs vLLM (any build; no engine and no model is started). Real requests with real block hashes, vLLM's own block pool,
a real server that holds nothing of them; what a scheduler does is played: each prompt is new, is matched, gets its
blocks, is computed in steps of 2048 tokens, decodes beside 31 others, and finishes. Microseconds of each call on the
scheduler's thread, median over the requests of a round, and that of the rounds, of which the first is not counted;
behind the slash the length of the prompt.

new: on_new_request, which names the chunks of a short prompt and asks the server, and begins to name those of a long
one, or names them by its block hashes. match: get_num_new_matched_tokens in a step that has other work: at once behind
on_new_request, and in those after that, a millisecond later, until one decides. match that asks: that of them which
finds the keys of a long prompt made, and asks; by block hashes it is the one at once. step: build_connector_meta
between two of them, with another request that decodes; step that sends: the one of them that sends the question of a
long prompt. events: take_events behind a step's forward; events answered: the one of them that takes the answer.
prefill: build_connector_meta of a step that completes eight chunks, which are stored. decode: that of a step of 32
requests that decode, per request. all of match, all of step: the kinds of one method together (but decode). alone:
match in an engine without other work, which waits for the answer. allocated: update_state_after_alloc. finished:
request_finished. bare send: instead of new, one system call that wakes a sleeping process, as the question has to; bare
receive: instead of match, one that takes an answer. Both in the same place and as cold, so what a call costs above them
is our own.
"tokens": keys from token ids; "hashes": from the engine's block hashes (--prefix-caching-hash-algo sha256_cbor).
"""

import argparse
import contextlib
import itertools
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.rows import Rows
from benchmarks.serving import serving
from kvclient.client import Client
from kvclient.offload_ends import Report
from kvclient.offload_values import Group, Options
from kvclient.values import StoreResult, Timeouts
from kvclient.vllm_guard import GuardedScheduler
from kvclient.vllm_keys import Keyer
from kvclient.vllm_scheduler import Scheduler
from kvclient.vllm_versions import BlockTables, scheduled
from kvserver.wire.messages import FRAME_BYTES_MAX, KEY_BYTES, NAMESPACE_BYTES

BLOCK, CHUNK, STEP = 16, 256, 2048
LENGTHS = (1024, 8192, 32768)
STEP_S = 0.001
DECODING = 32
"""Requests of a step."""
BLOCKS = 40_000
VOCABULARY = 128_000
ARENA_BYTES = 64 << 20
METHODS = {
    "match": ("match at once", "match", "match that asks", "match that decides"),
    "step": ("step", "step that sends", "prefill"),
}
"""Kinds of calls of one method, of an engine that has other work."""
ANSWER = b"an answer"
ANSWERS = f"""
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while peer.recv({FRAME_BYTES_MAX}):
    peer.send({ANSWER})
"""


class Bare:
    """A process that sleeps until it is sent something, and answers."""

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


class Bench:
    """One kind of keys."""

    def __init__(self, client: Client, *, by_hashes: bool, step_wait_s: float) -> None:
        algorithm = sha256_cbor if by_hashes else sha256
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(BLOCK, algorithm)
        options = Options(chunk_tokens=CHUNK, groups=(Group(BLOCK),), engine_steps_back=True, null_block=0)
        keyer = Keyer(chunk_tokens=CHUNK, hash_block_tokens=BLOCK if by_hashes else 0)
        half = Scheduler(client, options, keyer, store_output=True, step_wait_s=step_wait_s)
        self.half = GuardedScheduler(half, options.groups)
        self._pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.half.use_pool(self._pool)
        self.half.use_namespace({b"bench-connector".ljust(32, b".")})
        self._tables = BlockTables({})
        self._names = itertools.count()
        self._random = random.Random(1)
        self._beside = False
        self.took_us: dict[str, list[float]] = defaultdict(list)

    def request(self, tokens: int) -> Request:
        ids = [self._random.randrange(VOCABULARY) for _ in range(tokens)]
        sampling = SamplingParams(max_tokens=16)
        return Request(f"r{next(self._names)}", ids, sampling, None, block_hasher=self._hasher)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = call()
        self.took_us[name].append((time.perf_counter() - began) * 1e6)
        return value

    def admit(self, request: Request) -> list[int]:
        """Until it has its blocks, beside others and alone by turns."""
        self._beside = not self._beside
        other = {"other": 1} if self._beside else {}
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
        assert matched == (0, False), matched
        blocks = self._pool.get_new_blocks(-(-(request.num_tokens + 16) // BLOCK))
        ids = [block.block_id for block in blocks]
        self.timed("allocated", lambda: self.half.allocated(request, (), 0))
        return ids

    def _call(self, name: str, before: str) -> None:
        """The last call of `before` was of this kind."""
        self.took_us[name].append(self.took_us[before].pop())

    def bare(self, peer: Bare, tokens: int) -> None:
        """As admit(), with nothing of ours in the calls."""
        self.request(tokens)
        self._step(step_of({}, {}, [], is_new=False))
        frame = bytes(tokens // CHUNK * KEY_BYTES + NAMESPACE_BYTES)
        self.timed("bare send", lambda: peer.send(frame))
        compute(STEP_S)
        self.timed("bare receive", peer.receive)

    def prefill(self, request: Request, ids: list[int]) -> None:
        for start in range(0, request.num_tokens, STEP):
            end = min(start + STEP, request.num_tokens)
            output = step_of({request.request_id: end - start}, {request.request_id: start}, ids, is_new=not start)
            _, stores = self.timed("prefill", lambda output=output: self._step(output))
            (order,) = stores
            assert order.chunks == (end - start) // CHUNK
            report = Report(order.job, 0, StoreResult(order.chunks, order.chunks, 1, ""), 0.0)
            self.half.ended([report], namespaces=set(), is_inert=False)

    def finish(self, request: Request, ids: list[int]) -> None:
        self.timed("finished", lambda: self.half.finished(request.request_id, (ids,)))
        self._tables.forget(request.request_id)
        self._pool.free_blocks(reversed([self._pool.blocks[block] for block in ids]))

    def decode(self, tokens: int) -> None:
        requests = [self.request(tokens) for _ in range(DECODING)]
        running = {request.request_id: (request, self.admit(request)) for request in requests}
        for request, ids in running.values():
            self.prefill(request, ids)
        self.took_us.clear()
        for step in range(20):
            output = step_of(dict.fromkeys(running, 1), dict.fromkeys(running, tokens + step), [], is_new=False)
            self.timed("decode", lambda output=output: self._step(output))
        self.took_us["decode"] = [took / DECODING for took in self.took_us["decode"]]
        decode = self.took_us["decode"]
        for request, ids in running.values():
            self.finish(request, ids)
        self.took_us.clear()
        self.took_us["decode"] = decode

    def _step(self, output: Any) -> Any:
        return self.half.step(lambda: (scheduled(output), self._tables.of_step(output)))


def compute(seconds: float) -> None:
    """As an engine does between two steps: a processor that sleeps would have to wake up inside of the next call."""
    due_s = time.perf_counter() + seconds
    while time.perf_counter() < due_s:
        pass


def step_of(counts: dict[str, int], computed: dict[str, int], ids: list[int], *, is_new: bool) -> Any:
    """What is read of vLLM's SchedulerOutput."""
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


def measure(bench: Bench, peer: Bare, *, tokens: int, requests: int) -> dict[str, float]:
    """Microseconds by call, of one round."""
    for _ in range(requests):
        request = bench.request(tokens)
        ids = bench.admit(request)
        bench.prefill(request, ids)
        bench.finish(request, ids)
        bench.bare(peer, tokens)
    for method, kinds in METHODS.items():
        bench.took_us[f"all of {method}"] = [took for kind in kinds for took in bench.took_us[kind]]
    found = {name: statistics.median(values) for name, values in bench.took_us.items() if values}
    if tokens == LENGTHS[0]:
        bench.took_us.clear()
        bench.decode(tokens)
        found["decode"] = statistics.median(bench.took_us["decode"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--smoke", action="store_true", help="few calls: shows that it runs, measures nothing")
    parser.add_argument("--step-wait-us", type=int, default=0, help="as of the connector, whose default is 500")
    given = parser.parse_args()
    step_wait_s = given.step_wait_us / 1e6
    requests, rounds = (3, 1) if given.smoke else (30, 5)
    config = f"{requests} requests a round, chunk {CHUNK}, block {BLOCK}, step wait {given.step_wait_us} us"
    rows = Rows("connector", as_json=given.json, config=config)
    serve = serving((), ARENA_BYTES, engine="bench", rank=-1, timeouts=Timeouts())
    with serve as (_, client), contextlib.closing(Bare()) as peer:
        for by_hashes in (False, True):
            for tokens in LENGTHS:
                runs: dict[str, list[float]] = defaultdict(list)
                for is_counted in [False] + rounds * [True]:
                    bench = Bench(client, by_hashes=by_hashes, step_wait_s=step_wait_s)
                    found = measure(bench, peer, tokens=tokens, requests=requests)
                    for name, took_us in found.items() if is_counted else ():
                        runs[name].append(took_us)
                for name, values in runs.items():
                    rows.add(f"{'hashes' if by_hashes else 'tokens'} {name}/{tokens}", values, "us")


if __name__ == "__main__":
    main()
