"""Prometheus itself, with the files of deploy/, scrapes a real server under recorded traffic: every query returns data.

Skipped where Prometheus is not installed."""

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WAIT_S, Server, free_port, until

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
PROMETHEUS = shutil.which("prometheus")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian package prometheus) is not installed")


class Observer:
    """The Prometheus of deploy/prometheus with a shorter interval: it scrapes four times a second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port()
        for file in (DEPLOY / "prometheus").iterdir():
            shutil.copy(file, folder)
        settings = folder / "prometheus.yml"
        text = settings.read_text().replace("127.0.0.1:9710", f"127.0.0.1:{target}")
        settings.write_text(re.sub(r"(scrape|evaluation)_interval: 15s", r"\1_interval: 250ms", text))
        assert PROMETHEUS is not None
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={settings}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        until("Prometheus to answer", self.answers, WAIT_S)

    def answers(self) -> bool:
        try:
            return self.ask("up") is not None
        except OSError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **fields: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return json.load(answer)["data"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


@pytest.fixture(scope="module")
def observer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    """An Observer after a replay of the sample. The server has too little DRAM for it, and a disk."""
    folder = tmp_path_factory.mktemp("prometheus")
    disk = folder / "disk"
    disk.mkdir()
    port = free_port()
    settings = {"disk_paths": disk, "disk_bytes": 512 * MIB, "disk_segment_bytes": 8 * MIB}
    with Server(http_port=port, arena_bytes=64 * MIB, **settings) as server:
        observer = Observer(folder, port)
        try:
            sample = 'count_over_time(kvserver_lookups_total{result="hit"}[1h])'
            until("the first scrapes", lambda: observer.ask(sample))
            command = [sys.executable, "-m", "kvserver", "replay", f"--socket={server.path}", "--requests=60"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            ended = server.status().uptime_s
            until("scrapes after it", lambda: float(observer.ask("kvserver_uptime_seconds")[0]["value"][1]) > ended + 1)
            yield observer
        finally:
            observer.close()


def asked() -> Iterator[tuple[str, str]]:
    """Panel and expression of each query of the dashboard, as Grafana sends it."""
    dashboard = json.loads((DEPLOY / "grafana" / "kvserver.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "5m")
            yield panel["title"], re.sub(r"\$__\w+", "5m", text)


def test_every_query_of_the_dashboard_has_data(observer: Observer) -> None:
    queries = list(asked())
    assert len(queries) > 30
    assert [f"{panel}: {expression}" for panel, expression in queries if not observer.ask(expression)] == []


def test_every_alert_is_evaluated_on_series_that_there_are_and_none_fires(observer: Observer) -> None:
    rules = observer.rules()
    assert len(rules) >= 17
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    assert {rule["name"] for rule in rules if rule["health"] != "ok"} == set()
    selectors = {
        selector
        for rule in rules
        for selector in re.findall(r"(?:kvserver_\w+|\bup)\{[^}]*\}|kvserver_\w+", rule["query"])
    }
    assert [selector for selector in sorted(selectors) if not observer.ask(selector)] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == [], "pending ones are a busy machine's"


def test_what_prometheus_has_sums_to_what_was_asked(observer: Observer) -> None:
    """Each token and chunk has one result, and hits were read from both tiers."""
    asked_for = observer.ask("sum by (result) (kvserver_lookup_tokens_total)")
    tokens = {each["metric"]["result"]: float(each["value"][1]) for each in asked_for}
    assert set(tokens) == {"dram", "disk", "declined", "unwanted", "miss"}
    assert min(tokens["dram"], tokens["disk"], tokens["miss"]) > 0
    chunks = {
        each["metric"]["result"]: float(each["value"][1]) for each in observer.ask("kvserver_lookup_chunks_total")
    }
    (ratio,) = {tokens[result] / chunks[result] for result in tokens if chunks[result]}
    assert ratio == int(ratio)
    assert sum(tokens.values()) == ratio * sum(chunks.values())
