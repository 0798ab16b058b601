"""Jobs that run until a test ends them, and the placement of their guests."""

import subprocess
from pathlib import Path

import pytest

from thread_statuses import thread_statuses
from vtorque_core.plan.placement import node_hardware
from vtorque_core.plan.placement.model import NodeShare

WAIT = "#!/bin/sh\ntouch started\nwhile [ ! -e go ]; do sleep 0.1; done\n"


def virsh(*argv):
    done = subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", *argv],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"virsh {' '.join(argv)}: {done.stderr}"
    return done.stdout


def domains(job):
    """Return the names of a job's running guests, by rank."""
    return sorted(name for name in virsh("list", "--name").split() if name.startswith(f"vt-{job}."))


def table(*argv):
    """Return the rows of a table of virsh, in words."""
    return [line.split() for line in virsh(*argv).splitlines() if line.strip()]


def pid(name):
    """Return the process id of a guest's QEMU."""
    return Path(f"/run/libvirt/qemu/{name}.pid").read_text().strip()


def threads(name):
    """Return thread name to its CPUs (proc(5), Cpus_allowed_list) of a guest's QEMU."""
    first = pid(name)
    return {
        "emulator" if tid == first else " ".join(has["Name"]): has["Cpus_allowed_list"][0]
        for tid, has in thread_statuses(first).items()
    }


def started(node, *args):
    """Submit a job that runs until :func:`end`; return its id when it runs."""
    for name in ("started", "go"):  # of an earlier test: this job would end at once
        (node.home / name).unlink(missing_ok=True)
    job = node.submit(WAIT, *args)
    node.wait_for((node.home / "started").exists, what="the script's start")
    return job


def end(node, job):
    """End a job that :func:`started` has started."""
    (node.home / "go").touch()
    node.wait_for(lambda: node.state_of(job) in (None, "C"), what="the job's end")


def beside_another(node, other, text, *args, timeout):
    """Run a job beside another job of the same user; return its code, output and errors.

    ``other`` is run by the other job before it waits for the end of this one; ``text`` returns the
    script of this job for the address of the other's guest.
    """
    address, stop = node.home / "address", node.home / "stop"
    job = node.submit(
        f"#!/bin/bash\nhostname -I | cut -d' ' -f1 >address\n{other}"
        "while [ ! -e stop ]; do sleep 0.2; done\n",
        *args,
    )
    node.wait_for(lambda: address.exists() and address.read_text(), 300, "the other job's start")
    try:
        done = node.as_user(
            "vsub", "-W", "block=true", "-N", "u", "-o", "out2", "-e", "err2", *args,
            node.script(text(address.read_text().strip()), "other.sh"),
            check=False, timeout=timeout,
        )  # fmt: skip
    finally:
        stop.touch()
        node.wait_for(lambda: node.state_of(job) in (None, "C"), what="the other job's end")
    for path in (address, stop):
        path.unlink()
    return done.returncode, *((node.home / name).read_text() for name in ("out2", "err2"))


def runs_without(guest, config, plugin, pair):
    """Check that a job runs without what the node lacks, if the site allows that."""
    config(f"plugin.{plugin}", "required = false")
    result = guest.job("#!/bin/sh\necho ran\n", "-vm", f"{pair},ram=128M")
    assert (result.code, result.out) == (0, b"ran\n")
    assert f"runs without {pair}: node ".encode() in result.err


def two_cpus(uri="qemu:///system"):
    """Return the first two CPUs of this machine as a job's share of it."""
    machine = node_hardware.topology(uri)
    if len(machine.cpus) < 2:
        pytest.fail("this test needs two CPUs")
    return NodeShare(machine, cpus=machine.cpus[:2])
