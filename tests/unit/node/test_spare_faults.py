"""SIGKILL at every step of a start that takes a spare guest, on a recorded node: nothing is left.

The guest that was (or would have been) taken ends with the job or still waits, and there is no
other guest.
"""

import contextlib
import dataclasses
from unittest import mock

import pytest

import device_cases
from patience import LONG, eventually
from vtorque_core.base import hypervisor
from vtorque_core.node.end.reap import reap
from vtorque_core.node.start import spare_boot
from vtorque_core.records.reading import SPARE, walk
from vtorque_testing.faults import around_all, orphans, run_in_child, survive
from vtorque_testing.recorded import RecordedJob

pytestmark = pytest.mark.e2e

WANTED = {"img": "recorded", "vcpus": "1", "ram": "256M"}


@dataclasses.dataclass(frozen=True)
class SpareRig(RecordedJob):
    """A job with a waiting guest that no service keeps any more."""

    def boot(self):
        def work():
            with self.install_doubles():
                key = spare_boot.boot(self.node.site, self.node.plugins, "warm", 8, WANTED)
            (self.node.site.paths.job_state(key) / "g0/console.log").touch()

        run = run_in_child(work)
        assert not run.error, run

    @contextlib.contextmanager
    def install_doubles(self):
        quiet = mock.patch.object(hypervisor, "suspend_domain", lambda *_: None)
        alone = mock.patch.object(hypervisor, "cpu_shares", lambda *_: 0)
        with self.node.install_doubles(), quiet, alone:
            yield

    def start(self, last=None):
        self.boot()
        return super().start(last)

    def release(self):
        super().release()

        def work():
            with self.install_doubles():
                results = reap(self.node.site, lambda _: {})
                assert all(result.ok for result in results), results

        run = run_in_child(work)
        assert not run.error, run


@pytest.fixture
def rig(tmp_path):
    plugins = device_cases.load(("warm",))
    node = device_cases.node(tmp_path / "node", plugins, device_cases.Case({}, {}))
    job = node.job({"vcpus": "1", "ram": "256M"})
    with orphans() as processes:
        yield SpareRig(node, job, processes)


def claimed_spares(rig):
    return [r.args["key"] for s in walk(rig.node.site.paths) for r in s.open if r.kind == SPARE]


def test_start_claims_a_spare_guest_and_the_end_releases_it(rig):
    before = rig.observe()
    run = rig.start()
    assert not run.error, run
    (key,) = claimed_spares(rig)
    (domain,) = (rig.node.top / "domains").iterdir()
    assert key in domain.name
    rig.release()
    eventually(lambda: rig.observe() == before)  # forked processes end without a signal


def test_spare_guest_that_ended_during_the_claim_is_replaced_by_a_boot(rig):
    before = rig.observe()
    rig.boot()
    for domain in (rig.node.top / "domains").iterdir():
        domain.unlink()
    run = rig.node.start(rig.job)
    assert not run.error, run
    (domain,) = (rig.node.top / "domains").iterdir()
    assert "pcie-root-port" not in domain.read_text()
    rig.release()
    eventually(lambda: rig.observe() == before)  # forked processes end without a signal


@pytest.mark.parametrize(
    "part", [slice(3, None, 13), pytest.param(slice(None), marks=pytest.mark.full)]
)
def test_killed_start_with_a_spare_guest_is_released(rig, part):
    # Processes that a start has forked end without a signal, and a busy machine delays them.
    killed = survive(rig, around_all, part=part, patience=LONG)
    assert killed
