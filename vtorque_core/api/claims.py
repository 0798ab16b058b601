"""Claims of a plugin on a node's resources (``vtorque_plan``), and the resulting placement.

All resources come from the job's allocation. A claim that can never fit is refused. If another job
uses the resource, the start fails with a host fault. ``key`` is the ``-vm`` key that refusals name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtorque_core.base.sizes import show_mib

Use = Literal["vcpu", "emulator", "io"]


@dataclass(frozen=True)
class CoreClaim:
    """A claim on ``count`` logical CPUs for the purpose ``use``: vCPUs, emulator or I/O threads.

    Without a claim for ``"emulator"``, QEMU's emulator threads run on the CPUs of ``"io"``.

    Attributes:
        exclusive: no threads of other guests run on these CPUs, and each vCPU has its own CPU.
        at_most: maximum for a later :func:`vtorque_core.live.cores.resize`.
        cpus: exactly these CPUs, one for each vCPU in order. Implies ``exclusive``.
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
    """A claim on ``mib`` MiB of the job's memory on this node. Several claims add up."""

    mib: int
    use: str = "extra"
    key: str = "ram"


@dataclass(frozen=True)
class RamClaim:
    """Conditions for the placement of the guest's RAM.

    Attributes:
        page_kib: use reserved huge pages of this size; None: ordinary pages.
        numa: ``"preferred"``: use the NUMA node of the guest's CPUs if the RAM fits there.
            ``"strict"``: refuse a guest that does not fit one NUMA node. None: ``[node] numa``.
        near: preferred NUMA nodes. If the guest gets other NUMA nodes, the user gets a Notice.
        advisor: name of the program that proposed ``near``, for the Notice.
    """

    page_kib: int | None = None
    numa: Literal["preferred", "strict"] | None = None
    key: str = "ram"
    near: tuple[int, ...] = ()
    advisor: str = ""


@dataclass(frozen=True)
class CacheClaim:
    """A claim on ``kib`` KiB of each cache of this ``level`` that the guest's vCPUs use.

    Requires exclusive CPUs for the vCPUs, and a cache that resctrl can partition.
    """

    kib: int
    level: int = 3
    key: str = "vcpus"


@dataclass(frozen=True)
class PoolClaim:
    """A claim on ``count`` free items of a named pool of this node.

    Pools with the same name before ``/`` share items: a lease in ``pci/vrdma`` blocks the item in
    all ``pci`` pools. Items of ``pci/<plugin>`` are PCI addresses (``0000:3b:00.0``).

    Attributes:
        items: all items of the node, preferred items first.
        near: NUMA node of each item (``/sys/bus/pci/devices/*/numa_node``). The guest
            gets CPUs of these nodes if possible.
    """

    pool: str
    items: tuple[str, ...]
    count: int = 1
    near: Mapping[str, int] = field(default_factory=dict, hash=False)
    key: str = ""


@dataclass(frozen=True)
class AmountClaim:
    """A claim on ``amount`` of a countable quantity, of which this node has ``total``.

    Attributes:
        pool: a name that no PoolClaim uses.
        unit: unit in messages; amounts in ``"MiB"`` are shown as 1G or 512M.
        where: the setting that defines ``total``, such as ``"[plugin.scratch] size"``.
    """

    pool: str
    amount: int
    total: int
    unit: str = ""
    key: str = ""
    where: str = ""

    def show(self, amount: int) -> str:
        """Format an amount, with its unit, for a message."""
        return show_mib(amount) if self.unit == "MiB" else f"{amount} {self.unit}".strip()


Claim = CoreClaim | MemoryClaim | RamClaim | CacheClaim | PoolClaim | AmountClaim


@dataclass(frozen=True)
class Notice:
    """One line for the user, printed on the job's standard error before the script runs."""

    text: str


@dataclass(frozen=True)
class Placement:
    """The resources that one guest gets on this node.

    Attributes:
        cores: host CPU ids by purpose: ``"vcpu"``, ``"emulator"`` and ``"io"``; empty: all CPUs of
            the allocation.
        own: keys of ``cores`` whose CPUs are exclusive. If the vCPUs have exclusive CPUs,
            ``cores["vcpu"][n]`` is the CPU of vCPU n.
        share: host CPU ids of the job's allocation; empty: the whole node.
        leased: the leased items by pool.
        amounts: the leased amounts by pool.
        nodes: NUMA nodes of the guest's CPUs; empty: any.
        memory: MiB of ordinary memory by NUMA node.
        paged: MiB of huge pages by NUMA node.
        numa: how RAM is bound to ``nodes``; None: not bound.
        page_kib: huge page size; None: ordinary pages.
        threads: SMT threads per core that the guest sees.
        caches: (cache level, cache id, KiB) of each allocated part of a cache.
        idle: SMT siblings that stay idle (``whole_cores``).
        most: maximum number of CPUs by purpose, for claims with ``at_most``.
        growing: CPUs of the job that the guest may get later.
        cells: (host NUMA node, vCPUs, MiB) of each virtual NUMA node; empty: the guest has one.
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
