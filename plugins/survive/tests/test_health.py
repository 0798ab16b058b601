"""Health checks of a node: real commands and processes; the draining program is a double."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
from patience import eventually
from vtorque_survive import health
from vtorque_survive.drain import LastDrain
from vtorque_survive.health import HealthRecord, HealthWatcher
from vtorque_survive.settings import Settings
from vtorque_survive.turn import ASKS


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a node whose health command's output and exit code come from files."""
    paths, did = running_journal.paths_below(tmp_path), tmp_path / "did"
    did.touch()
    command, drains = tmp_path / "well", tmp_path / "drains"
    command.write_text(f"#!/bin/sh\ncat {tmp_path}/says\nexit $(cat {tmp_path}/code)\n")
    drains.write_text(f'#!/bin/sh\necho "$@" >> {did}\necho "42.srv (ada): left running"\n')
    for program in (command, drains):
        program.chmod(0o700)
    monkeypatch.setattr(health, "require_root_owned", lambda *_, **__: None)
    place = SimpleNamespace(call=lambda *words: [str(drains), *words])
    monkeypatch.setattr(health.service, "installation_of", lambda _: place)

    asks = tmp_path / "asks"
    batch = SimpleNamespace(
        drained=lambda: ("n1", {"n1": asks.read_text()} if asks.exists() else {}),
        drain=lambda _: None, undrain=asks.unlink,
    )  # fmt: skip
    system = SimpleNamespace(node=lambda _: batch)
    monkeypatch.setattr(health.service, "batch_system", lambda _: (None, system))

    def says(code, text="x"):
        (tmp_path / "says").write_text(text)
        (tmp_path / "code").write_text(str(code))

    says(0)
    settings = Settings(health_command=str(command), health_interval=1.0)
    found = SimpleNamespace(paths=paths, settings=settings, says=says, asks=asks, drains=drains)
    found.drained = lambda: did.read_text().splitlines()
    found.its = HealthWatcher(paths, Path("/etc/x"), settings)
    return found


def run_check(node, times=1):
    """Run the health check, regardless of its last time."""
    for _ in range(times):
        node.its._said = HealthRecord(0.0, node.its._said.failed, node.its._said.said)
        start_check(node)
        eventually(lambda: node.its.poll() or node.its._child is None)


def await_undrain(node):
    eventually(lambda: node.its.poll() or (node.its._back is None and not node.its._ended))


def start_check(node):
    """Run the health command, after the removal of the node's marks has ended."""
    eventually(lambda: node.its.poll() or node.its._child is not None)


def drained(node, times):
    eventually(lambda: len(node.drained()) >= times)
    assert len(node.drained()) == times
    eventually(lambda: node.its.poll() or node.its._drain is None)


def test_two_consecutive_failures_drain_the_node_with_the_last_output(node, caplog):
    node.says(1, "looks\nits disk is slow\n")
    run_check(node)
    node.says(0)
    run_check(node)
    node.says(3, "its disk is slow\n")
    run_check(node)
    assert node.drained() == []
    run_check(node)
    drained(node, 1)
    assert "drain: 42.srv (ada): left running" in caplog.text
    seen = [line.partition("health: ")[2] for line in caplog.messages if "health: " in line]
    slow = "its disk is slow ({} times in a row)"
    assert seen == [slow.format(1), "healthy again", slow.format(1), slow.format(2)]
    name = health.socket.gethostname()
    assert node.drained()[0] == f"drain --in-turn --reason its disk is slow -- {name}"


def test_node_is_drained_at_most_once_an_hour(node, monkeypatch):
    LastDrain(time.time() - 10, "x").write(node.paths)
    node.says(1)
    run_check(node, 3)
    assert node.drained() == []
    LastDrain(time.time() - 3601, "x").write(node.paths)
    run_check(node)
    drained(node, 1)


def test_killed_drain_request_is_withdrawn(node):
    node.drains.write_text(f'#!/bin/sh\nprintf "{ASKS}ill" > {node.asks}\nkill -9 $$\n')
    node.says(1)
    run_check(node, 2)
    eventually(lambda: node.its.poll() or node.its._drain is None)
    eventually(lambda: node.its.poll() or not node.asks.exists())
    node.asks.write_text("ill")
    again = HealthWatcher(node.paths, Path("/etc/x"), node.settings)
    eventually(lambda: again.poll() or (again._back is None and not again._ended))
    assert node.asks.exists(), "the mark of a drained node was removed"
    node.asks.write_text(f"{ASKS}ill")  # as if the watcher was killed, too
    again = HealthWatcher(node.paths, Path("/etc/x"), node.settings)
    eventually(lambda: again.poll() or not node.asks.exists())


def test_failures_are_counted_across_watchers(node):
    node.says(1)
    run_check(node)
    node.its = HealthWatcher(node.paths, Path("/etc/x"), node.settings)
    run_check(node)
    drained(node, 1)


def test_health_command_runs_at_most_once_per_interval(node):
    node.its._said = HealthRecord(time.time(), 0, "")
    node.its._settings = Settings(
        health_command=node.settings.health_command, health_interval=600.0
    )
    await_undrain(node)
    assert node.its._child is None
    node.its._said = HealthRecord(time.time() + 1000, 0, "")  # the clock was set
    start_check(node)
    eventually(lambda: node.its.poll() or node.its._child is None)


def test_hanging_command_is_a_failure_and_is_killed(node, monkeypatch):
    monkeypatch.setattr(health, "TIME", 0.2)
    Path(node.settings.health_command).write_text("#!/bin/sh\nsleep 600\n")
    run_check(node)
    assert HealthRecord.read(node.paths).failed == 1
    assert "timed out after" in HealthRecord.read(node.paths).said


def test_command_that_others_can_write_is_not_run(node, monkeypatch):
    def refuse(path, **_):
        raise health.VtorqueError(f"{path} can be written by others")

    monkeypatch.setattr(health, "require_root_owned", refuse)
    node.says(1)
    await_undrain(node)
    for _ in range(3):
        node.its._said = HealthRecord()
        node.its.poll()
    assert node.drained() == [] and HealthRecord.read(node.paths).failed == 0
    (result,) = health.check(_Site(node))
    assert result.status == "failed" and "written by others" in result.message


class _Site:
    def __init__(self, node):
        self.paths, self._settings = node.paths, node.settings

    def __getitem__(self, _kind):
        return self._settings


def test_doctor_reports_the_last_failure_and_drain(node):
    assert [each.status for each in health.check(_Site(node))] == ["ok"]
    node.says(1, "its disk is slow")
    run_check(node)
    LastDrain(time.time(), "by its admin", ("42.srv",)).write(node.paths)
    ill, last = health.check(_Site(node))
    assert ill.status == "warning" and "its disk is slow (1 times in a row)" in ill.message
    assert last.message.endswith("by its admin; left running: 42.srv")
    (node.paths.state / "survive-health.json").write_text('{"asked": "x"}')
    (node.paths.state / "survive-drained.json").write_text("[")
    assert [each.status for each in health.check(_Site(node))] == ["ok"]


def test_failed_doctor_findings_make_the_node_unhealthy(tmp_path):
    findings = [
        {"check": "libvirt", "status": "failed", "message": "no answer"},
        {"check": "network", "status": "warning", "message": "x"},
    ]
    said = tmp_path / "said"
    said.write_text(json.dumps(findings))
    with pytest.raises(health.HostFault, match=r"^libvirt: no answer$"):
        health._ask(("/bin/sh", "-c", f"cat {said}; exit 1"))
    health._ask(("/bin/sh", "-c", f"cat {said}"))
    with pytest.raises(health.HostFault, match="exit code 4"):
        health._ask(("/bin/sh", "-c", "exit 4"))


@pytest.mark.parametrize("bad", [{"health_command": "well"}, {"health_command": "/a/../b"},
                                 {"health_interval": 0.0},
                                 {"drain_parallelism": 0}, {"max_drained_nodes": 0}])  # fmt: skip
def test_invalid_settings_are_refused(bad):
    with pytest.raises(ValueError, match="write "):
        Settings(**bad)
