"""Pure functions that choose pool items and parts of CPU caches for placed guests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from vtorque_core.api.claims import CacheClaim
from vtorque_core.plan.placement.model import Demand, FreeResources, NoFit, family

_WAIT = "request less, or wait until other jobs have ended"
_FIX = {True: "request less: this never fits this node", False: _WAIT}  # key: True if it never fits

CacheShare = tuple[tuple[tuple[int, int, int], ...], dict[str, tuple[str, ...]]]
"""A guest's cache parts (level, cache id, KiB), and its items in the pool ``cache``."""


def pools(
    demands: Sequence[Demand], free: FreeResources, nodes: Sequence[tuple[int, ...]]
) -> list[dict[str, tuple[str, ...]]]:
    used: dict[str, set[str]] = {}
    wanted: Counter[str] = Counter()
    result: list[dict[str, tuple[str, ...]]] = []
    for d, home in zip(demands, nodes, strict=True):
        mine: dict[str, tuple[str, ...]] = {}
        for claim in d.pools:
            held = used.setdefault(family(claim.pool), set(free.taken.leased_items(claim.pool)))
            items = [item for item in dict.fromkeys(claim.items) if item not in held]
            wanted[claim.pool] += claim.count
            if len(items) < claim.count:
                raise NoFit(
                    f"the guests of this node need {wanted[claim.pool]} of {claim.pool}",
                    key=claim.key or claim.pool,
                    value=str(wanted[claim.pool]),
                    limit=f"{len(set(claim.items))} on this node, {len(items)} free",
                    fix=_FIX[wanted[claim.pool] > len(set(claim.items))],
                )
            near = claim.near
            items.sort(key=lambda item: item in near and near[item] not in home)
            got = tuple(items[: claim.count])
            held.update(got)
            mine[claim.pool] = (*mine.get(claim.pool, ()), *got)
        result.append(mine)
    return result


def amounts(demands: Sequence[Demand], free: FreeResources) -> list[dict[str, int]]:
    wanted: Counter[str] = Counter()
    result: list[dict[str, int]] = []
    for d in demands:
        mine: Counter[str] = Counter()
        for claim in d.amounts:
            wanted[claim.pool] += claim.amount
            mine[claim.pool] += claim.amount
            rest = max(0, claim.total - free.taken.amounts.get(claim.pool, 0))
            if wanted[claim.pool] > rest:
                raise NoFit(
                    f"the guests of this node need {claim.show(wanted[claim.pool])} of "
                    f"{claim.pool}",
                    key=claim.key or claim.pool,
                    value=claim.show(claim.amount),
                    limit=f"{claim.show(rest)} free of {claim.show(claim.total)} on this node",
                    where=claim.where or None,
                    fix=_FIX[wanted[claim.pool] > claim.total],
                )
        result.append(dict(+mine))
    return result


def caches(
    demands: Sequence[Demand], free: FreeResources, vcpus: Sequence[tuple[int, ...]]
) -> list[CacheShare]:
    """Return each guest's part of the caches of its exclusive ``vcpus``.

    An item is a way of a cache (``L3-0/7``) or a resctrl group (``group-2``).
    """
    held = set(free.taken.leased_items("cache"))
    result: list[CacheShare] = []
    for d, cpus in zip(demands, vcpus, strict=True):
        parts, items = [], list[str]()
        near = [bank for bank in free.share.machine.caches if set(bank.cpus) & set(cpus)]
        for claim in d.caches:
            banks = [bank for bank in near if bank.level == claim.level]
            if not banks or not all(bank.granularity_kib for bank in banks):
                why = "this node cannot divide caches" if cpus else "the guest's cores are shared"
                raise _no_cache(claim, why, "0 KiB")
            groups = [f"group-{n}" for n in range(min(bank.most for bank in banks) - 1)]
            items += _free(claim, groups, held, 1, "allocations are free on this node")
            for bank in banks:
                need = -(-max(claim.kib, bank.least_kib) // bank.granularity_kib)
                steps = [f"L{bank.level}-{bank.id}/{n}" for n in range(bank.steps)]
                what = f"steps of {bank.granularity_kib} KiB are free in cache {bank.id}"
                items += _free(claim, steps, held, need, what)
                parts.append((bank.level, bank.id, need * bank.granularity_kib))
        held.update(items)
        result.append((tuple(parts), {"cache": tuple(items)} if items else {}))
    return result


def _free(
    claim: CacheClaim, names: Sequence[str], held: Set[str], need: int, what: str
) -> list[str]:
    free = [name for name in names if name not in held]
    if len(free) < need:
        raise _no_cache(claim, "not enough cache is free", f"{len(free)} {what}")
    return free[:need]


def _no_cache(claim: CacheClaim, why: str, limit: str) -> NoFit:
    return NoFit(
        f"{claim.kib} KiB of exclusive level {claim.level} cache: {why}",
        key=claim.key,
        value=str(claim.kib),
        limit=limit,
        where="resctrl of the node",
        fix="ask for less, or for a node with cache allocation",
    )
