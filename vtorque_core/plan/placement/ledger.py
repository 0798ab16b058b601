"""Ledger: grants all claims of a job on this node in one transaction, or none.

The ledger consists of the open lease records of all journals, read under the node's lock. A lease
holds an item of a pool that plugins claim, or of these pools of the core (double backquotes: fields
of :class:`Lease`)::

    core    an exclusive host CPU. ``item`` is its id and ``use`` its purpose (``idle``: an unused
            SMT sibling). ``live.cores.resize`` can change the purpose's number of CPUs between
            ``least`` and ``most``, and adds only CPUs in ``cpus``.
    memory  MiB of one guest on a NUMA node, in ordinary or huge pages
    share   the job's CPUs (``cpus``). ``resize`` keeps ``least`` of them shared (not exclusive).
    cache   a way of a cache, or a resctrl group
    node    the whole node, for one user
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vtorque_core.api.claims import Claim, Placement, PoolClaim
from vtorque_core.api.host_topology import parse_cpus, show_cpus
from vtorque_core.base.errors import InUse, Refused
from vtorque_core.base.locks import node_lock
from vtorque_core.base.names import Paths
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.model import Leases, NodeShare, NoFit, demand
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import CORES, JournalState, claimed_spares, idle_spares, walk
from vtorque_core.resources.lease import Lease

CORE, MEMORY, SHARE, NODE = CORES, "memory", "share", "node"


def place(
    journal: Journal,
    claims: Sequence[Sequence[Claim]],
    share: NodeShare,
    paths: Paths,
    away: Sequence[PoolClaim] = (),
) -> tuple[list[Placement], list[str]]:
    """Place all guests of a job or none, and write the leases to ``journal``. As root.

    Returns the placements, and the keys of warm guests to end, because the job needs their memory.
    Call this before the job acquires other resources. Items in ``away`` count as in use although no
    journal names them.
    """
    try:
        divide(claims, share, Leases())
    except NoFit as misfit:
        raise Refused(misfit.refusal) from None
    with node_lock(paths):
        held = list(walk(paths))
        _check_exclusive(journal, share, held)
        ending = [] if journal.header.spare else idle_spares(held)
        placements, evicted = _placements(claims, share, held, ending, away)
        of_job = bool(placements) and not journal.header.spare
        journal.acquire_leases([*_leases(placements, claims, share, of_job)], phase="plan")
    return placements, evicted


def _placements(
    claims: Sequence[Sequence[Claim]],
    share: NodeShare,
    held: Sequence[JournalState],
    ending: Sequence[JournalState],
    away: Sequence[PoolClaim],
) -> tuple[list[Placement], list[str]]:
    for count in range(len(ending) + 1):
        try:
            taken = leased_resources(held, without=ending[:count])
            items = dict(taken.items)
            for claim in away:
                items[claim.pool] = items.get(claim.pool, frozenset()).union(claim.items)
            found = divide(claims, share, replace(taken, items=items))
            return found, [state.key for state in ending[:count]]
        except NoFit as misfit:
            refusal = misfit.refusal
    raise InUse(f"resources are in use by other jobs: {refusal}", stage="plan")


def _check_exclusive(journal: Journal, share: NodeShare, held: Sequence[JournalState]) -> None:
    for state in held:
        if state.header.job.uid == journal.header.job.uid or not state.leases:
            continue
        if state.header.spare or journal.header.spare:
            continue
        theirs = any(lease.args["pool"] == NODE for lease in state.leases)
        if theirs or share.is_exclusive:
            job = "that job" if theirs else "this job"
            raise InUse(
                f"job {state.header.job.id} of another user runs guests on this node, and the CPU "
                f"ids of {job} are unknown: the jobs cannot share the node ([node] exclusive)",
                stage="plan",
            )


def leased_resources(held: Sequence[JournalState], without: Sequence[JournalState] = ()) -> Leases:
    """Return the resources that these journals' leases hold.

    Omits the CPUs of suspended jobs, and the memory of warm guests in ``without``. Also omits the
    memory of claimed warm guests, because their jobs' leases include it.
    """
    taken = claimed_spares(held) | {state.key for state in without}
    items: dict[str, set[str]] = {}
    mib = 0
    mib_on: Counter[int] = Counter()
    pages: Counter[tuple[int, int]] = Counter()
    shares: Counter[int] = Counter()
    amounts: Counter[str] = Counter()
    for state in held:
        cpus: set[int] = set()
        free = (CORE, SHARE) if state.is_suspended else ()
        for args in (lease.args for lease in state.leases):
            if state.key in taken and args["pool"] == MEMORY:
                continue
            if args["pool"] in free:
                continue
            pool, item, node = str(args["pool"]), str(args["item"]), int(args.get("node", -1))
            amount, page = int(args["mib"]), int(args.get("page_kib", 0))
            if of_pool := int(args.get("amount", 0)):
                amounts[pool] += of_pool
                continue
            items.setdefault(pool, set()).add(item)
            if page:
                pages[node, page] += amount
            else:
                mib += amount
                mib_on[node] += amount
            if pool == CORE:
                cpus.add(int(item))
            elif pool == SHARE:
                cpus |= set(parse_cpus(str(args["cpus"])))
        shares.update(cpus)
    del mib_on[-1]
    held_items = {p: frozenset(i) for p, i in items.items()}
    return Leases(held_items, mib, mib_on, pages, shares, amounts)


def _leases(
    placements: Sequence[Placement],
    claims: Sequence[Sequence[Claim]],
    share: NodeShare,
    of_job: bool,
) -> Iterator[tuple[Lease, int | None]]:
    """Yield the leases of the job (``of_job``) and of each guest."""
    if of_job:
        if share.is_exclusive:
            yield Lease(NODE, "alone"), None
        cpus = show_cpus(placements[0].share or share.machine.cpus)
        keep = max(demand(guest).shared for guest in claims)
        yield Lease(SHARE, "cpus", cpus=cpus, least=keep), None
    for index, at in enumerate(placements):
        item, page = f"g{index}", at.page_kib or 0
        leases = []
        for use in sorted(at.own):
            cores, most = at.cores[use], at.most.get(use, 0)
            limits = {"least": len(cores) if most else 0, "most": most}
            grow = show_cpus(at.growing) if most else ""
            leases += [Lease(CORE, str(c), use=use, cpus=grow, **limits) for c in cores]
        leases += [Lease(CORE, str(c), use="idle") for c in at.idle]
        leases += [Lease(MEMORY, item, mib, node=node) for node, mib in at.memory.items()]
        leases += [
            Lease(MEMORY, item, mib, node=node, page_kib=page) for node, mib in at.paged.items()
        ]
        leases += [Lease(pool, each) for pool, items in at.leased.items() for each in items]
        leases += [Lease(pool, item, amount=n) for pool, n in at.amounts.items()]
        yield from ((lease, index) for lease in leases)
