"""Node file of a PBS job inside guests: one line per process, in rank order. Public API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtorque_core.api.batch_system import BareNode, PeerGuest
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile

DIRECTORY = "/var/spool/torque/aux"  # as on Torque's nodes


def items(
    job_id: str,
    guests: Sequence[PeerGuest],
    directory: str = DIRECTORY,
    bare: Sequence[BareNode] = (),
) -> Iterator[ContextItem]:
    """Yield the node file, which has the same path as on the host, and variables such as PBS_NP.

    ``bare`` are the bare-metal nodes of a mixed request.
    """
    path = f"{directory}/{job_id}"
    places = [(guest.hostname, guest.slots) for guest in guests]
    places += [(node.name, node.slots) for node in bare]
    yield GuestFile(path, "".join(f"{name}\n" * slots for name, slots in places).encode())
    yield EnvVar("PBS_NODEFILE", path)
    yield EnvVar("PBS_NUM_NODES", str(len(places)))
    yield EnvVar("PBS_NUM_PPN", str(guests[0].slots))
    yield EnvVar("PBS_NP", str(sum(slots for _, slots in places)))
