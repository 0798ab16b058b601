"""Plugins are notified of each fully released attempt, and of no other."""

import os

import pytest

from vtorque_core.api.values import hookimpl
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.end import reap
from vtorque_core.node.end.teardown import TeardownReport
from vtorque_core.records.reading import JobHeader


class Hears:
    def __init__(self, path, error=None):
        self.path, self.error = path, error

    @hookimpl
    def vtorque_job_ended(self, place):
        with self.path.open("a") as file:
            file.write(f"{place.key} of {place.uid}\n")
        if self.error:
            raise self.error


def report(job, whose=None):
    return TeardownReport(job, f"{job}.jsonl", ended=whose)


@pytest.fixture
def site(tmp_path):
    return type("OneSite", (Site,), {"paths": Paths(tmp_path)})()


def test_plugins_are_notified_of_each_fully_released_attempt(site, tmp_path):
    plugins = Plugins()
    plugins.register("a", Hears(tmp_path / "a", RuntimeError("broken")), "vtorque-a 1")
    plugins.register("b", Hears(tmp_path / "b"), "vtorque-b 1")
    plugins.register("c", object(), "vtorque-c 1")
    plugins.register("off", Hears(tmp_path / "off"), "vtorque-off 1")
    gone = report("1.srv", JobHeader(JobAttempt("1.srv", 2, "ada", 7), "local", off=("off",)))
    faults = reap.notify(site, plugins, [None, report("2.srv"), gone])
    assert not (tmp_path / "off").exists(), (
        "a plugin was notified that [[limits]] disables for this job"
    )
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "1.srv.2 of 7\n"
    assert len(faults) == 1 and "plugin a" in faults[0] and "broken" in faults[0]


def test_ended_hook_runs_in_a_separate_process_with_a_timeout(site, tmp_path, monkeypatch):
    class Hangs:
        @hookimpl
        def vtorque_job_ended(self):
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.read(os.pipe()[0], 1)

    monkeypatch.setattr(reap, "AFTER", 0.5)
    plugins = Plugins()
    plugins.register("hangs", Hangs(), "vtorque-hangs 1")
    (fault,) = reap.notify(
        site, plugins, [report("1", JobHeader(JobAttempt("1", 0, "ada", 7), "local"))]
    )
    assert "vtorque_job_ended: timed out after 0.5 s" in fault
    assert int((tmp_path / "pid").read_text()) != os.getpid()
