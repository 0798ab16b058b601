"""Jobs on a recorded node, with snapteld's double as a process; only libvirt is a double, too."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import snapteld_double
from device_cases import MACHINE
from vtorque_testing.faults import around_all, around_create, orphans, survive
from vtorque_testing.recorded import RecordedJob, RecordedNode, load

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[1] / "vtorque_snap" / "example-task.json"
ASKED = {"snap": "true", "vms_per_node": "2"}


@contextlib.contextmanager
def double(**options):
    """Run the double in a process; yield its URL. The process has ended afterwards."""
    argv = [sys.executable, snapteld_double.__file__, json.dumps(options)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://localhost:{int(process.stdout.readline())}"
        finally:
            process.kill()


def state_of(url):
    with urllib.request.urlopen(f"{url}/double", timeout=20) as answer:  # noqa: S310
        return json.load(answer)


def recorded(top, url, tables=None, **settings):
    template = top.with_suffix(".json")
    template.write_bytes(EXAMPLE.read_bytes())  # a checkout may be writable by its group
    template.chmod(0o600)
    plugin = {"snap": {"url": url, "template": str(template), "timeout": 10.0, **settings}}
    plugins = load({"linux-guest", "snap"})
    return RecordedNode.make(top, MACHINE, plugins, tables={"plugin": plugin, **(tables or {})})


def detail_of(node):
    return json.loads(node.site.paths.proof("1").read_text())["detail"]


@pytest.mark.parametrize("version", ["v1", pytest.param("v2", marks=pytest.mark.full)])
def test_job_has_a_running_task_from_boot_to_end(tmp_path, version):
    with double() as url:
        node = recorded(tmp_path / "node", url, version=version)
        job = node.job(ASKED, "7.srv")
        run = node.start(job)
        assert not run.error, run
        (task,) = state_of(url)["tasks"]
        assert (task["name"], task["task_state"]) == (f"snapTask-{job.owner}-7.srv", "Running")
        collect = task["workflow"]["collect"]
        assert collect["tags"]["/intel"] == {"jobid": "7.srv", "username": job.owner, "node": "n1"}
        guests = {name.split("/")[3] for name in collect["metrics"] if "libvirt" in name}
        assert len(guests) == 2
        assert all(any(f"<name>{g}<" in xml for xml in node.domains()) for g in guests)
        node.release("7.srv")
        after = state_of(url)
        assert (after["tasks"], after["twice"], len(after["manifests"])) == ([], [], 1)


def test_task_is_created_only_for_jobs_with_the_option_on_matching_nodes(tmp_path):
    with double() as url:
        for number, (pairs, settings, tables, tasks) in enumerate(
            [
                ({}, {}, {}, 0),
                ({"snap": "false"}, {}, {"options": {"snap": {"default": True}}}, 0),
                ({}, {}, {"options": {"snap": {"default": True}}}, 1),
                (ASKED, {"nodes": "m.*"}, {}, 0),
                (ASKED, {"nodes": "n[0-9]"}, {}, 1),
            ]
        ):
            node = recorded(tmp_path / str(number), url, tables, **settings)
            assert not node.start(node.job(pairs)).error
            assert (len(state_of(url)["tasks"]), detail_of(node)) == (tasks, []), number
            node.release()


def test_site_can_forbid_the_option(tmp_path):
    tables = {"options": {"snap": {"allow": [False]}}}
    node = recorded(tmp_path / "node", "http://localhost:1", tables)
    run = node.start(node.job(ASKED))
    assert run.kind == "Refused"
    assert "snap=true: is not allowed" in run.error
    assert "[options.snap] allow" in run.error


@pytest.fixture
def closed_url():
    """Return a URL at which no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://localhost:{taken.getsockname()[1]}"


def test_job_without_snapteld_runs_with_one_warning(tmp_path, closed_url):
    url = closed_url
    node = recorded(tmp_path / "lax", url)
    before = node.observe()
    assert not node.start(node.job(ASKED)).error
    assert len(node.domains()) == 2
    (line,) = detail_of(node)
    wanted = f"the job runs without snap=true on node n1: snapteld at {url}: not running"
    assert line == wanted
    node.release()
    assert node.observe() == before
    strict = recorded(tmp_path / "strict", url, required=True)
    before = strict.observe()
    run = strict.start(strict.job(ASKED))
    assert (run.kind, "not running" in run.error) == ("NotRunning", True)
    strict.release()
    assert strict.observe() == before


def test_template_that_others_can_write_is_not_read(tmp_path):
    template = tmp_path / "task.json"
    template.write_bytes(EXAMPLE.read_bytes())
    template.chmod(0o666)
    with double() as url:
        node = recorded(tmp_path / "node", url, template=str(template))
        assert not node.start(node.job(ASKED)).error
        assert "can be written by others than root" in detail_of(node)[0]
        assert state_of(url)["tasks"] == []
        node.release()


def test_hanging_snapteld_delays_a_job_only_to_the_deadline(tmp_path, capfd):
    """The job and its CPUs do not wait for it: the release records the task, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://localhost:{listener.getsockname()[1]}"
        node = recorded(tmp_path / "node", url, timeout=0.5)
        assert not node.start(node.job(ASKED)).error
        assert "no success within 0.5 s" in detail_of(node)[0]
        node.release()
    assert capfd.readouterr().err.count("stays in snapteld until the next job ends") == 1
    assert list(node.site.paths.journal.iterdir()) == []
    (note,) = (node.site.paths.state / "snap").iterdir()
    assert json.loads(note.read_text())["url"] == url


def test_secrets_are_not_in_a_journal(tmp_path):
    template, password = tmp_path / "task.json", tmp_path / "password"
    template.write_text(EXAMPLE.read_text().replace("CHANGE ME", "t0psecret"))
    password.write_text("hush-hush\n")
    password.chmod(0o600)
    with double(password="hush-hush") as url:
        node = recorded(tmp_path / "node", url, template=str(template), password=str(password))
        assert not node.start(node.job(ASKED)).error
        (journal,) = node.site.paths.journal.iterdir()
        text = journal.read_text()
        assert '"snap-task"' in text
        assert str(password) in text
        for path in (tmp_path / "node").rglob("*"):
            if path.is_file():
                assert b"t0psecret" not in path.read_bytes(), path
                assert b"hush-hush" not in path.read_bytes(), path
        assert state_of(url)["tasks"][0]["task_state"] == "Running"
        node.release()
        assert state_of(url)["tasks"] == []


# -- SIGKILL ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SnapJob(RecordedJob):
    """A job whose observed state includes snapteld's tasks."""

    url: str = ""

    def observe(self):
        now = state_of(self.url)
        tasks = [(task["name"], task["task_state"]) for task in now["tasks"]]
        return {**super().observe(), "tasks": tasks, "twice": now["twice"]}


@pytest.mark.parametrize("documented", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_start_leaves_no_task(tmp_path, documented):
    with double(documented=documented, stopping=0.05) as url, orphans() as left:
        node = recorded(tmp_path / "node", url, version="v1" if documented else "v2")
        job = SnapJob(node, node.job(ASKED), left, url)
        around = around_all if documented else around_create
        steps = survive(job, lambda step: around(step) and step.endswith(" snap-task"))
    assert {"before create snap-task", "after create snap-task"} <= set(steps)


@pytest.mark.full
def test_start_killed_before_the_answer_leaves_no_task(tmp_path):
    """snapteld has created the task, but its id was not received."""
    with double(slow=1000) as url, orphans() as left:
        node = recorded(tmp_path / "node", url, timeout=20.0)
        job = SnapJob(node, node.job(ASKED), left, url)
        before = job.observe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                node.start_in_process(job.job)
            os._exit(0)
        try:
            end = time.monotonic() + 60
            while not state_of(url)["tasks"]:
                assert time.monotonic() < end
                time.sleep(0.02)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert [task["task_state"] for task in state_of(url)["tasks"]] == ["Stopped"]
        job.release()
        assert job.observe() == before
