"""The ledger: answers all claims of a job on this node in one locked transaction, or none.

There is no ledger file. What is taken is what the open lease records of all journals say, read
under the node's lock; a job's leases are records of its own journal. Pools are exclusive over all
jobs of the node; addresses are the first of them. Three pools are the ledger's own: ``core`` (an
exclusive host CPU), ``memory`` (an amount, per guest) and ``node`` (the node is one user's alone).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vtorque_core.api_node import Claim, CoreClaim, MemoryClaim, Placement, PoolClaim
from vtorque_core.errors import HostFault, Refusal, Refused
from vtorque_core.journal import EmptyJournal, Journal, JournalState, journals, read
from vtorque_core.locks import node_lock
from vtorque_core.names import Paths
from vtorque_core.resources import Lease
from vtorque_core.units import show_mib

CORE, MEMORY, NODE = "core", "memory", "node"
OWN_POOLS = frozenset({CORE, MEMORY, NODE})


@dataclass(frozen=True)
class NodeShare:
    """What the batch system gave this job on this node, and what the node has.

    Args:
        cpus: host CPU ids of the job; empty: not known.
        cpu_count: how many CPUs the job has, if known.
        mem_mib: memory of the job, if limited.
        node_cpus: all host CPU ids; ``node_mem_mib``: all host memory.
        reserve_cores, reserve_mib: kept for the host, where the job's ids are not known and for
            memory always.
        exclusive: without known ids the node is one user's alone.
    """

    node_cpus: tuple[int, ...]
    node_mem_mib: int
    cpus: tuple[int, ...] = ()
    cpu_count: int | None = None
    mem_mib: int | None = None
    reserve_cores: int = 0
    reserve_mib: int = 0
    exclusive: bool = True

    @property
    def usable(self) -> tuple[int, ...]:
        """The CPU ids that the job's guests may run on."""
        return self.cpus or tuple(sorted(self.node_cpus))[self.reserve_cores :]

    @property
    def alone(self) -> bool:
        """Whether no other user may have guests here at the same time."""
        return self.exclusive and not self.cpus


@dataclass(frozen=True)
class Taken:
    """What other open leases hold. ``items``: pool to items; ``mib``: memory."""

    items: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mib: int = 0


class InUse(HostFault):
    """What the job needs is another job's, which may have ended without releasing it."""


class NoFit(Exception):
    """The claims do not fit; carries why. Refused or a host fault, whoever catches it knows."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(str(refusal))


def place(
    journal: Journal, claims: Sequence[Sequence[Claim]], share: NodeShare, paths: Paths
) -> list[Placement]:
    """Return a placement for each guest, leased in ``journal``; all or nothing.

    As root, before anything else of the job is acquired. ``claims`` are those of each guest, by
    its index on this node.

    Raises Refused if they can never fit this job's share of this node, InUse if something is only
    taken now (or the node is another user's alone), HostFault.
    """
    try:
        plan(claims, share, Taken())
    except NoFit as misfit:
        raise Refused(misfit.refusal) from None
    with node_lock(paths):
        states = _states(paths)
        _check_alone(journal, share, states)
        try:
            placements = plan(claims, share, taken_by(states))
        except NoFit as misfit:
            raise InUse(f"in use by other jobs: {misfit.refusal}", stage="plan") from None
        alone = [Lease(NODE, "alone")] if share.alone else []
        leases: list[tuple[Lease, int | None]] = [(lease, None) for lease in alone]
        for index, placement in enumerate(placements):
            leases += [(lease, index) for lease in _leases(placement, claims[index], index)]
        journal.acquire_leases(leases, phase="plan")
    return placements


def _states(paths: Paths) -> list[JournalState]:
    states = []
    for path in journals(paths):
        try:
            states.append(read(path))
        except (FileNotFoundError, EmptyJournal):
            continue
    return states


def _check_alone(journal: Journal, share: NodeShare, states: Sequence[JournalState]) -> None:
    for state in states:
        if state.header.uid == journal.header.uid or not state.leases:
            continue
        theirs = any(lease.args["pool"] == NODE for lease in state.leases)
        if theirs or share.alone:
            whose = "that job" if theirs else "this job"
            raise InUse(
                f"job {state.header.id} of another user has guests here, and the node would be "
                f"the user's of {whose} alone, since its CPU ids are not known ([node] exclusive)",
                stage="plan",
            )


def taken_by(states: Sequence[JournalState]) -> Taken:
    """Return what the open leases of these journals hold."""
    items: dict[str, set[str]] = {}
    mib = 0
    for state in states:
        for lease in state.leases:
            items.setdefault(str(lease.args["pool"]), set()).add(str(lease.args["item"]))
            mib += int(lease.args["mib"])
    return Taken({pool: frozenset(held) for pool, held in items.items()}, mib)


def _leases(placement: Placement, claims: Sequence[Claim], index: int) -> list[Lease]:
    exclusive = {c.use for c in claims if isinstance(c, CoreClaim) and c.exclusive}
    cores = sorted(core for use in exclusive for core in placement.cores[use])
    leases = [Lease(CORE, str(core)) for core in cores]
    leases.append(Lease(MEMORY, f"g{index}", placement.memory_mib))
    leases += [Lease(pool, item) for pool, items in placement.leased.items() for item in items]
    return leases


# -- planning: pure ---------------------------------------------------------------------------


def plan(claims: Sequence[Sequence[Claim]], share: NodeShare, taken: Taken) -> list[Placement]:
    """Return a placement for each guest, given what is taken. Pure. Raises NoFit."""
    memory = _plan_memory(claims, share, taken)
    cores = choose_cores(
        [[c for c in guest if isinstance(c, CoreClaim)] for guest in claims],
        share,
        frozenset(int(item) for item in taken.items.get(CORE, ())),
    )
    pools = _plan_pools(claims, taken)
    within = share.usable if share.cpus or share.reserve_cores else ()
    return [
        Placement(cores=cores[i], share=within, memory_mib=memory[i], leased=pools[i])
        for i in range(len(claims))
    ]


def choose_cores(
    claims: Sequence[Sequence[CoreClaim]], share: NodeShare, taken: frozenset[int]
) -> list[dict[str, tuple[int, ...]]]:
    """Return CPU ids per guest and use. Pure; the seam where the node's topology comes in.

    Exclusive claims get distinct cores that nobody has leased, lowest first. Shared ones get the
    share without exclusive cores; an empty tuple means the whole share.
    Raises NoFit.
    """
    usable = share.usable
    limit = len(usable) if share.cpu_count is None else min(share.cpu_count, len(usable))
    wanted = sum(c.count for guest in claims for c in guest if c.exclusive)
    largest = max((c.count for guest in claims for c in guest if not c.exclusive), default=0)
    free = [core for core in usable if core not in taken]
    for count, most, what in (
        (largest, limit, "one guest's CPUs"),
        (wanted, min(limit, len(free)), "CPUs of their own for all guests together"),
    ):
        if count > most:
            raise NoFit(
                Refusal(
                    f"{count} {what}: more than the job can have on this node",
                    key="vcpus",
                    value=str(count),
                    limit=f"{most} CPUs",
                    fix="ask the batch system for more CPUs per node, or for smaller guests",
                )
            )
    own = iter(free)
    chosen: list[dict[str, list[int]]] = []
    for guest in claims:
        uses: dict[str, list[int]] = {}
        for claim in guest:
            mine = [next(own) for _ in range(claim.count)] if claim.exclusive else []
            uses.setdefault(claim.use, []).extend(mine)
        chosen.append(uses)
    own_cores = {core for uses in chosen for cores in uses.values() for core in cores}
    avoid = (own_cores | taken) & set(usable)
    rest = tuple(core for core in usable if core not in avoid) if avoid else ()
    return [{use: tuple(cores) or rest for use, cores in uses.items()} for uses in chosen]


def _plan_memory(claims: Sequence[Sequence[Claim]], share: NodeShare, taken: Taken) -> list[int]:
    memory = [sum(c.mib for c in guest if isinstance(c, MemoryClaim)) for guest in claims]
    node = max(0, share.node_mem_mib - share.reserve_mib - taken.mib)
    limit, what = node, "the node's memory"
    if share.mem_mib is not None and share.mem_mib < node:
        limit, what = share.mem_mib, "the job's memory on this node"
    if sum(memory) > limit:
        raise NoFit(
            Refusal(
                f"the guests of this node need {show_mib(sum(memory))} with QEMU's own; "
                f"more than {what}",
                key="ram",
                value=show_mib(max(memory)),
                limit=show_mib(limit),
                fix="ask for less ram or fewer guests, or ask the batch system for more memory",
            )
        )
    return memory


def _plan_pools(
    claims: Sequence[Sequence[Claim]], taken: Taken
) -> list[dict[str, tuple[str, ...]]]:
    used = {pool: set(items) for pool, items in taken.items.items()}
    wanted: Counter[str] = Counter()
    result: list[dict[str, tuple[str, ...]]] = []
    for guest in claims:
        mine: dict[str, tuple[str, ...]] = {}
        for claim in guest:
            if not isinstance(claim, PoolClaim):
                continue
            if claim.pool in OWN_POOLS:
                raise ValueError(f"pool {claim.pool} is the ledger's own")
            held = used.setdefault(claim.pool, set())
            free = [item for item in dict.fromkeys(claim.items) if item not in held]
            wanted[claim.pool] += claim.count
            if len(free) < claim.count:
                raise NoFit(
                    Refusal(
                        f"the guests of this node need {wanted[claim.pool]} of {claim.pool}",
                        key=claim.pool,
                        value=str(wanted[claim.pool]),
                        limit=f"{len(set(claim.items))} on this node, {len(free)} free",
                    )
                )
            got = tuple(free[: claim.count])
            held.update(got)
            mine[claim.pool] = (*mine.get(claim.pool, ()), *got)
        result.append(mine)
    return result
