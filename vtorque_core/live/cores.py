"""Public, for a plugin's node-wide manager: change how many cores a running guest has for a use.

A manager is a process that a ``scope="node"`` resource starts: root, no plan, no site config. All
it needs stands in the journals. Only :func:`resize` changes leases and pins of running guests; the
other functions look.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from vtorque_core import host, ledger
from vtorque_core.api_topology import Topology
from vtorque_core.host import moved_bytes
from vtorque_core.journal import JournalState
from vtorque_core.ledger import Resized
from vtorque_core.names import Paths
from vtorque_core.usage import process_of

__all__ = [
    "GuestCores",
    "Paths",
    "Resized",
    "guests_with",
    "journal_events",
    "moved_bytes",
    "process_of",
    "resize",
    "topology",
]

_CHANGES = 0x2 | 0x100 | 0x200  # IN_MODIFY, IN_CREATE, IN_DELETE: inotify(7)


@dataclass(frozen=True)
class GuestCores:
    """A running guest with cores of its own for a use.

    Args:
        job: the job key, for :func:`resize`; ``guest``: index on this node.
        name, uuid, uri: its libvirt domain and where.
        cores: what it has; ``least``, ``most``: of its claim. 0 and 0: it cannot change.
    """

    job: str
    guest: int
    name: str
    uuid: str
    uri: str
    cores: tuple[int, ...]
    least: int
    most: int


def guests_with(paths: Paths, use: str) -> list[GuestCores]:
    """Return the guests on this node that have cores of their own for a use, running or starting.

    As root. Raises JournalError.
    """
    found = []
    for state in ledger.states(paths):
        for guest, domain in _domains(state).items():
            mine = [
                r.args
                for r in state.leases
                if r.guest == guest and r.args["pool"] == ledger.CORE and r.args.get("use") == use
            ]
            if mine:
                found.append(
                    GuestCores(
                        state.key,
                        guest,
                        domain["name"],
                        domain["uuid"],
                        domain["uri"],
                        tuple(int(args["item"]) for args in mine),
                        int(mine[0]["least"]),
                        int(mine[0]["most"]),
                    )
                )
    return found


def journal_events(paths: Paths) -> int:
    """Return a non-blocking descriptor that is readable when a journal has changed (inotify(7)).

    What is read from it says nothing but that; look again with :func:`guests_with`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if libc.inotify_add_watch(descriptor, os.fsencode(paths.journal), _CHANGES) < 0:
        raise OSError(ctypes.get_errno(), f"cannot watch {paths.journal}")
    return int(descriptor)


def topology(uri: str) -> Topology:
    """Return the node's topology. Raises HostFault."""
    return host.topology(uri)


def resize(
    paths: Paths, job: str, guest: int, use: str, count: int, *, wait: float = 5.0
) -> Resized:
    """Give a running guest more or fewer cores for a use, and pin all of the job's threads anew.

    As root. It comes as near to ``count`` as the claim and the job's free CPUs allow: look at the
    answer. CPUs are taken from the threads that share before they are given, and the other way
    round, so that no moment has two owners of a core. The count that it has already pins it anew:
    that mends what a killed manager has left. ``wait``: seconds for the job's lock, which its
    prologue and its epilogue hold.

    Raises FileNotFoundError if the job is gone, Busy (a HostFault) if its lock is taken, Refused
    if the guest has no such claim, HostFault.
    """
    return ledger.resize(paths, job, guest, use, count, pin=_pin, wait=wait)


def _pin(state: JournalState, guest: int, use: str, now: Resized) -> None:
    """Pin a guest's threads of one use, and of the job's guests all that share."""
    domains = _domains(state)
    uri = next(iter(domains.values()))["uri"] if domains else ""
    machine = host.topology(uri) if uri else Topology()
    for index, domain in domains.items():
        own = {r.args.get("use") for r in state.leases if r.guest == index} - {""}
        near = _near(state, index, now.floating, machine)
        vcpus = {} if "vcpu" in own else dict.fromkeys(range(_vcpus(domain)), near)
        threads: tuple[int, ...] = ()
        emulator = () if own & {"emulator", "io"} else near
        if index == guest and use == "io":
            threads = now.cores
            emulator = () if "emulator" in own else now.cores
        elif index == guest and use == "emulator":
            emulator = now.cores
        host.pin(domain["uri"], domain["uuid"], host.Pins(vcpus, emulator, threads))


def _near(
    state: JournalState, guest: int, floating: tuple[int, ...], machine: Topology
) -> tuple[int, ...]:
    """Return the shared CPUs on the NUMA nodes that have the guest's memory, else all of them."""
    nodes = {r.args.get("node") for r in state.leases if r.guest == guest}
    near = tuple(cpu for cpu in floating if set(machine.nodes_of((cpu,))) & nodes)
    return near or floating


def _vcpus(domain: dict[str, str]) -> int:
    return host.vcpus(domain["uri"], domain["uuid"])


def _domains(state: JournalState) -> dict[int, dict[str, str]]:
    """Return guest index to its domain's record, of those not yet ended."""
    return {
        r.guest: {key: str(value) for key, value in r.args.items()}
        for r in state.open
        if r.kind == "domain" and r.guest is not None
    }
