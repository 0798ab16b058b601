"""A node's processors, memory and caches (``guest.host``).

Source: libvirt's capabilities (https://libvirt.org/formatcaps.html).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node.

    Attributes:
        cpus: online logical CPUs, ascending.
        mem_mib: MiB of memory outside reserved huge pages.
        pages: number of reserved huge pages, used or not, by size in KiB.
    """

    id: int
    cpus: tuple[int, ...]
    mem_mib: int
    pages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheBank:
    """One cache that several CPUs share, and how resctrl can partition it.

    Attributes:
        granularity_kib: size of one way, the unit of allocation; 0: not partitionable.
        least_kib: minimum size of an allocation.
        most: maximum number of allocations, including resctrl's default group.
        bandwidth_step: step of the memory bandwidth limit in percent.
        bandwidth_least: minimum of the memory bandwidth limit in percent.
        kept: number of ways that remain in resctrl's default group, at least 1.
    """

    id: int
    level: int
    kib: int
    cpus: tuple[int, ...]
    granularity_kib: int = 0
    least_kib: int = 0
    most: int = 0
    bandwidth_step: int = 0
    bandwidth_least: int = 0
    kept: int = 1

    @property
    def steps(self) -> int:
        """Number of ways that can be allocated."""
        if not self.granularity_kib:
            return 0
        return max(0, self.kib // self.granularity_kib - self.kept)


@dataclass(frozen=True)
class Topology:
    """A node's NUMA nodes, physical cores (tuples of online SMT threads) and shared caches.

    ``nodes`` is empty on a submit host.
    """

    nodes: tuple[NumaNode, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    caches: tuple[CacheBank, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """All online CPUs, ascending."""
        return tuple(sorted(cpu for node in self.nodes for cpu in node.cpus))

    @property
    def mem_mib(self) -> int:
        """MiB of memory of all NUMA nodes, outside reserved huge pages."""
        return sum(node.mem_mib for node in self.nodes)

    def siblings(self, cpu: int) -> tuple[int, ...]:
        """Return the online SMT threads of the CPU's core, including the CPU."""
        return self._siblings.get(cpu, (cpu,))

    def nodes_of(self, cpus: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the CPUs' NUMA nodes, ascending."""
        return tuple(sorted({self._node_of[cpu] for cpu in cpus if cpu in self._node_of}))

    @cached_property
    def _siblings(self) -> dict[int, tuple[int, ...]]:
        return {cpu: core for core in self.cores for cpu in core}

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {cpu: node.id for node in self.nodes for cpu in node.cpus}


def flat(cpus: Sequence[int], mem_mib: int) -> Topology:
    """Return a topology with one NUMA node and without SMT."""
    ids = tuple(sorted(cpus))
    return Topology((NumaNode(0, ids, mem_mib),), tuple((cpu,) for cpu in ids))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as ``0-3,8`` (cpuset(7), "List format")."""
    cpus: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.strip().partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(sorted(set(cpus)))


def show_cpus(cpus: Iterable[int]) -> str:
    """Format CPUs as a list such as ``0-3,8``."""
    parts = []
    for _, run in groupby(enumerate(sorted(set(cpus))), lambda pair: pair[1] - pair[0]):
        ids = [cpu for _, cpu in run]
        parts.append(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}")
    return ",".join(parts)
