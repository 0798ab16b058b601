"""Explain why claims do not fit a node: value, limit, and the origin of the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vtorque_core.base.sizes import show_mib
from vtorque_core.plan.placement.model import Cores, Demand, FreeResources, NodeShare, NoFit
from vtorque_core.plan.placement.packing import Room


def require_fit(demands: Sequence[Demand], free: FreeResources) -> None:
    """Raise NoFit if the demands exceed the node's free resources in total."""
    check_memory(demands, free)
    _check_fixed(demands, free)
    _check_cores(demands, free)


def check_memory(demands: Sequence[Demand], free: FreeResources, always: bool = False) -> None:
    """Raise NoFit if the guests need more memory or huge pages than available.

    ``always``: raise even if the totals fit; the caller knows that the NUMA nodes lack room.
    """
    need = sum(d.memory_mib for d in demands)
    plain = sum(d.mib for d in demands)
    share = free.share
    limit, memory, where = free.mib, "the node's memory", None
    if share.mem_mib is not None and (share.mem_mib < limit or need > share.mem_mib):
        limit, memory, plain = share.mem_mib, "the job's memory on this node", need
    elif share.reserve_mib:
        where = "[node] host_reserve_ram"
    if plain > limit or always:
        most, key = max(d.largest for d in demands)
        instead = "fs_type=sharedfs" if key == "fs_type" else f"less {key}"
        raise NoFit(
            f"the guests of this node need {show_mib(plain)} (with QEMU's memory), more than "
            f"{memory}",
            key=key,
            value=show_mib(most),
            limit=show_mib(limit),
            where=where,
            fix=f"ask for {instead} or fewer guests, or ask the batch system for more memory",
        )
    for page in sorted({d.page_kib for d in demands if d.page_kib}):
        users = [d for d in demands if d.page_kib == page]
        left = sum(free.pages_on(node).get(page, 0) for node in share.machine.nodes)
        there = sum(n.pages.get(page, 0) * page // 1024 for n in share.machine.nodes)
        paged = sum(d.paged_mib for d in users)
        if paged > left:
            raise NoFit(
                f"the guests of this node need {show_mib(paged)} in huge pages of {page} KiB",
                key=users[0].ram_key,
                value=show_mib(users[0].paged_mib),
                limit=f"{show_mib(max(0, left))} of {show_mib(there)} free",
                where="vm.nr_hugepages of the node",
                fix="ask for less ram, or for no huge pages",
            )


def _check_cores(demands: Sequence[Demand], free: FreeResources) -> None:
    share, ownable, floating = free.share, len(free.ownable), len(free.floating)
    own = sum(d.own for d in demands)
    shared = max((d.shared for d in demands), default=0)
    one = next((c for d in demands for c in d.cores.values() if c.own), Cores(shared))
    both = f"{own} exclusive and {shared} shared CPUs ({own + shared} in total)"
    for count, most, requested, asked in (
        (shared, share.limit, f"{shared} CPUs for one guest", Cores(shared)),
        (own, min(share.limit, ownable), f"{own} exclusive CPUs for all guests together", one),
        (own + shared, min(share.limit, floating), both, one),
    ):
        if count > most:
            raise NoFit(
                f"{requested} are more than the job can have on this node",
                key=asked.key,
                value=str(asked.count),
                limit=f"{most} CPUs",
                where=_limiting_key(share),
                fix="ask the batch system for more CPUs per node, or for smaller guests",
            )


def _limiting_key(share: NodeShare) -> str | None:
    if share.cpus or (share.cpu_count is not None and share.cpu_count <= len(share.usable)):
        return "the job's allocation"
    return "[node] host_reserve_cores" if share.reserved else None


def _check_fixed(demands: Sequence[Demand], free: FreeResources) -> None:
    beside = [d.idle_siblings(free.share.machine) for d in demands]
    named = Counter(
        cpu for d, idle in zip(demands, beside, strict=True) for cpu in (*d.fixed, *idle)
    )
    for d, idle in zip(demands, beside, strict=True):
        for cores in d.cores.values():
            for cpu in (*cores.cpus, *(idle if cores.cpus else ())):
                problem, limit, where = _why_unusable(cpu, named[cpu], free)
                if problem:
                    raise NoFit(
                        f"CPU {cpu}{', SMT sibling of a requested CPU,' * (cpu in idle)} {problem}",
                        key=cores.key,
                        value=",".join(map(str, cores.cpus)),
                        limit=limit,
                        where=where,
                        fix="request other CPUs, or none",
                    )


def _why_unusable(cpu: int, times: int, free: FreeResources) -> tuple[str, str, str | None]:
    share = free.share
    usable = [c for c in share.usable if c not in share.reserved]
    can = _ids(usable)
    if cpu not in share.machine.cpus:
        return "is not on this node", _ids(share.machine.cpus), None
    if cpu in share.reserved:
        return "is reserved for the host", can, "[node] host_reserve_cores"
    if cpu not in usable:
        return "is not granted to the job", can, "the job's allocation"
    if times > 1:
        return f"is requested for {times} guests", can, None
    if cpu not in free.ownable:
        return "is in use by another job", _ids(sorted(free.ownable)), None
    return "", "", None


def _ids(cpus: Sequence[int]) -> str:
    text = ",".join(map(str, cpus[:16]))
    return f"CPUs {text}{',...' if len(cpus) > 16 else ''}" if cpus else "no CPU"


def check_numa(demands: Sequence[Demand], strict: Sequence[bool], rooms: Sequence[Room]) -> None:
    d = max((d for d, must in zip(demands, strict, strict=True) if must), key=lambda d: d.own)
    cores = max(sum(map(len, room.groups)) for room in rooms)
    mib = max(room.mib for room in rooms)
    need = max(d.own, d.shared)
    size = d.page_kib or 0
    pages = f" ({show_mib(max(r.pages.get(size, 0) for r in rooms))} in huge pages)" if size else ""
    raise NoFit(
        f"a guest of {need} CPUs and {show_mib(d.memory_mib)} must fit on one NUMA node, but "
        "no NUMA node has enough free CPUs and memory",
        key=d.numa_key,
        value="strict",
        limit=f"at most {cores} exclusive CPUs or {show_mib(mib)}{pages} on a NUMA node",
        where="[node] numa, or the request's numa",
        fix="ask for smaller guests, or for numa=preferred",
    )
