"""What a job may use of a node, what others hold there, and the word for "it does not fit"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vtorque_core.api.host_topology import Topology
from vtorque_core.base.errors import Refusal
from vtorque_core.site.job_size import Granted


class NoFit(Exception):
    """The claims do not fit; carries why. Refused or a host fault, whoever catches it knows."""

    def __init__(self, message: str, **parts: str | None) -> None:
        self.refusal = Refusal(message, **parts)
        super().__init__(str(self.refusal))


@dataclass(frozen=True)
class NodeShare:
    """What the batch system gave this job on this node, and what the node has.

    Args:
        machine: the node, as libvirt tells it.
        cpus: host CPU ids of the job; empty: not known.
        cpu_count: how many CPUs the job has, if known.
        mem_mib: memory of the job, if limited.
        reserve_cores, reserve_mib: kept for the host. Where the job's ids are known its guests may
            float over a reserved CPU, but none gets it for itself.
        exclusive: without known ids the node is one user's alone, by our own means.
        whole_node: the batch system says that no other job is here.
        numa: how RAM is bound to a guest's node if no claim says it; None: not at all.
    """

    machine: Topology
    cpus: tuple[int, ...] = ()
    cpu_count: int | None = None
    mem_mib: int | None = None
    reserve_cores: int = 0
    reserve_mib: int = 0
    exclusive: bool = True
    whole_node: bool = False
    numa: Literal["preferred", "strict"] | None = "preferred"

    @cached_property
    def reserved(self) -> tuple[int, ...]:
        """The CPUs kept for the host: the lowest, each with its SMT siblings."""
        ordered: dict[int, None] = {}
        for cpu in self.machine.cpus:
            ordered.update(dict.fromkeys(self.machine.siblings(cpu)))
        return tuple(ordered)[: self.reserve_cores]

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """The CPU ids that the job's guests may run on, if nobody else were here."""
        return self.cpus or tuple(c for c in self.machine.cpus if c not in self.reserved)

    @property
    def counted(self) -> bool:
        """Whether the ledger chooses the job's CPUs: it has a number of them, but no ids."""
        return not self.cpus and self.cpu_count is not None and not self.whole_node

    @property
    def limit(self) -> int:
        """How many CPUs the job can have."""
        usable = len(self.usable)
        return usable if self.cpu_count is None else min(self.cpu_count, usable)

    @property
    def granted(self) -> Granted:
        """What guests may have that take all of the job's share."""
        limited = bool(self.cpus) or self.cpu_count is not None or self.whole_node
        cpus = self.limit if limited else None
        reserved = len(set(self.cpus) & set(self.reserved))
        return Granted(cpus, self._granted_mib(cpus), reserved)

    def _granted_mib(self, cpus: int | None) -> int | None:
        room = sum(self.capacity(node.mem_mib) for node in self.machine.nodes)
        if self.mem_mib is not None:
            return min(self.mem_mib, room)
        if cpus is None or self.whole_node:
            return None if cpus is None else room
        there = len(self.machine.cpus)
        return room * min(self.cpu_count or cpus, there) // there

    def capacity(self, mib: int) -> int:
        """Return what of a NUMA node's memory is for guests: each gives its part of the reserve."""
        whole = self.machine.mem_mib
        return mib - -(-self.reserve_mib * mib // whole) if whole else 0

    @property
    def alone(self) -> bool:
        """Whether no other user may have guests here at the same time."""
        return self.exclusive and not self.cpus


@dataclass(frozen=True)
class Taken:
    """What other open leases hold.

    Args:
        items: pool to items; of the pool ``core`` each exclusive CPU.
        mib: memory; ``mib_on``: by NUMA node, where that is known.
        pages: (NUMA node, KiB of a huge page) to MiB.
        shares: every CPU to how many other jobs may run there, on their own cores or floating.
        amounts: pool to how much of it (:class:`vtorque_core.api.claims.AmountClaim`).
    """

    items: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mib: int = 0
    mib_on: Mapping[int, int] = field(default_factory=dict)
    pages: Mapping[tuple[int, int], int] = field(default_factory=dict)
    shares: Mapping[int, int] = field(default_factory=dict)
    amounts: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def own(self) -> frozenset[int]:
        """The CPUs that are others' alone."""
        return frozenset(int(item) for item in self.items.get("core", ()))
