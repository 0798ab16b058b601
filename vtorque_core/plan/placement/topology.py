"""Parse the topology in libvirt's capabilities (https://libvirt.org/formatcaps.html)."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from vtorque_core.api.host_topology import CacheBank, NumaNode, Topology, parse_cpus
from vtorque_core.base.errors import HostFault

_KIB = {"B": 1 / 1024, "KiB": 1, "MiB": 1024, "GiB": 1024 * 1024}


def parse(xml: str) -> Topology:
    try:
        host = ElementTree.fromstring(xml).find("host")  # noqa: S314 - from libvirt
        if host is None:
            return Topology()
        cells = host.findall("topology/cells/cell")
        nodes = tuple(_node(cell) for cell in cells)
        # libvirt gives a memory controller the id of its last-level cache (level 3).
        memory = {n.attrib["id"]: n for n in host.findall("memory_bandwidth/node")}
        banks = tuple(
            _bank(bank, memory.get(bank.attrib["id"]) if bank.get("level") == "3" else None)
            for bank in host.findall("cache/bank")
        )
        return Topology(tuple(n for n in nodes if n.cpus or n.mem_mib), _cores(cells), banks)
    except (ElementTree.ParseError, KeyError, ValueError, TypeError) as error:
        raise HostFault(
            f"libvirt's capabilities cannot be read ({error!r}): run virsh capabilities",
            stage="libvirt",
        ) from None


def with_default_group(known: Topology, schemata: str) -> Topology:
    """Return the topology with each cache's number of ways in resctrl's default group (``kept``).

    ``schemata`` is /sys/fs/resctrl/schemata, with lines such as ``L3:0=fff;1=fff``
    (arch/x86/resctrl.rst of the kernel).
    """
    kept: dict[tuple[int, int], int] = {}
    for name, _, masks in (line.strip().partition(":") for line in schemata.splitlines()):
        if re.fullmatch(r"L[0-9]", name):  # L3CODE and L3DATA cannot be requested
            pairs = (mask.partition("=") for mask in masks.split(";"))
            kept |= {(int(name[1]), int(i)): int(mask, 16).bit_count() for i, _, mask in pairs}
    banks = (replace(b, kept=max(1, kept.get((b.level, b.id), 1))) for b in known.caches)
    return replace(known, caches=tuple(banks))


def _node(cell: ElementTree.Element) -> NumaNode:
    sizes = {int(p.attrib["size"]): int(p.text or 0) for p in cell.findall("pages")}
    memory = cell.find("memory")
    kib = 0 if memory is None else int(int(memory.text or 0) * _KIB[memory.get("unit", "KiB")])
    if sizes:  # the smallest are ordinary pages; their count excludes huge pages
        small = min(sizes)
        kib = sizes.pop(small) * small
    return NumaNode(
        id=int(cell.attrib["id"]),
        cpus=tuple(sorted(int(cpu.attrib["id"]) for cpu in _online(cell))),
        mem_mib=kib // 1024,
        pages={size: number for size, number in sizes.items() if number},
    )


def _online(cell: ElementTree.Element) -> list[ElementTree.Element]:
    cpus = cell.findall("cpus/cpu")
    return [cpu for cpu in cpus if cpu.get("siblings")] or cpus


def _cores(cells: list[ElementTree.Element]) -> tuple[tuple[int, ...], ...]:
    online = {int(cpu.attrib["id"]): cpu for cell in cells for cpu in _online(cell)}
    groups = {
        tuple(c for c in parse_cpus(cpu.get("siblings") or str(number)) if c in online)
        for number, cpu in online.items()
    }
    return tuple(sorted(groups))


def _bank(bank: ElementTree.Element, memory: ElementTree.Element | None) -> CacheBank:
    # With CDP, libvirt lists code and data separately; only "both" can be requested.
    controls = [c for c in bank.findall("control") if c.get("type") == "both"]
    step = least = most = 0
    for control in controls[:1]:
        unit = _KIB[control.get("unit", "KiB")]
        step = int(int(control.attrib["granularity"]) * unit)
        least = int(int(control.get("min", control.attrib["granularity"])) * unit)
        most = int(control.attrib["maxAllocs"])
    limit = None if memory is None else memory.find("control")
    share = 0 if limit is None else int(limit.attrib["granularity"])
    return CacheBank(
        id=int(bank.attrib["id"]),
        level=int(bank.attrib["level"]),
        kib=int(int(bank.attrib["size"]) * _KIB[bank.get("unit", "KiB")]),
        cpus=parse_cpus(bank.attrib["cpus"]),
        granularity_kib=step,
        least_kib=least,
        most=most,
        bandwidth_step=share,
        bandwidth_least=0 if limit is None else int(limit.get("min", share)),
    )
