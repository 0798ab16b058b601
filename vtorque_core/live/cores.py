"""Resize the exclusive cores of running guests.

Privileges: root.
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
    """A running guest with exclusive cores for a use.

    Attributes:
        job: job key, for :func:`resize`.
        guest: index on this node.
        least, most: range of the claim; 0 and 0: not resizable.
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
    """Return this node's guests with exclusive cores for a use. Raises JournalError."""
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
    """Change the number of a running guest's cores for a use (doc/plugins.md).

    Waits ``wait`` seconds for the job's lock. If the calling process was killed, repeat the call to
    repair the pinning.

    Raises FileNotFoundError if the job has ended, Busy if the lock is held, Refused if the guest
    has no such claim, HostFault if libvirt or the journal fails.
    """
    return ledger.resize(paths, job, guest, use, count, pin=_pin, wait=wait)


def _pin(state: JournalState, guest: int, use: str, now: Resized) -> None:
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
    nodes = {r.args.get("node") for r in state.leases if r.guest == guest}
    near = tuple(cpu for cpu in floating if set(machine.nodes_of((cpu,))) & nodes)
    return near or floating


def _domains(state: JournalState) -> dict[int, dict[str, str]]:
    return {
        r.guest: {key: str(value) for key, value in r.args.items()}
        for r in state.open
        if r.kind == "domain" and r.guest is not None
    }


def moved_bytes(uri: str, uuid: str) -> int | None:
    """Return the bytes that a guest's disks and NICs have transferred; None if it has ended.

    Raises HostFault.
    """
    ends = (".rd.bytes", ".wr.bytes", ".rx.bytes", ".tx.bytes")

    def work(domain: Any) -> int:
        # Block and interface, and do not wait for a job on the domain (virDomainStatsTypes).
        found = domain.connect().domainListGetStats([domain], 1 << 5 | 1 << 4, 1 << 29)
        return sum(value for name, value in found[0][1].items() if name.endswith(ends))

    return ask_qemu(uri, uuid, "I/O of a guest", work)
