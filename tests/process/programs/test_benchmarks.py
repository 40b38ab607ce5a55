"""Smoke runs of the benchmarks, so that they cannot rot: sizes that measure nothing, rows that a program can read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.limited_disks import EXIT_CANNOT

ROOT = Path(__file__).resolve().parents[3]
ROW = {"bench", "case", "value", "unit", "ceiling", "ratio", "machine", "commit", "config"}


@pytest.mark.parametrize(
    ("bench", "cases"),
    [
        ("atom", {"absent step", "absent miss/1024", "all-miss step", "all-miss miss/1024"}),
        ("start", {"answer_ms", "grown_ms", "brain_rss_empty_mib", "stop_ms", "kept_answer_ms"}),
        ("host", {"store_2k", "retrieve_2k"}),
        ("head_shards", {"store_whole", "retrieve_8_shards_512b"}),
        ("digest", {"best_256k", "portable_256k", "best_64m", "portable_64m"}),
        ("offload", {"decode_us", "store_us", "retrieve_128k_us"}),
        ("disk", {"write_128k_depth2", "read_128k_depth2", "recovery_s"}),
        ("drain", {"write", "drain", "lookup_p50_us", "lookup_longest_ms"}),
        ("recovery", {"recovered_3k_s", "answer_3k_s", "brain_rss_3k_mib"}),
        ("counting", {"counting_p50_ratio", "counting_rate_ratio"}),
        ("remote", {"valkey_8x4m_write", "valkey_1x1m_read_cpu", "directory_1x4m_read"}),
        ("service", {"lookup_512_p50_us", "lookup_512_handle_us", "store_4_p50_us"}),
    ],
)
def test_a_benchmark_prints_a_row_for_each_case(bench: str, cases: set[str]) -> None:
    command = [sys.executable, "-m", f"benchmarks.bench_{bench}", "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["case"] for row in rows} >= cases
    for row in rows:
        assert set(row) >= ROW, row
        assert row["bench"] == bench
        assert row["value"] > 0 or row["case"].startswith("per_100k")  # a difference, here of small numbers
        assert (row["ceiling"] is None) == (row["ratio"] is None)
        mixed = bench in ("disk", "drain", "host", "start")  # disk: only where fio is installed
        assert mixed or (row["ceiling"] is None) == (bench not in ("digest", "remote"))


def test_the_benchmark_of_placement_loses_a_device_or_says_what_this_machine_lacks() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_placement", "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    if done.returncode == EXIT_CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    fill, read, found = (json.loads(line) for line in done.stdout.splitlines())
    assert fill["value"] < 0.05
    assert read["value"] > 0
    assert found["value"] == found["ceiling"] == 0.5


def test_every_case_that_the_readme_names_is_one_of_a_benchmark() -> None:
    named = set(re.findall(r"^\|[^|]*\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    code = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("bench_*.py"))
    assert len(named) >= 6
    assert [case for case in named if f'"{case}"' not in code] == []
