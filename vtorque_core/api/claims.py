"""Claims of a plugin on a node's resources (``vtorque_plan``), and the ledger's answer.

All resources come from the job's allocation. A claim that can never fit is refused. A resource in
use by another job is a host fault. Claims of one guest for the same resource are merged
(doc/plugins.md).

``key`` is the ``-vm`` key that a refusal names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtorque_core.base.sizes import show_mib

Use = Literal["vcpu", "emulator", "io"]


@dataclass(frozen=True)
class CoreClaim:
    """Claim ``count`` logical CPUs of the job's allocation for one use.

    The core claims the CPUs for ``"vcpu"``, not exclusively. ``"emulator"`` and ``"io"`` are QEMU's
    helper threads. With an ``io`` claim, iothreads run on its cores, and so does the emulator
    unless it has its own claim.

    Attributes:
        exclusive: one CPU per vCPU, on which no other guest's threads run. Other threads float over
            the remaining CPUs.
        at_most: maximum for a later :func:`vtorque_core.live.cores.resize`.
        cpus: exactly these CPUs, the n-th for the n-th vCPU. Implies ``exclusive``.
        whole_cores: no other guest uses the SMT siblings. Implies ``exclusive``.
    """

    use: Use
    count: int
    exclusive: bool = False
    at_most: int | None = None
    cpus: tuple[int, ...] = ()
    whole_cores: bool = False
    key: str = "vcpus"


@dataclass(frozen=True)
class MemoryClaim:
    """Claim ``mib`` MiB of the job's memory on this node. Several claims add up.

    The core claims the guest's RAM (use ``"guest"``), QEMU's memory and RAM disks.
    """

    mib: int
    use: str = "extra"
    key: str = "ram"


@dataclass(frozen=True)
class RamClaim:
    """Set conditions for the placement of the guest's RAM. None means no condition.

    Attributes:
        page_kib: use huge pages of this size that the node has reserved.
        numa: ``"preferred"``: use the NUMA node of the guest's CPUs if the RAM fits there.
            ``"strict"``: refuse a guest that does not fit one node. None: ``[node] numa``.
        near: preferred NUMA nodes. If none is possible, the user gets a Notice.
        advisor: who recommends ``near``, for the Notice.
    """

    page_kib: int | None = None
    numa: Literal["preferred", "strict"] | None = None
    key: str = "ram"
    near: tuple[int, ...] = ()
    advisor: str = ""


@dataclass(frozen=True)
class CacheClaim:
    """Claim ``kib`` KiB of each cache of ``level`` that the guest's vCPU cores use.

    Requires exclusive vCPUs, and caches that resctrl can partition
    (``guest.host.caches[...].steps``). The answer is ``placement.caches``.
    """

    kib: int
    level: int = 3
    key: str = "vcpus"


@dataclass(frozen=True)
class PoolClaim:
    """Claim ``count`` free items of a named pool of this node.

    Pools with equal names before ``/`` share their items: a lease in ``pci/vrdma`` blocks the item
    in ``pci``, too. Items of ``pci/<plugin>`` are PCI addresses (``0000:3b:00.0``).

    Attributes:
        items: all items of the node, preferred ones first.
        near: NUMA node of each item (``/sys/bus/pci/devices/*/numa_node``). The guest is placed
            there if this has no other cost.
    """

    pool: str
    items: tuple[str, ...]
    count: int = 1
    near: Mapping[str, int] = field(default_factory=dict, hash=False)
    key: str = ""


@dataclass(frozen=True)
class AmountClaim:
    """Claim ``amount`` of a quantity of which this node has ``total``: bytes, bandwidth, tokens.

    The sum over all open jobs never exceeds ``total``. The answer is ``guest.amount(pool)``.

    Attributes:
        pool: a name that no PoolClaim uses.
        unit: for messages. ``"MiB"`` is printed as 1G or 512M.
        where: setting of the total: ``"[plugin.scratch] size"``.
    """

    pool: str
    amount: int
    total: int
    unit: str = ""
    key: str = ""
    where: str = ""

    def show(self, amount: int) -> str:
        """Return an amount for a message."""
        return show_mib(amount) if self.unit == "MiB" else f"{amount} {self.unit}".strip()


Claim = CoreClaim | MemoryClaim | RamClaim | CacheClaim | PoolClaim | AmountClaim


@dataclass(frozen=True)
class Notice:
    """One line for the user of a running job, printed before the job's standard error."""

    text: str


@dataclass(frozen=True)
class Placement:
    """The ledger's answer for one guest.

    Attributes:
        cores: host CPU ids per use (``"vcpu"``, ``"emulator"``, ``"io"``); empty: all CPUs of the
            allocation.
        own: uses with exclusive cores; ``cores["vcpu"][n]`` is then the CPU of vCPU n.
        share: host CPU ids of the job on this node; empty: the whole node.
        memory_mib: sum of the guest's memory claims.
        leased: items per pool.
        amounts: amount per pool.
        nodes: NUMA nodes of the guest's CPUs; empty: any.
        memory: MiB of ordinary memory per NUMA node.
        paged: MiB of huge pages per NUMA node.
        numa: how RAM is bound to ``nodes``; None: not bound.
        page_kib: huge page size of the guest's RAM; None: ordinary pages.
        threads: SMT threads per core that the guest sees.
        caches: (level, bank, KiB) of each allocated part of a cache.
        idle: SMT siblings of the guest's cores that stay idle (``whole_cores``).
        most: maximum number of cores per use, if larger than now.
        growing: the job's CPUs that the guest may grow to.
        cells: (node, vCPUs, MiB) of each NUMA cell of a guest that spans several nodes.
    """

    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    share: tuple[int, ...] = ()
    memory_mib: int = 0
    leased: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    nodes: tuple[int, ...] = ()
    memory: Mapping[int, int] = field(default_factory=dict)
    paged: Mapping[int, int] = field(default_factory=dict)
    numa: Literal["preferred", "strict"] | None = None
    page_kib: int | None = None
    threads: int = 1
    caches: tuple[tuple[int, int, int], ...] = ()
    idle: tuple[int, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)
    growing: tuple[int, ...] = ()
    cells: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    amounts: Mapping[str, int] = field(default_factory=dict)
