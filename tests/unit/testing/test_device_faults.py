"""SIGKILL before and after each record's create(), for all installed plugins.

The steps come from ``job.acquire()`` (testing/vtorque_testing/faults.py): of a plugin only the
settings that enable it are known here. The node is a recorded one
(testing/vtorque_testing/recorded.py).
"""

import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

import device_cases
from device_cases import CASES, DEVICES, MORE, Case, load, together
from patience import eventually
from vtorque_core.api import hooks
from vtorque_core.api.acquired import Resource
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.values import hookimpl
from vtorque_core.resources.kinds import HELPERS
from vtorque_testing import watched
from vtorque_testing.faults import (
    around_all,
    around_create,
    children,
    orphans,
    run_in_child,
    survive,
)
from vtorque_testing.recorded import RecordedJob

pytestmark = pytest.mark.e2e


@pytest.fixture
def processes():
    with orphans() as left:
        yield left
        assert left() == []


def job_of(tmp_path, plugins, processes, case, **pairs):
    """Return a job of two guests on a recorded node."""
    asked = {"vms_per_node": "2", "vcpus": "2", **case.pairs, **pairs}
    node = device_cases.node(tmp_path / "node", plugins, case)
    return RecordedJob(node, node.job(asked), processes)


def test_every_device_plugin_has_a_case():
    assert set(DEVICES) <= set(CASES), (
        "add -vm keys that enable the plugin to tests/support/device_cases.py"
    )


def unordered_helpers(steps):
    """Return the steps without the names of those that threads do in any order."""
    return ["of a helper" if step.split()[-1] in HELPERS else step for step in steps]


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.full)])
def test_all_plugins_records_survive_a_kill(tmp_path, processes, stride):
    """Each record has a step before and after it, so every 19th step alternates between both."""
    seen = []

    def wanted(step):
        seen.append(step)
        return around_create(step)

    job = job_of(tmp_path, load(), processes, together(), vms_per_node="1")
    killed = survive(job, wanted, part=slice(None, None, stride))
    steps = [step for step in seen if around_create(step)]
    assert unordered_helpers(killed) == unordered_helpers(steps[::stride])
    assert len(steps) == 2 * sum(step.startswith("before create ") for step in steps)
    kinds = {step.removeprefix("before create ") for step in steps}
    assert kinds >= {"domain", "netfilter", "linux-seed", "vfio", "shm"}
    declared = {c.item.kind for c in load().collect(hooks.vtorque_resources) if c.plugin in DEVICES}
    old = {"setting"}  # of earlier journals
    assert declared - kinds - old == {"vrdma-fence"}, (
        "no case acquires this kind of resource: add a case"
    )


def test_soft_roces_records_survive_a_kill(tmp_path, processes):
    job = job_of(tmp_path, load(["vrdma"]), processes, MORE["vrdma"], vms_per_node="1")
    steps = survive(job, lambda step: around_create(step) and step.endswith("vrdma-fence"))
    assert steps == ["before create vrdma-fence", "after create vrdma-fence"]


@pytest.mark.full
@pytest.mark.parametrize("name", DEVICES)
def test_records_of_each_plugin_survive_a_kill_without_other_plugins(name, tmp_path, processes):
    survive(job_of(tmp_path, load([name]), processes, CASES[name]))


@pytest.mark.full
def test_records_of_two_guests_survive_a_kill_at_every_step(tmp_path, processes):
    survive(job_of(tmp_path, load(), processes, together()), around_all)


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.full)])
def test_other_job_with_all_plugins_is_untouched_by_a_kill(tmp_path, processes, stride):
    """Also resources that both share on the node; not interrupts, which follow the load of both."""
    case = together()
    case = Case(case.pairs, {**case.settings, "iocm": {"interval": "60s"}})
    job = job_of(tmp_path, load(), processes, case, vms_per_node="1")
    before = job.observe()
    other = dataclasses.replace(job, job=dataclasses.replace(job.job, id="2"))
    assert not (run := other.start()).error, run
    assert survive(job, part=slice(None, None, stride))
    other.release()
    assert job.observe() == before


# -- The harness finds each defect -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Marks(Resource):
    """A plugin's device without a defect: two files."""

    kind = "acme-marks"
    path: str

    def create(self):
        Path(self.path).touch()
        Path(self.path + "+").touch()

    def release(self):
        Path(self.path).unlink(missing_ok=True)
        Path(self.path + "+").unlink(missing_ok=True)


class Forgets(Marks):
    """Leaves a file."""

    kind = "acme-forgets"

    def release(self):
        Path(self.path).unlink(missing_ok=True)


class Insists(Marks):
    """Cannot be released after half a create."""

    kind = "acme-insists"

    def release(self):
        Path(self.path).unlink()
        Path(self.path + "+").unlink()


class Spawns(Marks):
    """Leaves a process."""

    kind = "acme-spawns"

    def create(self):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)


class SharedMemoryCard(Marks):
    """Leaves shared memory."""

    kind = "acme-memory"

    def create(self):
        Path("/dev/shm", Path(self.path).name).touch()


class HiddenFiles(Marks):
    """Has files where no node looks, and does not release them."""

    kind = "acme-elsewhere"

    @property
    def place(self):
        return str(Path(self.path).parents[1] / "elsewhere" / Path(self.path).name)

    def create(self):
        Path(self.place).parent.mkdir(exist_ok=True)
        Path(self.place).write_text("x")

    def release(self):
        pass


class Cleans(HiddenFiles):
    """The same, without the defect."""

    kind = "acme-cleans"

    def release(self):
        Path(self.place).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Blind(Resource):
    """Names only a number."""

    kind = "acme-blind"
    number: str

    def create(self):
        pass

    def release(self):
        pass


class GuestResourcePlugin:
    """A plugin that acquires one resource for each guest."""

    def __init__(self, kind, top):
        self.kind, self.top = kind, top

    @hookimpl
    def vtorque_resources(self):
        yield self.kind

    @hookimpl
    def vtorque_pre_boot(self, job):
        for guest in job.guests:
            job.acquire(self.kind(str(self.top / "node" / guest.name)), guest=guest)


def of_acme(step):
    return around_create(step) and "acme" in step


def acme_job(tmp_path, processes, kind):
    plugins = load([])
    plugins.register("acme", GuestResourcePlugin(kind, tmp_path), "vtorque-acme 1")
    return job_of(tmp_path, plugins, processes, Case({}), vms_per_node="1")


@pytest.mark.parametrize("kind", [Marks, Cleans])
def test_sound_resource_passes(tmp_path, processes, kind):
    steps = survive(acme_job(tmp_path, processes, kind), of_acme)
    assert steps == [f"before create {kind.kind}", f"after create {kind.kind}"]


def test_record_without_a_visible_resource_is_reported(tmp_path, processes):
    class Numbers(GuestResourcePlugin):
        @hookimpl
        def vtorque_pre_boot(self, job):
            job.acquire(Blind("7"))

    plugins = load([])
    plugins.register("acme", Numbers(Blind, tmp_path), "vtorque-acme 1")
    job = job_of(tmp_path, plugins, processes, Case({}), vms_per_node="1")
    with pytest.raises(AssertionError, match=r"released: acme-blind \(number\): name what they"):
        survive(job, of_acme)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"path": "/opt/x", "n": 3}, [("path", "/opt/x")]),
        ({"path": "", "pid": 12}, [("process", "12")]),
        ({"card": "lo"}, [("link", "lo")]),
        ({"card": "0000:3b:00.0"}, [("path", "/sys/bus/pci/devices/0000:3b:00.0/driver")]),
        ({"mac": "52:54:00:aa:bb:cc"}, [("double", "52:54:00:aa:bb:cc")]),
        ({"table": "acme"}, [("double", "acme")]),
        ({"files": ("/a", "b", "/c")}, [("path", "/a"), ("path", "/c")]),
        ({"name": "acme", "size": 12}, []),
    ],
)
def test_paths_and_processes_named_by_a_record_are_found(fields, found):
    made = dataclasses.make_dataclass("Made", fields, bases=(Resource,), frozen=True)
    assert list(watched.named_objects(made(**fields))) == found


def test_state_of_a_watched_path_changes_with_its_content(tmp_path):
    file, link, directory = (tmp_path / name for name in ("file", "link", "directory"))
    assert watched.state("path", str(file)) is None
    file.write_text("1")
    link.symlink_to(file)
    directory.mkdir()
    before = [watched.state("path", str(each)) for each in (file, link, directory)]
    file.write_text("2")
    link.unlink()
    link.symlink_to(directory)
    (directory / "new").touch()
    after = [watched.state("path", str(each)) for each in (file, link, directory)]
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert watched.state("link", "lo")
    assert watched.state("process", str(os.getpid()))
    assert watched.state("process", "0") is None


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forgets, r"not killed: .*vt-1.0-n1-0\+"),
        (Insists, r"FileNotFoundError: .*vt-1.0-n1-0"),
        (Spawns, r"not killed: .*'processes': \(\[\], \['sleep 1000'\]\)"),
        (SharedMemoryCard, r"not killed: .*shm/vt-1.0-n1-0"),
        (HiddenFiles, r"not killed: .*'path .*elsewhere/vt-1.0-n1-0'"),
    ],
)
def test_defect_of_a_resource_is_found(tmp_path, kind, says):
    known = set(children())
    with orphans() as left:
        with pytest.raises(AssertionError, match=says):
            survive(acme_job(tmp_path, left, kind), of_acme)
        for pid in set(children()) - known:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not left())


def test_real_daemon_is_ended(tmp_path, processes):
    class Daemon(GuestResourcePlugin):
        @hookimpl
        def vtorque_pre_boot(self, job):
            for guest in job.guests:
                lock = str(guest.run_dir / "sleep.lock")
                job.acquire(DaemonProcess(("sleep", "1000"), lock), guest=guest)

    plugins = load([])
    plugins.register("acme", Daemon(Marks, tmp_path), "vtorque-acme 1")
    job = job_of(tmp_path, plugins, processes, Case({}), vms_per_node="1")
    assert not job.start().error
    assert [each for each in processes() if "_console" not in each] == ["sleep 1000"]
    job.release()
    assert processes() == []
    assert survive(job, lambda step: step.endswith("create process"))


def test_covered_directories_are_visible_only_to_processes_of_the_job(tmp_path, processes):
    node = device_cases.node(
        tmp_path / "node", load([]), Case({}), sysfs=lambda top: (top / "mark").mkdir(parents=True)
    )

    class Looks:
        @hookimpl
        def vtorque_pre_boot(self, job):
            assert [path.name for path in Path("/sys").iterdir()] == ["mark"]

    node.plugins.register("looks", Looks(), "vtorque-looks 1")
    assert not node.start(node.job({})).error
    node.release()
    assert Path("/sys/class").exists()


def test_error_of_another_type_is_shown_with_its_location():
    with pytest.raises(AssertionError, match=r"ZeroDivisionError"):
        run_in_child(lambda: 1 / 0)
