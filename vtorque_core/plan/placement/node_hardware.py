"""The node's hardware by libvirt, and the pinning of running guests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from vtorque_core.api.host_topology import Topology, flat
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.plan.placement.topology import parse, with_default_group

T = TypeVar("T")

_SCHEMATA = Path("/sys/fs/resctrl/schemata")
_ANSWER = 5.0  # seconds for what needs an answer of QEMU: a resize asks under the node's lock
_STUCK = 1000  # milliseconds after which a QEMU that still owes an answer is not asked again


def host_cpus(uri: str) -> tuple[int, ...]:
    def cpus(connection: Any) -> tuple[int, ...]:
        _count, online, _number = connection.getCPUMap()
        return tuple(number for number, on in enumerate(online) if on)

    return hypervisor.call(uri, "host CPUs", cpus)


def host_memory_mib(uri: str) -> int:
    return int(hypervisor.call(uri, "host memory", lambda c: c.getInfo()[1]))


def topology(uri: str) -> Topology:
    """Return the host's topology; flat if libvirt reports none. Raises HostFault."""
    text = hypervisor.call(uri, "capabilities", lambda c: str(c.getCapabilities()))
    known = parse(text)
    if any(bank.granularity_kib for bank in known.caches):
        try:
            known = with_default_group(known, _SCHEMATA.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise HostFault(f"{_SCHEMATA} is unreadable: {error}") from None
    return known if known.nodes else flat(host_cpus(uri), host_memory_mib(uri))


def security_models(uri: str) -> Mapping[str, str]:
    """Return libvirt's security models by name, with the label of an emulated guest's QEMU.

    The label of ``dac`` is ``+UID:+GID`` (https://libvirt.org/formatcaps.html, secmodel). Raises
    HostFault.
    """
    text = hypervisor.call(uri, "capabilities", lambda c: str(c.getCapabilities()))
    return {
        model.findtext("model", ""): model.findtext("baselabel[@type='qemu']", "")
        for model in ElementTree.fromstring(text).findall("host/secmodel")  # noqa: S314 - libvirt's
    }


def vcpu_count(uri: str, uuid: str) -> int:
    return int(hypervisor.on_domain(uri, uuid, "vCPUs", lambda d: d.info()[3]) or 0)


def pin(
    uri: str,
    uuid: str,
    vcpus: Mapping[int, tuple[int, ...]],
    emulator: tuple[int, ...],
    iothreads: tuple[int, ...],
) -> bool:
    """Pin threads of a running guest (``virsh vcpupin``, ...); return False if it has ended.

    ``vcpus`` maps vCPU numbers to CPUs; ``iothreads`` are the CPUs of all I/O threads. Threads
    without CPUs are not changed. Raises HostFault.
    """

    def work(domain: Any) -> bool:
        # First what may take for ever: nothing old is pinned by a call that nobody waits for.
        threads = domain.ioThreadInfo(0) if iothreads else ()
        if time.monotonic() > end:
            return False
        named = {*emulator, *iothreads, *(c for s in vcpus.values() for c in s)}
        size = 1 + max(named, default=0)
        for number, cpus in vcpus.items():
            if cpus:
                domain.pinVcpu(number, _map(cpus, size))
        if emulator:
            domain.pinEmulator(_map(emulator, size), 0)
        for thread in threads:
            domain.pinIOThread(thread[0], _map(iothreads, size), 0)
        return True

    end = time.monotonic() + _ANSWER
    return ask_qemu(uri, uuid, "pin", work) or False


def ask_qemu(uri: str, uuid: str, what: str, work: Callable[[Any], T]) -> T | None:
    """Return ``work(domain)``, or None if it has ended. Raises HostFault soon if QEMU hangs.

    Otherwise libvirt would wait forever, and each later call 30 s. QEMU hangs when guest root makes
    it wait for a daemon that the user has stopped.
    """

    def unless_stuck(domain: Any) -> tuple[T] | tuple[()]:
        state, _details, waiting = domain.controlInfo(0)  # state 0: no call waits for QEMU
        return () if state and waiting > _STUCK else (work(domain),)

    found = hypervisor.on_domain(uri, uuid, what, unless_stuck, _ANSWER)
    if found is None:
        return None
    if not found:
        raise HostFault(f"{what}: QEMU does not answer libvirt", stage=hypervisor.STAGE)
    return found[0]


def _map(cpus: Collection[int], size: int) -> tuple[bool, ...]:
    return tuple(number in cpus for number in range(size))
