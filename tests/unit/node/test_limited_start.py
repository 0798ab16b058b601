"""Root's use of ``[[limits]]``: it refuses jobs, and starts and ends jobs without a plugin."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from device_cases import MACHINE
from vtorque_core.api import kept_records
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import Raw
from vtorque_core.node.shell.proof import Proof
from vtorque_core.node.start import prologue
from vtorque_testing.faults import run_in_child
from vtorque_testing.recorded import NoBatch, RecordedNode, load

pytestmark = pytest.mark.e2e

LIMITS = [
    {"queue": "small", "options": {"vcpus": {"max": 1}}, "plugins": {"joblog": False}},
    {"queue": "small", "user": "nobody", "plugins": {"joblog": True}},
]


@pytest.fixture
def node(tmp_path):
    tmp_path.chmod(0o755)
    settings = {"file": f"{tmp_path}/jobs.jsonl"}
    (tmp_path / "site").mkdir()
    plugins = load({"linux-guest", "joblog", "report"})
    made = RecordedNode.make(tmp_path / "node", MACHINE, plugins, share={"cpu_count": 4})
    data = {**made.site.raw.data, "limits": LIMITS, "plugin": {"joblog": settings}}
    toml = f"[plugin.joblog]\nfile = {json.dumps(settings['file'])}\n"
    (made.top / "vtorque.toml").write_text(toml)  # joblog's process reads it again
    return replace(made, site=build(Raw(made.site.path, "", data), plugins, node=True))


def start(node, queue, **pairs):
    """Run the prologue of a job in a separate process; return its proof and its journal."""
    job = replace(node.job(pairs, "7.srv"), queue=queue)

    def work():
        with node.install_doubles():
            prologue._run(job, node.site, node.plugins, NoBatch(), prologue.StartHook())

    assert not run_in_child(work, None).error
    (journal,) = node.site.paths.journal.glob("7.srv.*")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return Proof.decode(Path(node.site.paths.proof("7.srv")).read_bytes()), lines


def acting(lines):
    """Return the plugins that the header names, and those that have acquired something."""
    return set(lines[0]["plugins"]), {line["plugin"] for line in lines if line["op"] == "acquire"}


def test_disabled_plugin_is_not_called_for_the_job(node):
    proof, lines = start(node, "large")
    assert (proof.state, proof.off) == ("ready", ())
    assert [("joblog" in names) for names in acting(lines)] == [True, True]
    node.release("7.srv")

    proof, lines = start(node, "small")
    assert (proof.state, proof.off) == ("ready", ("joblog",))
    assert [("joblog" in names) for names in acting(lines)] == [False, False]
    node.release("7.srv")
    assert not list(node.site.paths.journal.glob("7.srv.*"))


def test_refused_job_names_the_entry_and_is_released(node):
    proof, lines = start(node, "small", vcpus="2")
    assert proof.state == "refused"
    assert proof.reason == (
        'vcpus=2: is more than allowed (limit: 1, set by [[limits]] 1 (queue = "small") '
        f"[options.vcpus] max in {node.site.path})"
    )
    assert acting(lines) == ({"core", "linux-guest", "report"}, {"core"})
    (kept,) = kept_records.find(node.site.paths, "7.srv")
    assert kept.facts()["outcome"] == "refused"
    node.release("7.srv")
    assert start(node, "large", vcpus="2")[0].state == "ready"
    node.release("7.srv")


def test_job_without_a_reported_queue_is_a_host_fault(node):
    proof, _ = start(node, "")
    assert proof.state == "host_fault"
    assert "batch system's hook does not report the job's queue, which [[limits]] 1" in proof.reason
    node.release("7.srv")
