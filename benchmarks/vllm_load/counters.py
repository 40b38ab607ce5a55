"""Counters of /metrics, and the hit rates computed from them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

Counters = dict[str, float]
"""Value by name, or by name{label="value"} for the labels matched by RESULT; summed over all other labels."""

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
RESULT = re.compile(r'(?:^|,)((?:finished_reason|result|source)="[^"]*")')
PREFIX_CACHING = re.compile(r'^vllm:cache_config_info\{.*\benable_prefix_caching="(\w+)"', re.MULTILINE)

PROMPTS = "vllm:prompt_tokens_total"
OWN_HIT = 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'
EXTERNAL_ASKED = "vllm:external_prefix_cache_queries_total"
EXTERNAL_HIT = "vllm:external_prefix_cache_hits_total"
BROUGHT = "vllm:kvserver_tokens_retrieved_total"
LOADS_FAILED = "vllm:kvserver_retrieves_failed_total"
BUGS = "vllm:kvserver_bugs_total"
REQUESTS_FAILED = 'vllm:request_success_total{finished_reason="error"}'
SERVER_ASKED = "kvserver_lookup_chunks_total"
SERVER_HIT = tuple(f'{SERVER_ASKED}{{result="{tier}"}}' for tier in ("dram", "disk"))
WAITING = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Hits(NamedTuple):
    """Hit shares of tokens between two scrapes, `server` of chunks. None if nothing was asked, or no count exists.

    `vllm:prefix_cache_queries` does not count prompts: a prompt that does not fit into vLLM's pool is counted again in
    every step. Under pressure on a CPU that was 610 times as much (0.26.0).
    """

    own: float | None
    """Share of the prompts' tokens found in the engine's own prefix cache."""
    external: float | None
    """Share of the tokens missing in the engine that its connector promised."""
    brought: float | None
    """Share of the prompts' tokens that kvserver loaded; the connector counts them when a load has ended."""
    server: float | None
    """Share of the chunks asked of the server that it held."""


def parse(text: str) -> Counters:
    """Parses Prometheus' text format."""
    found: Counters = {}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        result = RESULT.search(labels or "")
        key = f"{name}{{{result[1]}}}" if result else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> Counters:
    """Counts between two scrapes. A new counter began at zero."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def hits(counted: Mapping[str, float]) -> Hits:
    prompts = counted.get(PROMPTS, 0.0)
    chunks = sum(value for name, value in counted.items() if name.startswith(SERVER_ASKED))
    return Hits(
        own=_share(counted.get(OWN_HIT), prompts),
        external=_share(counted.get(EXTERNAL_HIT), counted.get(EXTERNAL_ASKED, 0.0)),
        brought=_share(counted.get(BROUGHT), prompts),
        server=_share(sum(counted.get(name, 0.0) for name in SERVER_HIT), chunks),
    )


def unclean(counted: Mapping[str, float], *, has_connector: bool) -> list[str]:
    """Reasons to discard a measurement: failed loads, as our connector or vLLM counts them.

    has_connector: the engine has our connector, so the counter must exist.
    """
    found = [
        f"{counted[name]:.0f} {what}"
        for name, what in (
            (LOADS_FAILED, "loads failed"),
            (REQUESTS_FAILED, "requests ended with an error of the engine"),
            (BUGS, "bugs ended the connector's cache"),
        )
        if counted.get(name)
    ]
    if has_connector and LOADS_FAILED not in counted:
        found.append(f"the engine does not count failed loads ({LOADS_FAILED})")
    return found


def has_prefix_caching(text: str) -> bool | None:
    """The setting as /metrics shows it; None if it shows nothing."""
    told = PREFIX_CACHING.search(text)
    return None if told is None else told[1] == "True"


def at_rest(counters: Mapping[str, float]) -> bool:
    """No request is in flight. Also true if the engine has no such gauge."""
    return sum(counters.get(name, 0.0) for name in WAITING) == 0


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else part / whole
