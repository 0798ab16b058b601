"""Read the node's hardware from libvirt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtorque_core.api.host_topology import Topology, flat
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.plan.placement.topology import parse, with_default_group

_SCHEMATA = Path("/sys/fs/resctrl/schemata")


def host_cpus(uri: str) -> tuple[int, ...]:
    def cpus(connection: Any) -> tuple[int, ...]:
        _count, online, _number = connection.getCPUMap()
        return tuple(number for number, on in enumerate(online) if on)

    return hypervisor.call(uri, "host CPUs", cpus)


def host_memory_mib(uri: str) -> int:
    return int(hypervisor.call(uri, "host memory", lambda c: c.getInfo()[1]))


def topology(uri: str) -> Topology:
    text = hypervisor.call(uri, "capabilities", lambda c: str(c.getCapabilities()))
    known = parse(text)
    if any(bank.granularity_kib for bank in known.caches):
        try:
            known = with_default_group(known, _SCHEMATA.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise HostFault(f"{_SCHEMATA} is unreadable: {error}") from None
    return known if known.nodes else flat(host_cpus(uri), host_memory_mib(uri))
