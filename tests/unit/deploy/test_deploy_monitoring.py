"""deploy/prometheus and deploy/grafana query only existing metrics; docs/OPERATING.md explains each alert."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver.brain.http.metrics import render
from kvserver.config.remotes import parse
from kvserver.service.report.problems import PASSING
from kvserver.service.telling.counters import RemoteWanted
from kvserver.service.telling.reuse import WINDOWS_HOURS
from tests.rigs.disk_rig import DiskRig

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvserver.json").read_text())
ALERTS = (PROMETHEUS / "alerts.yml").read_text()
OF_THE_SCRAPE = {"instance", "job", "le"}
COLUMNS = 24


def shown() -> dict[str, dict[str, set[str]]]:
    """Sample name -> label -> values, as scrapes of servers with a disk, and with one and two remote stores, have
    them."""
    text = ""
    for stores in ("fleet=file:///mnt/kv", "near=file:///near far=file:///far"):
        rig = DiskRig(remotes=parse(stores))
        for wanted in get_args(RemoteWanted):
            for fault in ("remote-full", *PASSING):
                rig.core.remotes[0].failed(wanted, fault)
        text += render(rig.service.status(rig.now_ns), rig.service.counters, 0.0).decode()
    ratios = "kvserver_infinite_cache_hit_ratio", "kvserver_held_ratio"
    found: dict[str, dict[str, set[str]]] = {name: {"window": set(WINDOWS_HOURS)} for name in ratios}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (text.strip() for text in re.findall(r"expr: (?:\|\n)?((?:.|\n)*?)\n\s+(?:for|labels):", ALERTS))


def wrong(expression: str) -> list[str]:
    """Names and labels in an expression that no server exports."""
    known = shown()
    problems = []
    selectors = re.findall(r"(kvserver_\w+)(?:\{([^}]*)\})?", expression)
    for name, matchers in selectors:
        if name not in known:
            problems.append(name)
            continue
        for label, operator, values in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            wanted = set(values.split("|")) if "~" in operator else {values}
            if label not in OF_THE_SCRAPE and not wanted <= known[name].get(label, set()):
                problems.append(f"{name}: {label}{operator}{values}")
    names = [name for name, _ in selectors]
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
    labels = {label.strip() for group in grouped for label in group.split(",")}
    said = OF_THE_SCRAPE.union(*(known.get(name, {}) for name in names))
    return problems + [f"label {label}" for label in labels - said]


def test_every_expression_asks_for_what_there_is() -> None:
    asked = list(expressions())
    assert len(asked) >= 40
    assert {expression: wrong(expression) for expression in asked if wrong(expression)} == {}


def test_an_expression_that_asks_for_what_there_is_not_is_noticed() -> None:
    assert wrong("rate(kvserver_lookups_sum[5m])") == ["kvserver_lookups_sum"]
    assert wrong('kvserver_lookups_total{result="meet"}') == ["kvserver_lookups_total: result=meet"]
    assert wrong('kvserver_lookups_total{result!="meet"}') == ["kvserver_lookups_total: result!=meet"]
    assert wrong("sum by (mode) (kvserver_lookups_total)") == ["label mode"]


def test_panels_have_their_own_place_and_number() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        for column in range(place["x"], place["x"] + place["w"]):
            for line in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((column, line), panel["title"])
                assert other == panel["title"], f"{panel['title']} lies over {other}"


def test_every_panel_asks_the_chosen_prometheus_about_the_chosen_servers() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            selectors = re.findall(r"kvserver_\w+(\{[^}]*\})?", target["expr"])
            assert all('instance=~"$instance"' in selector for selector in selectors), target["expr"]


def test_every_alert_is_explained_and_nothing_else_is() -> None:
    manual = (ROOT / "docs" / "OPERATING.md").read_text()
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    assert len(alerts) == len(set(alerts))
    assert re.findall(r"^### (Kvserver\w+)$", manual, re.MULTILINE) == alerts


def test_rules_pass_promtool() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian package prometheus) is not installed")
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
