"""What a node's processors, memory and caches look like: ``guest.host`` in every node hook.

Data only. The core reads it from libvirt's capabilities (https://libvirt.org/formatcaps.html).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node.

    Args:
        id: as Linux numbers it.
        cpus: its online CPUs (logical ones, SMT threads), ascending.
        mem_mib: memory that is not set aside as huge pages.
        pages: huge pages set aside: size in KiB to how many, used or not.
    """

    id: int
    cpus: tuple[int, ...]
    mem_mib: int
    pages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheBank:
    """One cache that several CPUs share.

    ``granularity_kib`` is the least step of an allocation (one way); 0: resctrl cannot divide it.
    ``most`` allocations can exist at a time, what is left over to everybody else included.
    ``kept`` steps are everybody else's: those of resctrl's default group, at least one.
    Who has one can also be limited to a part of the memory bandwidth behind the cache, in steps of
    ``bandwidth_step`` percent, ``bandwidth_least`` at least; 0: resctrl cannot limit it.
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
        """How many steps can be given away."""
        if not self.granularity_kib:
            return 0
        return max(0, self.kib // self.granularity_kib - self.kept)


@dataclass(frozen=True)
class Topology:
    """A node's NUMA nodes, physical cores (each its online SMT threads) and shared caches.

    Without ``nodes`` it is not known: on a front end, where ``vsub --dry-run`` plans.
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
        """Memory of all nodes that is not set aside as huge pages."""
        return sum(node.mem_mib for node in self.nodes)

    def siblings(self, cpu: int) -> tuple[int, ...]:
        """Return the online SMT threads of this CPU's physical core, itself included."""
        return self._siblings.get(cpu, (cpu,))

    def nodes_of(self, cpus: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the NUMA nodes that these CPUs are on, ascending."""
        return tuple(sorted({self._node_of[cpu] for cpu in cpus if cpu in self._node_of}))

    @cached_property
    def _siblings(self) -> dict[int, tuple[int, ...]]:
        return {cpu: core for core in self.cores for cpu in core}

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {cpu: node.id for node in self.nodes for cpu in node.cpus}


def flat(cpus: Sequence[int], mem_mib: int) -> Topology:
    """Return a machine of one NUMA node and no SMT."""
    ids = tuple(sorted(cpus))
    return Topology((NumaNode(0, ids, mem_mib),), tuple((cpu,) for cpu in ids))
