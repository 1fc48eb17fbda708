"""Dashboard and alerts fit the endpoint: each metric, label and label value they name is really
there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine.messages import GateMode
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import EXACT, FakeEngine, hello, prompt
from tests.sidecar import PutStream
from tests.unit.sidecar.reports import report
from tests.unit.sidecar.scrape import MeteredSidecar, Scrape, of_port

PACKAGING = Path(__file__).parents[2] / "packaging"
RULES = PACKAGING / "prometheus/rules.yml"
DASHBOARD = json.loads((PACKAGING / "grafana/tiering.json").read_text())
NS = samples.namespace()

# Labels that Prometheus adds to what it scrapes, or computes.
SCRAPED = {"instance", "job", "le"}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for panel in DASHBOARD["panels"]:
        found += [panel, *panel.get("panels", [])]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and alert, Grafana's variables replaced."""
    for panel in panels():
        for target in panel.get("targets", []):
            text = target["expr"]
            for variable, value in (
                ("$__rate_interval", "5m"),
                ("$__range", "6h"),
                ("$instance", ".*"),
            ):
                text = text.replace(variable, value)
            assert "$" not in text
            yield f"panel {panel['title']}", text
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load(RULES.read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """Of a real sidecar that has stored, found and given blocks."""
    with (
        MeteredSidecar(tmp_path_factory.mktemp("packaging")) as daemon,
        daemon.channel() as channel,
    ):
        stub = rpc.BlockStoreStub(channel)
        blocks = samples.sequence(NS, range(8))
        stream = PutStream(stub, NS)
        stream.put(blocks)
        stream.close()
        stub.Has(pb.HasRequest(namespace=NS.digest(), block_tokens=4), timeout=10)
        keys = [block.key for block in blocks]
        list(stub.Get(pb.GetRequest(namespace=NS.digest(), keys=keys), timeout=10))
        measured = {"prefill_tokens": 1000, "prefill_seconds": 2.0}
        stub.ReportRunner(report(2, restored=640, **measured), timeout=10)
        for gate in (GateMode.RESTORE, GateMode.RECOMPUTE):
            with FakeEngine(daemon.socket, hello(fields=EXACT, gate=gate)) as engine:
                engine.store(prompt(1000, 64))
        daemon.wait_written()
        return of_port(daemon.port)


METRIC = re.compile(r"\b((?:tiering|process)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")
GROUPED = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")


def used() -> Iterator[tuple[str, str, str]]:
    """(where, metric, its matchers)"""
    for where, text in expressions():
        for match in METRIC.finditer(text):
            yield where, match[1], match[2] or ""


def test_there_is_something_to_check() -> None:
    assert len(list(used())) > 40
    assert len(rules()) >= 10
    assert sum(panel["type"] != "row" for panel in panels()) >= 20


def test_every_metric_that_is_named_exists(scrape: Scrape) -> None:
    missing = {(where, metric) for where, metric, _ in used() if metric not in scrape.names}
    assert missing == set()


def test_every_label_that_is_named_exists_and_has_such_a_value(scrape: Scrape) -> None:
    for where, metric, matchers in used():
        labels = scrape.labels(metric)
        for label, operator, value in MATCHER.findall(matchers):
            if label in SCRAPED - {"le"}:
                continue
            assert label in labels, (where, metric, label)
            if operator in ("=", "!="):
                assert value in labels[label], (where, metric, label, value)


def test_every_label_that_is_grouped_by_or_shown_exists(scrape: Scrape) -> None:
    for where, text in expressions():
        known = {label for match in METRIC.finditer(text) for label in scrape.labels(match[1])}
        for group in GROUPED.findall(text):
            asked = {label.strip() for label in group.split(",")}
            assert asked <= known | SCRAPED, where
    for panel in panels():
        for target in panel.get("targets", []):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in target["expr"] or label == "tier", panel["title"]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert "id" not in DASHBOARD  # the importing server gives it
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(references) == len(set(references))
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_is_tested_both_ways_and_explained() -> None:
    document = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())
    checks = [check for test in document["tests"] for check in test["alert_rule_test"]]
    fires = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    names = {rule["alert"] for rule in rules()}
    assert fires == silent == names
    page = (PACKAGING.parent / "docs/operations.md").read_text()
    assert {name for name in names if name not in page} == set()


@pytest.fixture(scope="module")
def promtool() -> str:
    """`scripts/test` names one; it gets it with scripts/get_promtool."""
    found = os.environ.get("OLLAMA_TIERING_TEST_PROMTOOL") or shutil.which("promtool")
    if not found:
        pytest.skip("promtool is not here: scripts/get_promtool gets it")
    return found


def run(promtool: str, *args: str | Path) -> str:
    command = [promtool, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules_and_the_example(promtool: str) -> None:
    assert f"{len(rules())} rules found" in run(promtool, "check", "rules", RULES)
    run(promtool, "check", "config", RULES.parent / "prometheus.yml")


def test_the_alerts_fire_when_they_should(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", RULES.parent / "rules_test.yml")


def test_promtool_accepts_what_the_endpoint_shows(promtool: str, scrape: Scrape) -> None:
    command = [promtool, "check", "metrics"]
    done = subprocess.run(
        command, input=scrape.text, capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith("tiering_")]
    assert ours == []


def test_promtool_accepts_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:query:{number}", "expr": text}
        for number, (_, text) in enumerate(expressions())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in run(promtool, "check", "rules", file)
