"""Change the number of exclusive CPUs of running guests.

Privileges: root.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtorque_core.api.host_topology import Topology, parse_cpus
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import Refused
from vtorque_core.base.locks import job_lock, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.live import libvirt
from vtorque_core.plan.placement import node_hardware
from vtorque_core.plan.placement.ledger import CORE, SHARE, leased_resources
from vtorque_core.plan.placement.model import Leases
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import DOMAIN, JournalState, Record, lock_name, read, walk
from vtorque_core.resources.lease import Lease


@dataclass(frozen=True)
class GuestCores:
    """A running guest's exclusive CPUs of one kind of claim (``CoreClaim.use``).

    Attributes:
        job: job key, for :func:`resize`.
        guest: index on this node.
        cores: host CPU ids.
        least, most: allowed number of CPUs; 0 and 0: not resizable.
    """

    job: str
    guest: int
    name: str
    uuid: str
    uri: str
    cores: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class ResizeResult:
    """Result of a resize.

    ``cores``: host CPU ids after the resize. ``floating``: the job's CPUs for threads without
    exclusive CPUs.
    """

    cores: tuple[int, ...]
    floating: tuple[int, ...]


def guests_with_cores(paths: Paths, use: str) -> list[GuestCores]:
    """Return this node's guests with exclusive CPUs for the purpose ``use``.

    Raises JournalError.
    """
    found = []
    for state in walk(paths):
        for guest, domain in _domains(state).items():
            if mine := _leases(state, guest, use):
                names = domain["name"], domain["uuid"], domain["uri"]
                limits = (int(mine[0].args[key]) for key in ("least", "most"))
                found.append(GuestCores(state.key, guest, *names, _ids(mine), *limits))
    return found


def _leases(state: JournalState, guest: int | None, use: str) -> list[Record]:
    cores = (r for r in state.leases if r.args["pool"] == CORE)
    return [r for r in cores if r.guest == guest and r.args.get("use") == use]


def _ids(leases: Iterable[Record]) -> tuple[int, ...]:
    return tuple(int(record.args["item"]) for record in leases)


def resize(
    paths: Paths, job: str, guest: int, use: str, count: int, *, wait: float = 5.0
) -> ResizeResult:
    """Change the number of a guest's exclusive CPUs for the purpose ``use`` (doc/plugins.md).

    Waits ``wait`` seconds for the job's lock. If the calling process was killed, repeat the call to
    repair the pinning.

    Raises:
        FileNotFoundError: the job has ended.
        Busy: another process holds a lock.
        Refused: the number of CPUs is fixed.
        HostFault: pinning fails.
    """
    path = paths.journal / f"{job}.jsonl"
    with job_lock(paths, lock_name(path), wait), node_lock(paths), Journal.open(paths, path) as j:
        held = list(walk(paths))
        (state,) = (s for s in held if s.path == path)
        mine = _growable_leases(state, guest, use)
        new = _grow(state, mine, count, leased_resources([s for s in held if s.path != path]))
        if new:
            fields = {k: mine[0].args[k] for k in ("use", "least", "most", "cpus")}
            j.acquire_leases([(Lease(CORE, str(c), **fields), guest) for c in new], phase="run")
            state = read(path)
        least = int(mine[0].args["least"])
        fewer = [] if new else mine[max(count, least) :]
        left = set(_ids(fewer))
        now = tuple(core for core in (*_ids(mine), *new) if core not in left)
        resized = ResizeResult(now, tuple(sorted({*_floating(state)[0], *left})))
        _pin(state, guest, use, resized)
        for record in fewer:
            j.released(record.seq)
        return resized


def _grow(state: JournalState, mine: Sequence[Record], count: int, others: Leases) -> list[int]:
    most = int(mine[0].args["most"])
    floating, keep = _floating(state)
    busy = {cpu for cpu, jobs in others.shares.items() if jobs}
    room = [c for c in parse_cpus(str(mine[0].args["cpus"])) if c in floating and c not in busy]
    return room[: max(0, min(count, most) - len(mine))][: max(0, len(floating) - keep)]


def _growable_leases(state: JournalState, guest: int, use: str) -> list[Record]:
    mine = _leases(state, guest, use)
    if not mine or not mine[0].args["most"]:
        raise Refused(
            f"guest {guest} of job {state.header.job.id} has a fixed number of cores for the "
            f"purpose {use!r}"
        )
    return mine


def _floating(state: JournalState) -> tuple[tuple[int, ...], int]:
    own = {int(r.args["item"]) for r in state.leases if r.args["pool"] == CORE}
    for lease in state.leases:
        if lease.args["pool"] == SHARE:
            cpus = parse_cpus(str(lease.args["cpus"]))
            return tuple(c for c in cpus if c not in own), int(lease.args["least"])
    return (), 0


def _pin(state: JournalState, guest: int, use: str, now: ResizeResult) -> None:
    domains = _domains(state)
    uri = next(iter(domains.values()))["uri"] if domains else ""
    machine = node_hardware.topology(uri) if uri else Topology()
    for index, domain in domains.items():
        own = {r.args.get("use") for r in state.leases if r.guest == index} - {""}
        near = _near(state, index, now.floating, machine)
        count = 0 if "vcpu" in own else _vcpu_count(domain["uri"], domain["uuid"])
        vcpus = dict.fromkeys(range(count), near)
        threads: tuple[int, ...] = ()
        emulator = () if own & {"emulator", "io"} else near
        if index == guest and use == "io":
            threads = now.cores
            emulator = () if "emulator" in own else now.cores
        elif index == guest and use == "emulator":
            emulator = now.cores
        _pin_domain(domain["uri"], domain["uuid"], vcpus, emulator, threads)


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
        if r.kind == DOMAIN and r.guest is not None
    }


def _vcpu_count(uri: str, uuid: str) -> int:
    return int(hypervisor.on_domain(uri, uuid, "vCPUs", lambda d: d.info()[3]) or 0)


def _pin_domain(
    uri: str,
    uuid: str,
    vcpus: Mapping[int, tuple[int, ...]],
    emulator: tuple[int, ...],
    iothreads: tuple[int, ...],
) -> None:
    """Pin threads of a running guest, unless it has ended. Raises HostFault.

    An empty tuple leaves the pinning of a thread unchanged. ``iothreads``: CPUs of all I/O threads.
    """

    def work(domain: Any) -> None:
        # The call that can hang comes first, so that an abandoned call does not pin later.
        threads = domain.ioThreadInfo(0) if iothreads else ()
        if time.monotonic() > end:
            return
        named = {*emulator, *iothreads, *(c for s in vcpus.values() for c in s)}
        size = 1 + max(named, default=0)
        for number, cpus in vcpus.items():
            if cpus:
                domain.pinVcpu(number, _map(cpus, size))
        if emulator:
            domain.pinEmulator(_map(emulator, size), 0)
        for thread in threads:
            domain.pinIOThread(thread[0], _map(iothreads, size), 0)

    end = time.monotonic() + libvirt.ANSWER
    libvirt.ask_qemu(uri, uuid, "pin", work)


def _map(cpus: Collection[int], size: int) -> tuple[bool, ...]:
    return tuple(number in cpus for number in range(size))
