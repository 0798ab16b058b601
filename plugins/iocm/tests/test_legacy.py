"""The dynamic-io-manager, against a double of it and of its kernel's sysfs."""

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import dynamic_io_manager_double as double
from patience import eventually
from processes import alive
from vtorque_core.api import ConfigError, HostFault, JobAttempt, Paths
from vtorque_core.api.daemon_process import Process
from vtorque_core.api.job_files import File
from vtorque_core.base.locks import lock_holder
from vtorque_core.node.end.teardown import teardown
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_iocm import legacy, node
from vtorque_testing.planned import with_core


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Make /sys/class/vhost of a patched kernel, with two devices."""
    vhost = tmp_path / "sys/class/vhost"
    for name in ("dev/d.1", "dev/d.7", "worker/w.1", "vq"):
        (vhost / name).mkdir(parents=True)
    monkeypatch.setattr(legacy, "VHOST", vhost)
    return vhost


@pytest.fixture
def source(tmp_path, kernel):
    """Install the double."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "vhost").write_text(str(kernel))
    for name in ("io_manager.py", "reconfigure.py"):
        (source / name).write_text(Path(double.__file__).read_text())
    return source


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job with two guests whose QEMU is this process, in a real journal."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    guests = []
    for index, (io, vcpu) in enumerate([((0,), (4, 5, 6)), ((1,), (4, 5, 6))]):
        run_dir = tmp_path / f"g{index}"
        run_dir.mkdir(mode=0o700)
        at = SimpleNamespace(cores={"io": io, "vcpu": vcpu}, share=(), own={"io"})
        guests.append(SimpleNamespace(name=f"g{index}", uuid="u", run_dir=run_dir, placement=at))
    monkeypatch.setattr(legacy, "process_of", lambda *_: Path("/proc", str(os.getpid())))
    header = JobHeader(JobAttempt("1", 0, "u", 1000), "local", {"iocm": "vtorque-iocm 1"})
    journal = Journal.start(paths, header)
    acquired = []

    def acquire(resource, guest=None, needs=()):
        acquired.append(resource)
        return journal.acquire(resource, plugin="iocm", phase="post-boot", needs=needs)

    yield SimpleNamespace(
        guests=guests, acquire=acquire, acquired=acquired, path=journal.path, paths=paths
    )
    journal.close()
    release(SimpleNamespace(path=journal.path, paths=paths))


def workers(kernel):
    return {d.name: (d / "worker").read_text() for d in (kernel / "dev").iterdir()}


def release(job):
    plugins = with_core("iocm", node)
    assert teardown(job.path, job.paths, plugins).clean


def start(job, source):
    legacy.start(job, "/usr/bin/python3", str(source), (1, 3), ())
    file, process = job.acquired
    assert (type(file), type(process)) == (File, Process)
    with Path(process.lock).open("rb+") as lock:
        pid = lock_holder(lock.fileno())
    assert pid is not None
    return pid


def test_there_is_such_a_kernel_only_with_shared_workers(kernel):
    assert legacy.there()
    (kernel / "worker/w.1").rmdir()
    (kernel / "worker").rmdir()
    assert not legacy.there()


@pytest.mark.parametrize("stubborn", [False, True])
def test_it_is_configured_started_and_really_stopped(job, kernel, source, stubborn, monkeypatch):
    if stubborn:
        (source / "stubborn").touch()
        monkeypatch.setattr(legacy, "Process", functools.partial(Process, grace=0.2))
    pid = start(job, source)
    eventually(lambda: set(workers(kernel).values()) == {"w.1"})
    assert workers(kernel) == {"d.1": "w.1", "d.7": "w.1"}  # both guests on one worker
    assert alive(pid)
    release(job)
    eventually(lambda: not alive(pid))
    assert not job.path.exists()
    assert list(job.guests[0].run_dir.iterdir()) == []
    assert not Path("/tmp/io_manager_pid.txt").exists()


def test_its_config_is_that_of_its_own_generator(job):
    text = legacy.config([0, 1, 4, 5, 6], [11, 12], ["d.1", "d.7"], (1, 3), ["eth0", 'e"1'])
    conf = json.loads(text)
    assert conf["io_cores_restrictions"] == {"min": 1, "max": 3}
    assert conf["vms"][1] == {
        "id": "2", "pid": "12", "cpu": "0,1,4,5,6",
        "devices": [{"id": "d.7", "vhost_worker": "w.2"}],
    }  # fmt: skip
    keys = (
        "throughput_policy", "io_cores_balance_policy", "vms_balance_policy",
        "backing_devices_balance_policy",
    )  # fmt: skip
    ids = [[c["id"][-1] for c in conf[key]["configurations"]] for key in keys]
    assert ids == [
        ["0", "1", "2", "3"],
        ["1", "2", "3"],
        ["0", "1", "2", "3"],
        ["0", "1", "2", "3"],
    ]
    vms = {c["id"]: (c["cores"], c["vms"][0]["cpu"]) for c in conf[keys[2]]["configurations"]}
    assert vms["elvis-2"] == ("3", "4,5,6")
    two = conf[keys[1]]["configurations"][1]
    assert [vm["vhost_worker"] for vm in two["vms"]] == ["w.1", "w.2"]
    assert two["vhost_workers"] == [{"id": "w.1"}, {"id": "w.2"}]
    assert conf["backing_devices"][1]["interrupts"] == [{"irq_prefix": 'e"1'}]
    assert [d["cpu"] for d in conf[keys[3]]["configurations"][1]["backing_devices"]] == ["0", "0"]
    ratios = [(c["add_ratio"], c["can_remove_ratio"]) for c in conf[keys[0]]["configurations"]]
    assert ratios == [(0.5, 0.0), (0.12, 0.8), (0.12, 0.8), (0.12, 1.0)]


def test_it_leaves_a_cpu_to_the_guests():
    conf = json.loads(legacy.config([2, 3], [11], ["d.1"], (1, 4), []))
    assert conf["io_cores_restrictions"] == {"min": 1, "max": 1}
    assert conf["vms_balance_policy"]["configurations"][-1]["vms"][0]["cpu"] == "3"


def test_other_guests_on_the_node_are_a_fault_that_says_so(job, kernel, source):
    (kernel / "dev/d.9").mkdir()
    with pytest.raises(HostFault, match=r"3 vhost devices for 2 guests: .*no other guests on the"):
        start(job, source)
    assert job.acquired == []


def test_what_it_says_when_it_cannot_start_is_told(job, source):
    (source / "reconfigure.py").write_text("import sys; sys.exit('no module stats')")
    with pytest.raises(HostFault, match="no module stats"):
        start(job, source)
    release(job)
    assert list(job.guests[0].run_dir.iterdir()) == []


@pytest.mark.parametrize("name", ["", "io_manager.py", "reconfigure.py", "lib/stats.py"])
def test_what_others_can_write_root_does_not_run(job, source, name):
    (source / "lib").mkdir()
    (source / "lib/stats.py").touch()
    source.chmod(0o755)
    (source / name).chmod(0o777)
    with pytest.raises(ConfigError, match=f"{source / name}: can be written by others than root"):
        start(job, source)
    assert job.acquired == []


def test_an_interpreter_of_others_root_does_not_run(job, source, tmp_path):
    mine = tmp_path / "python2"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o777)
    with pytest.raises(ConfigError, match="python2: can be written by others"):
        legacy.start(job, str(mine), str(source), (1, 3), ())
    assert job.acquired == []


def test_guests_without_cores_of_their_own_for_vcpus_use_the_share():
    host = SimpleNamespace(cpus=(0, 1, 2))
    at = SimpleNamespace(cores={"io": (1,), "vcpu": ()}, share=())
    assert legacy._cpus(SimpleNamespace(placement=at, host=host)) == {0, 1, 2}
    at.share = (1, 2)
    assert legacy._cpus(SimpleNamespace(placement=at, host=host)) == {1, 2}
