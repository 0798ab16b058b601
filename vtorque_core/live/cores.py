"""Public, for a plugin's node-wide manager: change how many cores a running guest has for a use.

A manager is a process that a ``scope="node"`` resource starts: root, no plan, no site config. All
it needs stands in the journals. Only :func:`resize` changes leases and pins of running guests; the
other functions look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtorque_core.api.host_topology import Topology
from vtorque_core.base.names import Paths
from vtorque_core.plan.placement import ledger, node_hardware
from vtorque_core.plan.placement.ledger import Resized
from vtorque_core.plan.placement.node_hardware import ask_qemu
from vtorque_core.records.reading import JournalState, walk


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
    for state in walk(paths):
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
    machine = node_hardware.topology(uri) if uri else Topology()
    for index, domain in domains.items():
        own = {r.args.get("use") for r in state.leases if r.guest == index} - {""}
        near = _near(state, index, now.floating, machine)
        count = 0 if "vcpu" in own else node_hardware.vcpu_count(domain["uri"], domain["uuid"])
        vcpus = dict.fromkeys(range(count), near)
        threads: tuple[int, ...] = ()
        emulator = () if own & {"emulator", "io"} else near
        if index == guest and use == "io":
            threads = now.cores
            emulator = () if "emulator" in own else now.cores
        elif index == guest and use == "emulator":
            emulator = now.cores
        node_hardware.pin(domain["uri"], domain["uuid"], vcpus, emulator, threads)


def _near(
    state: JournalState, guest: int, floating: tuple[int, ...], machine: Topology
) -> tuple[int, ...]:
    """Return the shared CPUs on the NUMA nodes that have the guest's memory, else all of them."""
    nodes = {r.args.get("node") for r in state.leases if r.guest == guest}
    near = tuple(cpu for cpu in floating if set(machine.nodes_of((cpu,))) & nodes)
    return near or floating


def _domains(state: JournalState) -> dict[int, dict[str, str]]:
    """Return guest index to its domain's record, of those not yet ended."""
    return {
        r.guest: {key: str(value) for key, value in r.args.items()}
        for r in state.open
        if r.kind == "domain" and r.guest is not None
    }


def moved_bytes(uri: str, uuid: str) -> int | None:
    """Return how many bytes a guest's disks and NICs have moved, None if it is gone.

    As ``virsh domstats --block --interface`` has them. Raises HostFault.
    """
    ends = (".rd.bytes", ".wr.bytes", ".rx.bytes", ".tx.bytes")

    def work(domain: Any) -> int:
        # Block and interface, and do not wait for a job on the domain (virDomainStatsTypes).
        found = domain.connect().domainListGetStats([domain], 1 << 5 | 1 << 4, 1 << 29)
        return sum(value for name, value in found[0][1].items() if name.endswith(ends))

    return ask_qemu(uri, uuid, "I/O of a guest", work)
