"""A thousand jobs, one after the other, in a real libvirt's test driver: no resource accumulates.

All run in one process, unlike real hooks, so that a leak of memory, descriptors or threads in the
start and the teardown shows. Every plugin is installed and every device requested.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import device_cases
import flatness
from patience import eventually
from vtorque_core.base import hypervisor
from vtorque_testing.faults import orphans, run_in_child

pytestmark = pytest.mark.integration

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@pytest.fixture
def libvirtd():
    """Start a user's libvirtd; yield its pid and the URI of its test driver.

    As root it runs as the user nobody, apart from the system's. A connection is kept open, since
    the driver forgets its domains with the last one (https://libvirt.org/drvtest.html).
    """
    top = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))  # short: a socket's path has 107 bytes
    root = os.geteuid() == 0
    ids = {"user": 65534, "group": 65534, "extra_groups": ()} if root else {}
    names = ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    for name in names:
        (top / name).mkdir(mode=0o700)
    for path in (top, *top.iterdir()):
        shutil.chown(path, *((65534, 65534) if root else (os.getuid(), os.getgid())))
    system = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(top)}
    closed = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    daemon = subprocess.Popen(
        ["libvirtd"], cwd="/", env={**system, **{n: str(top / n) for n in names}}, **ids, **closed
    )
    socket = top / "XDG_RUNTIME_DIR/libvirt/libvirt-sock"
    uri = f"test+unix:///default?socket={socket}"
    try:
        eventually(lambda: domains(uri) == ["test"])
        stays = subprocess.Popen(["virsh", "-c", uri, "event", "--all", "--loop"], **closed)
        try:
            yield daemon.pid, uri
        finally:
            stays.terminate()
            stays.wait(30)
    finally:
        daemon.terminate()
        daemon.wait(30)
        shutil.rmtree(top)


def domains(uri):
    argv = ["virsh", "-q", "-c", uri, "list", "--all", "--name"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    return done.stdout.split()


def cpu():
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def reference():
    """Return the CPU seconds of a fixed amount of work, which also depend on the machine's load."""
    used = cpu()
    for _ in range(10):
        json.loads(json.dumps(list(range(20_000))))
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    return cpu() - used


def reap():
    """Reap ended daemons, as init does. Thousands of zombies would slow each search of /proc."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(node, pairs, libvirtd, count, answer):
    """Record the cost of each life cycle and the state after it; no results are retained."""
    gc.enable()  # the harness has disabled it, for short processes
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with node.install_doubles():
        for number in range(1, count + 1):
            job = dataclasses.replace(node.job(pairs), id=str(number))
            before = reference()
            begun, used = time.monotonic(), cpu()
            node.begin(job)
            node.finish(job.id)
            reap()
            ctypes.CDLL(None).malloc_trim(0)  # free memory is no leak
            took = {"seconds": time.monotonic() - begun, "cpu": cpu() - used}
            took["cpu"] /= before + reference()
            took |= {f"own {k}": v for k, v in flatness.process().items()}
            took |= {f"libvirtd {k}": v for k, v in flatness.process(libvirtd).items()}
            with answer.open("a") as file:
                file.write(f"{json.dumps(took)}\n")
    hypervisor.close()


@pytest.mark.full
@pytest.mark.parametrize("count", [1000])
def test_thousand_life_cycles_leak_nothing(libvirtd, tmp_path, count):
    pid, uri = libvirtd
    case = device_cases.together()
    case = device_cases.Case(case.pairs, {**case.settings, "iocm": {"interval": "5s"}})
    tables = {"node": {"libvirt_uri": uri}}
    node = device_cases.node(tmp_path / "node", device_cases.load(), case, tables=tables)
    pairs = {**case.pairs, "vcpus": "2"}
    answer = tmp_path / "rows"
    with orphans() as left:
        first = node.observe()
        done = run_in_child(lambda: run(node, pairs, pid, count + count // 10, answer))
        assert not done.error, done
        eventually(lambda: not left())
    assert node.observe() == first
    assert domains(uri) == ["test"]
    rows = [json.loads(line) for line in answer.read_text().splitlines()]
    assert len(rows) == count + count // 10
    rows = rows[count // 10 :]  # libvirtd's threads and the process's caches are warm by now
    if count >= 100:
        told = {key: [round(x, 3) for x in pair] for key, pair in flatness.tenths(rows).items()}
        if path := os.environ.get("VTORQUE_FLATNESS"):
            Path(path).write_text(json.dumps(told, indent=1))
        for row in rows:
            row.pop("seconds")  # the machine is not idle
        assert not flatness.rising(rows), told
