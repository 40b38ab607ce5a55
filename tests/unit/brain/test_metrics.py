"""Counters and the metrics made from them."""

import re
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver.brain.http import metrics
from kvserver.service.telling.counters import DIRECTIONS, IN_PARTS, Counters, Histogram, RemoteCounts
from kvserver.wire.status import RemoteStatus, Status
from tests.rigs.status_document import a_remote, a_status


def a_count() -> Counters:
    """Counters in which every plain counter has its own value."""
    counters = Counters()
    for number, name in enumerate(Counters.__slots__, 3):
        value = getattr(counters, name)
        if isinstance(value, int):
            setattr(counters, name, number)
        elif isinstance(value, dict) and name not in IN_PARTS:
            value.update({key: 1000 * number + place for place, key in enumerate(value)})
    counters.lookups, counters.leases_granted = 900, 300
    for place, model in enumerate(("", "llama")):
        tokens = counters.lookup_tokens_of(model)
        tokens.update({result: 100 + 10 * place + number for number, result in enumerate(tokens)})
    counters.worker_bytes = {"store": {0: 70, 3: 71}, "retrieve": {0: 72}}
    counters.stores, counters.short_stores, counters.stores_failed = 100_000, {"full": 13, "busy": 4}, 5
    return counters


def samples(counters: Counters, status: Status | None = None) -> dict[str, float]:
    """The samples as Prometheus would read them, by name and labels."""
    text = metrics.render(status or a_status(), counters, 0.25).decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_counter_reaches_a_metric() -> None:
    """Changes each counter alone; some sample must change with it."""
    before = samples(a_count())
    for name in Counters.__slots__:
        counters = a_count()
        value = getattr(counters, name)
        if isinstance(value, int):
            setattr(counters, name, value + 1)
            assert samples(counters) != before, name
        for key in value if isinstance(value, dict) else ():
            counters = a_count()
            held = getattr(counters, name)
            if isinstance(held[key], Histogram):
                held[key].observe(0.1)
            elif isinstance(held[key], dict):
                held[key][next(iter(held[key]))] += 1
            else:
                held[key] += 1
            assert samples(counters) != before, (name, key)


def test_every_gauge_shows_its_own_figure() -> None:
    """Changes each figure of the status alone; exactly one sample must change with it."""
    status, before = a_status(), samples(a_count())
    figures = (
        "uptime_s",
        "namespaces",
        "chunks",
        "chunks_max",
        "sessions",
        "caches",
        "leases",
        "pins",
        "stores",
        "retrieves",
    )
    changed = {
        name: msgspec.structs.replace(status, **{name: getattr(status, name) + 1}) for name in ("incarnation", *figures)
    }
    for name in ("total_bytes", "ready_bytes", "used_bytes", "slabs_total", "slabs_ready"):
        arena = msgspec.structs.replace(status.arena, **{name: getattr(status.arena, name) + 1})
        changed[name] = msgspec.structs.replace(status, arena=arena)
    arena = msgspec.structs.replace(status.arena, problem="out of memory")
    changed["problem"] = msgspec.structs.replace(status, arena=arena)
    for name in ("slots", "slots_used"):
        size = msgspec.structs.replace(status.slot_sizes[0], **{name: getattr(status.slot_sizes[0], name) + 1})
        changed[name] = msgspec.structs.replace(status, slot_sizes=[size])
    seen = set()
    for name, other in changed.items():
        after = samples(a_count(), other)
        (which,) = [sample for sample in after if after[sample] != before[sample]]
        assert after[which] == before[which] + 1, name
        seen.add(which)
    assert len(seen) == len(changed)


def test_a_remote_store_has_gauges_only_where_there_is_one() -> None:
    """A 0 without a store would say that the store is not usable."""
    gauges = {"usable": 0, "nodes_left_alone": 2, "clears_owed": 3, "queued_chunks": 7}
    remote = RemoteStatus(
        name="fleet",
        url="valkey://10.0.0.7",
        usable=False,
        nodes_left_alone=["a:1", "b:2"],
        namespaces=5,
        namespaces_known=4,
        namespaces_heard=3,
        looked_for=1,
        queued_chunks=7,
        reading_bytes=0,
        writing_bytes=0,
        read_bytes_per_s=0.0,
        clears_owed=3,
    )
    seen = samples(a_count(), msgspec.structs.replace(a_status(), remote=remote))
    assert {name: seen[f"kvserver_remote_{name}"] for name in gauges} == gauges
    states = {state: seen[f"kvserver_remote_namespaces[{state}]"] for state in ("used", "known", "heard")}
    assert states == {"used": 5, "known": 4, "heard": 3}
    assert not {f"kvserver_remote_{name}" for name in gauges} & samples(a_count()).keys()


def test_several_remote_stores_have_a_label_and_one_has_none() -> None:
    counts = {name: number for number, name in enumerate(RemoteCounts().plain, 5)}
    near = a_remote(name="near", queued_chunks=7, counted=counts, failures={"read gone": 11})
    far = a_remote(name="far", usable=False, clears_owed=2, counted=dict.fromkeys(counts, 0))
    one = samples(a_count(), msgspec.structs.replace(a_status(), remote=near))
    two = samples(a_count(), msgspec.structs.replace(a_status(), remote=near, other_remotes=[far]))
    assert {name for name in one if "remote" in name and "[near]" in name} == set()
    assert two["kvserver_remote_usable[near]"] == 1
    assert two["kvserver_remote_usable[far]"] == 0
    assert two["kvserver_remote_queued_chunks[near]"] == 7
    assert two["kvserver_remote_clears_owed[far]"] == 2
    assert two["kvserver_remote_namespaces[far][known]"] == 3
    assert two["kvserver_remote_chunk_events_total[written][near]"] == counts["writes"]
    assert two["kvserver_remote_chunk_events_total[written][far]"] == 0
    assert two["kvserver_remote_moved_bytes_total[fetch][near]"] == counts["read_bytes"]
    assert two["kvserver_remote_failures_total[gone][near][read]"] == 11
    bare = {re.sub(r"\[(near|far)\]", "", name) for name in two if name.startswith("kvserver_remote_")}
    fault = "kvserver_remote_failures_total"
    known = {name for name in one if name.startswith("kvserver_remote_") and not name.startswith(fault)}
    assert {name for name in bare if not name.startswith(fault)} == known


def test_two_starts_of_a_brain_are_told_apart() -> None:
    """An incarnation is larger than a float can count."""
    begun = 1_790_000_000_123_456_789
    seen = {
        samples(a_count(), msgspec.structs.replace(a_status(), incarnation=begun + life))["kvserver_incarnation"]
        for life in range(5)
    }
    assert len(seen) == 5


def test_results_are_told_apart() -> None:
    seen = samples(a_count())
    assert seen["kvserver_lookups_total[hit]"] == 300
    assert seen["kvserver_lookups_total[miss]"] == 600
    assert seen["kvserver_stores_total[full]"] == 13
    assert seen["kvserver_stores_total[failed]"] == 5
    assert seen["kvserver_stores_total[whole]"] == 100_000 - 17 - 5
    assert seen["kvserver_arena_bytes[used]"] == 4096
    assert seen["kvserver_arena_bytes[total]"] == 5 * 8192
    assert seen["kvserver_movers[ready]"] == 1
    assert seen["kvserver_movers[killed]"] == 0
    assert seen["kvserver_jobs_running[retrieve]"] == 2


def test_names_end_in_their_unit_and_help_is_a_sentence() -> None:
    text = metrics.render(a_status(), a_count(), 0.25).decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert len(helps) > 30
    assert helps.keys() == kinds.keys()
    for name, said in helps.items():
        assert said.endswith("."), name
        assert name.endswith("_total") == (kinds[name] == "counter"), name
        assert kinds[name] != "histogram" or name.endswith(("_seconds", "_bytes_per_second")), name
    assert not {name for name in helps if name + "_total" in helps}, "a gauge and a counter of one name confuse"


def test_a_histogram_counts_each_value_in_the_bucket_that_ends_at_or_above_it() -> None:
    histogram = Histogram((1.0, 2.5, 7.0))
    for value in (0.5, 1.0, 1.1, 2.5, 7.0, 7.1, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.count == 7
    assert histogram.sum == pytest.approx(119.2)


def test_buckets_are_cumulative_and_end_in_the_count() -> None:
    counters = Counters()
    for value in (0.6e-3, 0.7e-3, 3.0, 3.0, 1000.0):
        counters.job_seconds["store"].observe(value)
    counters.lookup_handle_seconds.observe(30e-6)
    seen = samples(counters)
    assert seen["kvserver_job_seconds_bucket[store][0.0005][dram]"] == 0
    assert seen["kvserver_job_seconds_bucket[store][0.001][dram]"] == 2
    assert seen["kvserver_job_seconds_bucket[store][5][dram]"] == 4
    assert seen["kvserver_job_seconds_bucket[store][+Inf][dram]"] == 5
    assert seen["kvserver_job_seconds_count[store][dram]"] == 5
    assert seen["kvserver_job_seconds_sum[store][dram]"] == pytest.approx(1006.0013)
    assert seen["kvserver_job_seconds_count[promote][disk]"] == 0
    assert seen["kvserver_lookup_handle_seconds_bucket[4e-05]"] == 1
    assert seen["kvserver_lookup_handle_seconds_bucket[2e-05]"] == 0


def test_a_copy_does_not_change_any_more() -> None:
    counters = a_count()
    twin = counters.copy()
    before = samples(twin)
    counters.lookups += 1
    counters.errors["request"] += 1
    counters.job_seconds["store"].observe(1.0)
    counters.lookup_handle_seconds.observe(1.0)
    assert samples(twin) == before
    assert samples(counters) != before


def test_an_unknown_reason_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Counters().discarded["bored"] += 1


def test_totals_are_all_plain_counts() -> None:
    totals = a_count().totals()
    assert totals["lookups"] == 900
    assert totals["lookup_tokens"] == {"dram": 210, "disk": 212, "declined": 214, "unwanted": 216, "miss": 218}
    assert (totals["lookup_tokens_asked"], totals["lookup_tokens_hit"]) == (1070, 422), "hits are served from here"
    assert list(totals["moved_bytes"]) == list(DIRECTIONS)
    sums = {"digest_mismatches", "evictions", "lookups_hit", "moved_bytes", "stores_short"}
    sums |= {"lookup_tokens", "lookup_tokens_asked", "lookup_tokens_hit", "remote_failures"}
    assert set(totals) == {*Counters.__slots__} - {*IN_PARTS, "lookup_handle_seconds"} | sums


def test_rendering_is_short_enough_for_the_brain_to_wait() -> None:
    """It holds the GIL. The bound is far above the usual 1 ms, to catch a change of magnitude."""
    counters, status = a_count(), a_status()
    best_s = float("inf")
    for _ in range(20):
        began_s = time.thread_time()
        metrics.render(status, counters, 0.1)
        best_s = min(best_s, time.thread_time() - began_s)
    assert best_s < 0.02
