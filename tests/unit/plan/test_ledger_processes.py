"""Random jobs on recorded machines, in eight processes and step by step: no double lease."""

import dataclasses
import json
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vtorque_core.api.claims import CacheClaim, CoreClaim, MemoryClaim, PoolClaim, RamClaim
from vtorque_core.api.host_topology import parse_cpus
from vtorque_core.base.errors import Refused
from vtorque_core.base.locks import job_lock, node_lock
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.live.cores import resize
from vtorque_core.plan.placement.ledger import InUse, leased_resources, place
from vtorque_core.plan.placement.model import NodeShare
from vtorque_core.plan.placement.topology import parse
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, read, walk

pytestmark = pytest.mark.e2e

DATA = Path(__file__).parents[3] / "testing/vtorque_testing/machines"
PROCESSES, JOBS = 8, 50
FULL = pytest.mark.full
RESERVE_CPUS, RESERVE_MIB = 4, 8192
CARDS = tuple(f"card{n}" for n in range(4))


def claims_of(dice, machine):
    """Return the claims of a random job's guests: every kind of claim, sizes to fill a node."""
    result = []
    for _ in range(dice.choice((1, 1, 2, 4))):
        vcpus, ram = dice.randint(1, 12), dice.choice((512, 4096, 30000, 100000))
        claims = [CoreClaim("vcpu", vcpus), MemoryClaim(ram, use="guest"), MemoryClaim(256)]
        own = dice.random() < 0.6
        if own:
            claims.append(CoreClaim("vcpu", vcpus, exclusive=True, whole_cores=dice.random() < 0.3))
        if dice.random() < 0.4:
            claims.append(CoreClaim("io", 1, exclusive=True, at_most=dice.randint(1, 4)))
        if dice.random() < 0.3:
            claims.append(PoolClaim("card", CARDS, 1, near={"card0": 0, "card1": 1}))
        if dice.random() < 0.2 and machine.nodes[0].pages:
            claims.append(RamClaim(page_kib=min(machine.nodes[0].pages)))
        if dice.random() < 0.3 and own and machine.caches[0].granularity_kib:
            claims.append(CacheClaim(3000))
        result.append(claims)
    return result


def check(paths, share):
    """Raise AssertionError unless everything leased exists, once, and is not the host's."""
    with node_lock(paths):
        held = list(walk(paths))
    machine = share.machine
    leases = [(s, lease.args) for s in held for lease in s.leases]
    items = Counter(
        (args["pool"], args["item"])
        for _, args in leases
        if args["pool"] not in ("memory", "share")
    )
    assert not [item for item, count in items.items() if count > 1]
    cores = {int(args["item"]): s.key for s, args in leases if args["pool"] == "core"}
    assert not set(cores) & set(share.reserved)
    for state, args in leases:  # no other thread floats over a core that a guest has exclusively
        if args["pool"] == "share":
            floats = set(parse_cpus(args["cpus"]))
            assert not [c for c in floats if cores.get(c, state.key) != state.key]
            assert not floats & set(share.reserved)
    taken = leased_resources(held)
    assert taken.mib <= machine.mem_mib - RESERVE_MIB
    assert sum(taken.mib_on.values()) == taken.mib  # each MiB is on some NUMA node
    for node in machine.nodes:
        assert taken.mib_on.get(node.id, 0) <= node.mem_mib
        for kib, count in node.pages.items():
            assert taken.pages.get((node.id, kib), 0) <= count * kib // 1024
    for bank in machine.caches:
        steps = [i for p, i in items if p == "cache" and i.startswith(f"L3-{bank.id}/")]
        assert len(steps) <= bank.steps


def start(paths, header, claims, share, counts):
    """Return the placements, retrying while others hold the resources; None: refused."""
    for _ in range(5000):
        with job_lock(paths, header.job.id), Journal.start(paths, header) as journal:
            try:
                return place(journal, claims, share, paths)[0]
            except Refused:
                counts["refused"] += 1
                journal.delete()
                return None
            except InUse:
                counts["waited"] += 1
                journal.delete()
        time.sleep(0.02)
    raise TimeoutError(f"job {header.job.id} was never placed")


def worker(number, seed, top, share, queue, results):
    """Start, resize and end jobs until the queue is empty; a model of prologue and epilogue."""
    dice = random.Random(f"{seed}-{number}")  # noqa: S311 - not a secret
    paths = Paths(top / "state", top / "run")
    counts = Counter()
    try:
        while (job := queue.get()) is not None:
            path = paths.journal / f"{job}.0.jsonl"
            mine = dataclasses.replace(share, cpu_count=dice.choice((None, 8, 16, 16, 32, 32, 64)))
            claims = claims_of(dice, share.machine)
            header = JobHeader(JobAttempt(str(job), 0, "u", 1000 + number), "local")
            got = start(paths, header, claims, mine, counts)
            if got is None:
                continue
            counts["placed"] += 1
            check(paths, share)
            for guest, placement in enumerate(got):
                if "io" in placement.most:
                    more = resize(paths, f"{job}.0", guest, "io", dice.randint(1, 4))
                    counts["resized"] += len(more.cores) != 1
            time.sleep(dice.random() * 0.05)
            check(paths, share)
            with job_lock(paths, str(job)), Journal.open(paths, path) as journal:
                for record in read(path).leases[:: dice.choice((1, 2))]:
                    journal.released(record.seq)
                journal.delete()
        results.put(dict(counts))
    except BaseException as error:  # a failed check must reach the test
        results.put(f"{type(error).__name__}: {error!r}")
        raise


@pytest.mark.parametrize(
    "name",
    ["epyc-4-numa", *(pytest.param(n, marks=FULL) for n in ("xeon-2x32-smt", "arm-4x32"))],
)
def test_fifty_jobs_from_eight_processes(name, tmp_path):
    machine = parse((DATA / f"{name}.xml").read_text())
    share = NodeShare(machine, reserve_cores=RESERVE_CPUS, reserve_mib=RESERVE_MIB, exclusive=False)
    context = multiprocessing.get_context("fork")
    queue, results = context.Queue(), context.Queue()
    for job in [*range(1, JOBS + 1), *[None] * PROCESSES]:
        queue.put(job)
    workers = [
        context.Process(target=worker, args=(n, name, tmp_path, share, queue, results))
        for n in range(PROCESSES)
    ]
    for process in workers:
        process.start()
    outcomes = [results.get(timeout=300) for _ in workers]
    for process in workers:
        process.join(180)
    assert [o for o in outcomes if isinstance(o, str)] == [], json.dumps(outcomes)
    total = sum((Counter(o) for o in outcomes), Counter())
    assert total["placed"] + total["refused"] == JOBS, total
    assert min(total["placed"], total["resized"], total["waited"]) >= 3, total
    paths = Paths(tmp_path / "state", tmp_path / "run")
    assert list(walk(paths)) == []
    assert leased_resources(list(walk(paths))).shares == {}


class Steps(RuleBasedStateMachine):
    """Jobs start, grow, shrink and end in any order; after each step everything is leased once."""

    machine = parse((DATA / "xeon-2x32-smt.xml").read_text())

    def __init__(self):
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="vtorque-steps-"))
        self.paths = Paths(self.top / "state", self.top / "run")
        self.share = NodeShare(
            self.machine, reserve_cores=RESERVE_CPUS, reserve_mib=RESERVE_MIB, exclusive=False
        )
        self.jobs = {}
        self.number = 0

    def teardown(self):
        for journal, _ in self.jobs.values():
            journal.delete()
        assert list(walk(self.paths)) == []
        shutil.rmtree(self.top)

    @rule(seed=st.integers(0, 10**6), count=st.sampled_from([None, 8, 16, 16, 32]))
    def start(self, seed, count):
        self.number += 1
        claims = claims_of(random.Random(seed), self.machine)  # noqa: S311 - not a secret
        journal = Journal.start(
            self.paths, JobHeader(JobAttempt(str(self.number), 0, "u", 1000), "local")
        )
        share = dataclasses.replace(self.share, cpu_count=count)
        try:
            placements, _ = place(journal, claims, share, self.paths)
            self.jobs[self.number] = journal, placements
        except (Refused, InUse):
            journal.delete()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), count=st.integers(0, 6))
    def resize(self, data, count):
        number = data.draw(st.sampled_from(sorted(self.jobs)))
        for guest, placement in enumerate(self.jobs[number][1]):
            if "io" in placement.most:
                now = resize(self.paths, f"{number}.0", guest, "io", count)
                assert 1 <= len(now.cores) <= min(placement.most["io"], max(count, 1))
                assert now.cores[0] == placement.cores["io"][0]
                assert set(now.cores[1:]) <= set(placement.growing)
                assert not set(now.cores) & set(now.floating)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def end(self, data):
        journal, _ = self.jobs.pop(data.draw(st.sampled_from(sorted(self.jobs))))
        journal.delete()

    @invariant()
    def nothing_is_leased_twice(self):
        check(self.paths, self.share)


TestSteps = Steps.TestCase
TestSteps.settings = settings(
    max_examples=settings().max_examples // 3, stateful_step_count=20, deadline=None, database=None
)
