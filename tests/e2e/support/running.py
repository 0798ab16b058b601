"""Where the threads and memory of a running guest are, as libvirt and the kernel have it."""

import subprocess
from pathlib import Path


def virsh(*argv):
    done = subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", *argv],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def domains(job):
    """Return the names of a job's running guests, by rank."""
    return sorted(name for name in virsh("list", "--name").split() if name.startswith(f"vt-{job}."))


def table(*argv):
    """Return the rows of a table that virsh prints, in words."""
    return [line.split() for line in virsh(*argv).splitlines() if line.strip()]


def pid(name):
    """Return the process id of a guest's QEMU."""
    return Path(f"/run/libvirt/qemu/{name}.pid").read_text().strip()


def threads(name):
    """Return thread name to its CPUs (proc(5), Cpus_allowed_list) of a guest's QEMU."""
    first = pid(name)
    found = {}
    for task in Path("/proc", first, "task").iterdir():
        fields = dict(
            line.split(":\t", 1)
            for line in (task / "status").read_text().splitlines()
            if ":\t" in line
        )
        found["emulator" if task.name == first else fields["Name"]] = fields["Cpus_allowed_list"]
    return found
