"""Claims: what a plugin asks of the node (``vtorque_plan``), and the ledger's answer.

A plugin only asks. The core answers all claims of a job in one locked transaction, or none, and
alone writes ``vcpupin``, ``emulatorpin``, ``iothreadpin``, ``numatune`` and huge pages from the
answer, ``guest.placement``. Everything stays within what the batch system gave the job. What can
never fit is refused; what other jobs hold now is a host fault.

Claims of one guest for the same thing are one: the largest ``count`` counts, and what one claim
asks for (cores of its own, huge pages) holds for all. Two that exclude each other are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtorque_core.base.sizes import show_mib

Use = Literal["vcpu", "emulator", "io"]


@dataclass(frozen=True)
class CoreClaim:
    """Ask for ``count`` CPUs (logical ones) of the job's share for one use.

    ``"vcpu"`` are the guest's virtual CPUs: the core itself claims as many as there are, shared.
    ``"emulator"`` and ``"io"`` are its helper threads; if ``io`` is claimed, iothreads and (without
    a claim of its own) the emulator run there.

    Args:
        exclusive: cores that run nothing else of any guest; for vCPUs one each. Shared claims
            float over what nobody has for himself.
        at_most: the holder may grow to so many later (:func:`vtorque_core.live.cores.resize`); it
            starts with ``count``.
        cpus: exactly these, the n-th for the n-th vCPU; they are exclusive.
        whole_cores: exclusive, and the SMT siblings of these cores stay idle or this guest's.
        key: the ``-vm`` key that a refusal names.
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
    """Ask for ``mib`` MiB more of the job's memory on this node; claims add up.

    ``use`` says what for. ``"guest"`` is the guest's RAM, claimed by the core like QEMU's own and
    a root disk in memory. ``key`` as above.
    """

    mib: int
    use: str = "extra"
    key: str = "ram"


@dataclass(frozen=True)
class RamClaim:
    """Say how the guest's own RAM shall lie; how much it is the core knows. None: no opinion.

    Args:
        page_kib: huge pages of this size in KiB, from what the node has set aside.
        numa: ``"preferred"``: on the NUMA node of the guest's CPUs where it fits; ``"strict"``:
            refuse a guest that does not fit one node. Without: ``[node] numa``.
        near: NUMA nodes that somebody advises (``advisor`` is who), a wish as in PoolClaim. If the
            guest goes elsewhere the user gets a Notice.
        key: the ``-vm`` key that a refusal names.
    """

    page_kib: int | None = None
    numa: Literal["preferred", "strict"] | None = None
    key: str = "ram"
    near: tuple[int, ...] = ()
    advisor: str = ""


@dataclass(frozen=True)
class CacheClaim:
    """Ask for ``kib`` KiB of each cache of ``level`` that the guest's own vCPU cores share.

    Needs exclusive vCPUs and a node whose caches resctrl can divide
    (``guest.host.caches[...].steps``). Answer: ``placement.caches``, for ``cachetune``.
    """

    kib: int
    level: int = 3
    key: str = "vcpus"


@dataclass(frozen=True)
class PoolClaim:
    """Ask for ``count`` items of a named pool of this node that nobody else holds.

    Pools whose names are alike up to a ``/`` have the same items: who holds one of ``pci/vrdma``
    holds it of ``pci``, too. Plugins that lease PCI functions name theirs ``pci/<plugin>`` and the
    items by address, ``0000:3b:00.0``.
    ``items`` are all the items the node has, in order of preference (addresses, PCI cards, VFs).
    ``near``: item to its NUMA node (``/sys/bus/pci/devices/*/numa_node``), a wish: the guest goes
    where its items are, if that costs nothing else.
    ``key``: the ``-vm`` key that a refusal names; empty: none, the pool alone.
    """

    pool: str
    items: tuple[str, ...]
    count: int = 1
    near: Mapping[str, int] = field(default_factory=dict, hash=False)
    key: str = ""


@dataclass(frozen=True)
class AmountClaim:
    """Ask for ``amount`` of something that this node has ``total`` of: bytes, bandwidth, tokens.

    What all open jobs have together is never more than ``total``; answer: ``guest.amount(pool)``.

    Args:
        pool: its name, of which there is no PoolClaim.
        unit: of both numbers, as people read it; ``"MiB"`` is shown as 1G or 512M.
        key: the ``-vm`` key that a refusal names; empty: none, the pool alone.
        where: what sets the total: ``"[plugin.scratch] size"``.
    """

    pool: str
    amount: int
    total: int
    unit: str = ""
    key: str = ""
    where: str = ""

    def show(self, amount: int) -> str:
        """Return an amount as people read it."""
        return show_mib(amount) if self.unit == "MiB" else f"{amount} {self.unit}".strip()


Claim = CoreClaim | MemoryClaim | RamClaim | CacheClaim | PoolClaim | AmountClaim


@dataclass(frozen=True)
class Notice:
    """What the user must know of a job that runs: one line, in front of its output on stderr."""

    text: str


@dataclass(frozen=True)
class Placement:
    """The ledger's answer for one guest.

    Args:
        cores: host CPU ids per use (``"vcpu"``, ``"emulator"``, ``"io"``); an empty tuple for a
            use means: not restricted beyond the job's share.
        own: the uses whose cores are exclusive; ``cores["vcpu"][n]`` is then vCPU n's.
        share: all host CPU ids of the job on this node; empty: the whole node.
        memory_mib: sum of the guest's memory claims.
        leased: pool name to items.
        amounts: pool name to how much of it (``AmountClaim``).
        nodes: NUMA nodes that its CPUs are on; empty: not restricted.
        memory: NUMA node to MiB of the guest's ordinary memory there; ``paged``: in huge pages.
        numa: how the core binds RAM to ``nodes``; None: not at all.
        page_kib: size of the huge pages of its RAM; None: ordinary ones.
        threads: SMT threads per core that the guest shall see.
        caches: (level, bank, KiB) of each cache that it got a part of.
        idle: SMT siblings of its cores that stay idle (``whole_cores``).
        most: use to how many cores it may grow to, where that is more than it has; ``growing``:
            the CPUs of the job that these may be.
        cells: (node, vCPUs, MiB) of the NUMA cells that a guest over several nodes shall see.
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
