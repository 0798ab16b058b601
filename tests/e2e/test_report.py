"""The report of a real job, and the summary at the end of its error output."""

import json

import pytest

pytestmark = pytest.mark.e2e

OTHER = "vte2e2"
# Busy in one of two vCPUs, for long enough that telemetry samples it several times.
BURN = """#!/bin/sh
echo out
echo err >&2
end=$(($(date +%s) + 7))
while [ $(date +%s) -lt $end ]; do :; done
exit 3
"""


@pytest.fixture
def shown(config):
    """Enable the summary of every job."""
    config("plugin.report", "show = true")


def latest(node):
    """Return the id of the job that was recorded last."""
    places = (node.state / "kept").glob("*/*/job.json")
    newest = max(places, key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["job"]


@pytest.mark.full
def test_report_of_a_job_has_its_figures(clean, shown):
    result = clean.job(BURN, "-vm", "vcpus=2,ram=256M")
    assert (result.code, result.out) == (3, b"out\n")
    first, *summary = result.err.decode().splitlines()
    assert first == "err"
    assert all(line.startswith("vtorque:") for line in summary), summary
    text = "\n".join(summary)
    assert "script ended, exit code 3" in text and "2 vCPUs" in text
    job = latest(clean)

    def told():
        data = json.loads(clean.as_user("vmgr", "report", job, "--json").stdout)
        return data if data["state"] == "ended, exit code 3" else None

    data = clean.wait_for(told, what="the end of the job in its report")
    total = data["total"]
    assert total["measured"] and data["missing"] == []
    # One of two vCPUs was busy, or had to wait for a busy machine.
    assert total["cpu"] + total["steal"] >= 0.3 * total["core_seconds"]
    assert total["cpu"] >= 0.5 and total["memory"] > 20 << 20
    assert total["disk"] is not None and total["network"] is not None
    assert {"boot", "ready", "run", "release"} <= {p["name"] for p in data["phases"]}
    screen = clean.as_user("vmgr", "report", job).stdout.decode()
    assert screen.startswith(f"Job {job} (t): ended, exit code 3")
    for name in ("CPU", "memory", "disk", "network", "run"):
        assert f"\n{name} " in screen
    page = clean.as_user("vmgr", "report", job, "--html", "-")
    assert b"<svg" in page.stdout and page.stderr == b"", (
        "the page has no charts: scripts/node installs their library"
    )
    done = clean.as_user("vmgr", "report", job, user=OTHER, check=False)
    assert done.returncode == 2 and b"of yours" in done.stderr
