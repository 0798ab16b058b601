"""The node file of a PBS job as its guests see it: one line per process, in rank order. Public."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtorque_core.api.batch_system import PeerGuest
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile

DIRECTORY = "/var/spool/torque/aux"  # where Torque's nodes have it


def items(
    job_id: str, guests: Sequence[PeerGuest], directory: str = DIRECTORY
) -> Iterator[ContextItem]:
    """Yield the file, at the path it has on the host, and the variables that go with it."""
    path = f"{directory}/{job_id}"
    lines = "".join(f"{guest.hostname}\n" * guest.slots for guest in guests)
    yield GuestFile(path, lines.encode())
    yield EnvVar("PBS_NODEFILE", path)
    yield EnvVar("PBS_NUM_NODES", str(len(guests)))
    yield EnvVar("PBS_NUM_PPN", str(guests[0].slots))
    yield EnvVar("PBS_NP", str(sum(guest.slots for guest in guests)))
