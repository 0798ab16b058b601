"""What guests see of Slurm: the job's variables with guests for nodes, ``srun``, and refusals."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Sequence

from vtorque_core.api.batch_system import BatchJob, PeerGuest
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile
from vtorque_slurm import hostlist

BIN = "/usr/bin"
"""On every PATH. What an image has there of Slurm could do nothing from inside."""

GUESTS = "/etc/vtorque/slurm/guests"
"""One line per guest, by rank: host name and CPUs. What ``srun`` reads inside."""

REFUSED = (
    "sacct", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sinfo", "squeue",
    "sstat",
)  # fmt: skip


def items(job: BatchJob, guests: Sequence[PeerGuest]) -> Iterator[ContextItem]:
    """Yield variables and programs; the variables' meaning: sbatch(1), OUTPUT ENVIRONMENT."""
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
    lines = "".join(f"{guest.hostname} {guest.slots}\n" for guest in guests)
    yield GuestFile(GUESTS, lines.encode())
    yield GuestFile(f"{BIN}/srun", program("srun"), mode=0o755)
    for name in REFUSED:
        yield GuestFile(f"{BIN}/{name}", program("refuse"), mode=0o755)


def program(name: str) -> bytes:
    """Return one of the POSIX sh programs for guests."""
    return (importlib.resources.files("vtorque_slurm") / "guest" / name).read_bytes()
