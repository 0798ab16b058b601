"""The alert rules and the dashboard: promtool accepts them, and their metrics exist."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vtorque_telemetry.metrics import METRICS

PLUGIN = Path(__file__).resolve().parents[1]
RULES = PLUGIN / "prometheus/vtorque.rules.yml"
DASHBOARD = PLUGIN / "grafana/vtorque-job.json"
NAME = re.compile(r"\bvtorque_[a-z_]+")


def promtool(*argv, cwd=PLUGIN):
    done = subprocess.run(
        ["promtool", *argv], cwd=cwd, capture_output=True, check=False, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expressions():
    """Return every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.integration
def test_promtool_accepts_the_rules_and_they_fire_as_expected():
    assert "7 rules found" in promtool("check", "rules", str(RULES))
    promtool("test", "rules", "vtorque.rules.test.yml", cwd=RULES.parent)


@pytest.mark.integration
def test_promtool_accepts_every_query_of_the_dashboard(tmp_path):
    queries = [e.replace("$__rate_interval", "5m").replace("$job", "1") for e in expressions()]
    rules = [{"record": f"r{n}", "expr": query} for n, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


def test_every_alert_has_a_test_and_every_metric_exists():
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    tested = (RULES.parent / "vtorque.rules.test.yml").read_text()
    for rule in rules:
        assert tested.count(f"alertname: {rule['alert']}") >= 1
        assert set(NAME.findall(rule["expr"])) <= METRICS.keys()


def test_dashboard_is_complete():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    named = {name for query in expressions() for name in NAME.findall(query)}
    assert named - {"vtorque_app_"} <= METRICS.keys()
    missing = METRICS.keys() - named - {"vtorque_job_app_lines_rejected_total"}
    assert not {name for name in missing if "packets" not in name}
    assert all(
        target["datasource"]["uid"] == "${datasource}" for p in panels for target in p["targets"]
    )
