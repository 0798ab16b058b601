"""Slurm's variables, srun and scontrol for guests. Slurm's other commands only print an error."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence

from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile
from vtorque_slurm import hostlist

BIN = "/usr/bin"
"""Directory for the commands, on every PATH. They replace an image's own Slurm commands."""

GUESTS = "/etc/vtorque/slurm/guests"
"""Input of ``srun``: a line per guest by rank (host name, CPUs, component), then bare nodes."""

HOSTS = "/etc/vtorque/slurm/hosts"
"""Host file of a heterogeneous job: one line per process, in rank order."""

REFUSED = (
    "sacct", "salloc", "sattach", "sbatch", "sbcast", "scancel", "sinfo", "squeue", "sstat",
)  # fmt: skip


def items(job: BatchJob, guests: Sequence[PeerGuest]) -> Iterator[ContextItem]:
    """Yield the variables (sbatch(1), OUTPUT ENVIRONMENT), files and programs for guests."""
    names = ",".join(guest.hostname for guest in guests)
    slots = hostlist.show_counts([guest.slots for guest in guests])
    variables = {
        "SLURM_JOB_ID": job.id,
        "SLURM_JOBID": job.id,
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(guests)),
        "SLURM_NNODES": str(len(guests)),
        "SLURM_TASKS_PER_NODE": slots,
        "SLURM_JOB_CPUS_PER_NODE": slots,
        "SLURM_CPUS_ON_NODE": str(guests[0].slots),
    }
    for name, value in variables.items():
        yield EnvVar(name, value)
    yield EnvVar("SLURM_MEM_PER_NODE", str(guests[0].mib), unless=("SLURM_MEM_PER_CPU",))
    places = [(guest.hostname, guest.slots, 0) for guest in guests]
    places += [(node.name, node.slots, node.part) for node in job.bare]
    lines = "".join(f"{name} {slots} {component}\n" for name, slots, component in places)
    yield GuestFile(GUESTS, lines.encode())
    if job.bare:
        each = "".join(f"{name}\n" * slots for name, slots, _ in places)
        yield GuestFile(HOSTS, each.encode())
        yield EnvVar("VTORQUE_HOSTFILE", HOSTS)
    for name in ("srun", "scontrol"):
        yield GuestFile(f"{BIN}/{name}", program(name), mode=0o755)
    for name in REFUSED:
        yield GuestFile(f"{BIN}/{name}", program("refuse"), mode=0o755)


def tasks(environ: Mapping[str, str], guests: Mapping[str, str]) -> dict[str, str]:
    """Return Slurm's variables for tasks and memory per CPU, with the values for guests.

    As with ``srun`` in guests, each guest gets one task, and the remaining tasks fill the guests
    in order. Without ``-n``, the tasks use all CPUs. Variables unset on the host stay unset,
    except SLURM_TASKS_PER_NODE, which mpirun needs.

    Args:
        environ: The job's environment on the host.
        guests: The variables from :func:`items`.
    """
    cpus = hostlist.counts(guests["SLURM_JOB_CPUS_PER_NODE"])
    each = min(_number(environ, "SLURM_CPUS_PER_TASK") or 1, *cpus)
    most = _number(environ, "SLURM_NTASKS_PER_NODE") or max(cpus)
    rooms = [min(most, count // each) for count in cpus]
    wanted = _number(environ, "SLURM_NTASKS")
    total = min(max(wanted or sum(rooms), len(cpus)), sum(rooms))
    on, left = [], total
    for behind, room in zip(reversed(range(len(rooms))), rooms, strict=True):
        on.append(min(room, left - behind))
        left -= on[-1]
    mib = int(guests["SLURM_MEM_PER_NODE"])
    found = {
        "SLURM_NTASKS": str(total),
        "SLURM_NPROCS": str(total),
        "SLURM_NTASKS_PER_NODE": str(max(on)),
        "SLURM_CPUS_PER_TASK": str(each),
        "SLURM_MEM_PER_CPU": str(max(1, mib // cpus[0])),
    }
    found = {name: value for name, value in found.items() if name in environ}
    found["SLURM_TASKS_PER_NODE"] = hostlist.show_counts(on)
    # Slurm sets these for the first component of a heterogeneous job; they name host nodes.
    again = {
        f"{name}_{kind}_GROUP_0": value
        for name, value in {**guests, **found}.items()
        for kind in ("HET", "PACK")
    }
    return found | {name: value for name, value in again.items() if name in environ}


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def program(name: str) -> bytes:
    """Return the POSIX sh program of this name for guests."""
    return (importlib.resources.files("vtorque_slurm") / "guest" / name).read_bytes()
