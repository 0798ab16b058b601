"""The ledger against a model: any order of starts, crashes and ends of jobs."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim
from vtorque_core.api.host_topology import flat
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.plan.placement.ledger import place
from vtorque_core.plan.placement.model import NodeShare
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader

CARDS = ("a", "b", "c", "d")
NODE = NodeShare(flat(tuple(range(6)), 4096), reserve_mib=96, exclusive=False)

guests = st.lists(
    st.tuples(
        st.integers(1, 7),  # vcpus
        st.booleans(),  # exclusive
        st.integers(1, 3000),  # MiB
        st.integers(0, 5),  # cards
        st.permutations(CARDS),
    ),
    min_size=1,
    max_size=3,
)


@dataclasses.dataclass
class ModelJob:
    """The model of a job that holds something."""

    uid: int
    journal: Journal
    alone: bool
    cores: list[int]
    mib: int
    cards: list[str]
    share: tuple[int, ...]


class Ledger(RuleBasedStateMachine):
    """Starts and ends jobs; after each step the leases must be those that were granted."""

    def __init__(self):
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="vtorque-ledger-"))
        self.paths = Paths(self.top / "state", self.top / "run")
        self.jobs: dict[int, ModelJob] = {}
        self.number = 0

    def teardown(self):
        for job in self.jobs.values():
            job.journal.close()
        shutil.rmtree(self.top)

    @rule(
        wanted=guests,
        uid=st.sampled_from([1000, 2000]),
        cpus=st.sampled_from([(), (0, 1, 2), (2, 3, 4, 5)]),
        exclusive=st.booleans(),
        mem=st.none() | st.integers(100, 4000),
    )
    def start(self, wanted, uid, cpus, exclusive, mem):
        self.number += 1
        share = dataclasses.replace(NODE, cpus=cpus, exclusive=exclusive, mem_mib=mem)
        claims = [
            (
                CoreClaim("vcpu", vcpus, exclusive=own),
                MemoryClaim(mib),
                PoolClaim("card", tuple(order), cards),
            )
            for vcpus, own, mib, cards, order in wanted
        ]
        header = JobHeader(JobAttempt(str(self.number), 0, "u", uid), "local")
        journal = Journal.start(self.paths, header)
        size = journal.path.stat().st_size
        usable = cpus or NODE.machine.cpus
        alone = exclusive and not cpus
        others = self.jobs.values()
        cores = sum(v for v, own, *_ in wanted if own)
        mib = sum(m for _, _, m, _, _ in wanted)
        cards = sum(c for *_, c, _ in wanted)

        shared = max((v for v, own, *_ in wanted if not own), default=0)

        def fits(taken_cores, shares, taken_mib, taken_cards):
            most = min(4000 - taken_mib, 4000 if mem is None else mem)
            return (
                cores <= len([c for c in usable if c not in shares])
                and cores + shared <= len([c for c in usable if c not in taken_cores])
                and mib <= most
                and cards <= len(CARDS) - taken_cards
            )

        possible = fits([], [], 0, 0)
        now = (
            possible
            and fits(
                [c for j in others for c in j.cores],
                [c for j in others for c in j.share],
                sum(j.mib for j in others),
                sum(len(j.cards) for j in others),
            )
            and not any(j.uid != uid and (alone or j.alone) for j in others)
        )
        try:
            got, _ = place(journal, claims, share, self.paths)
        except (Refused, HostFault) as error:
            assert isinstance(error, HostFault) == possible, error
            assert not now, error
            assert journal.path.stat().st_size == size
            journal.delete()
            return
        assert now
        own_cores = [
            core
            for placement, (_, own, *_) in zip(got, wanted, strict=True)
            if own
            for core in placement.cores["vcpu"]
        ]
        assert len(own_cores) == cores and set(own_cores) <= set(usable)
        for placement in got:
            assert set(placement.cores["vcpu"]) <= set(usable)
        given = [card for placement in got for card in placement.leased.get("card", ())]
        assert len(given) == cards
        self.jobs[self.number] = ModelJob(
            uid, journal, alone, own_cores, mib, given, got[0].share or usable
        )

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data):
        number = data.draw(st.sampled_from(sorted(self.jobs)))
        self.jobs.pop(number).journal.delete()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), cut=st.integers(1, 5))
    def tear_last_line(self, data, cut):
        """A crash during an append loses no lease."""
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        with job.journal.path.open("ab") as file:
            file.write(b'{"op":"phase"'[:-cut])
        Journal.open(self.paths, job.journal.path).close()

    @invariant()
    def nothing_is_given_twice(self):
        cores = [core for job in self.jobs.values() for core in job.cores]
        cards = [card for job in self.jobs.values() for card in job.cards]
        assert len(cores) == len(set(cores))
        assert len(cards) == len(set(cards))
        assert sum(job.mib for job in self.jobs.values()) <= 4000


TestLedger = Ledger.TestCase
TestLedger.settings = settings(stateful_step_count=20, deadline=None, database=None)
