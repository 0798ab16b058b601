"""Classification of failed starts: a fault that a user can cause must not blame the node."""

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holding import holding
from patience import LONG
from vtorque_core.api import hookimpl
from vtorque_core.api.batch_system import BatchJob, Outcome
from vtorque_core.api.claims import PoolClaim
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.locks import Busy
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.start import boot, prologue, start_order
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.node.start.start_order import excuse_node, start_job
from vtorque_core.plan.placement import ledger
from vtorque_core.resources import stopped_daemons

JOB = BatchJob("7.srv", "nobody-of-this-name", "n1", ("n1",), b"")


class RecordingAdapter:
    """An adapter that only records its calls."""

    def __init__(self):
        self.outcomes = []

    def finish(self, job, outcome, reason, *, hook_waits):
        self.outcomes.append((outcome, reason))
        return 0


@pytest.fixture
def outcome(monkeypatch, tmp_path):
    """Return the result of a prologue whose start, or lock, raises this error."""

    def end(error, where="start_job"):
        def fail(*_):
            raise error

        told = RecordingAdapter()
        monkeypatch.setattr(prologue, where, fail)
        (tmp_path / "locks").mkdir(exist_ok=True)
        paths = type(Site().paths)(tmp_path, tmp_path)
        site = type("OneSite", (), {"paths": paths, "batch": Site().batch, "node": Site().node})()
        prologue._run(JOB, site, None, told, prologue.StartHook())
        ((found, _),) = told.outcomes
        return found

    return end


def test_outcome_is_refused_or_host_fault_by_error_type(outcome):
    assert outcome(Refused("no")) is Outcome.REFUSED
    assert outcome(HostFault("libvirt is dead")) is Outcome.HOST_FAULT
    assert outcome(RuntimeError("a defect")) is Outcome.HOST_FAULT


def test_silent_batch_system_is_a_host_fault_and_a_damaged_request_refused():
    """A problem that would end the job in the job shell is not the user's mistake."""
    with pytest.raises(HostFault, match="does not report all data of the job: no answer"):
        start_job(replace(JOB, unknown="no answer"), None, None, None)
    with pytest.raises(Refused, match="is damaged"):
        start_job(replace(JOB, bad_request="is damaged", unknown="no answer"), None, None, None)


def test_claims_of_other_jobs_are_not_the_nodes_fault(outcome):
    assert outcome(ledger.InUse("in use by other jobs")) is Outcome.IN_USE


def test_held_job_lock_is_not_the_nodes_fault(outcome):
    assert outcome(Busy("locked"), where="job_lock") is Outcome.NOT_HERE


@pytest.mark.parametrize(
    ("phase", "blamed"),
    [
        ("plan", True),
        ("render domain", True),
        ("pre-boot", False),
        ("boot", False),
        ("ready", False),
    ],
)
def test_node_is_blamed_only_before_the_user_takes_part(phase, blamed):
    start = StartAttempt(JobAttempt("7.srv", 0, "u", 1), None, None, 0.0, None, None, phase=phase)
    with pytest.raises(HostFault) as caught, excuse_node(start):
        raise HostFault("it did not work")
    assert caught.value.blames_node is blamed


@pytest.mark.parametrize(
    ("source", "phase", "error"),
    [
        ("/home/u/image", "ready", Refused),
        ("/home/u/image", "boot", HostFault),
        ("", "ready", HostFault),
    ],
)
def test_job_is_refused_if_own_image_does_not_become_ready(source, phase, error):
    start = StartAttempt(JobAttempt("7.srv", 0, "u", 1), None, None, 0.0, None, None, phase=phase)
    start.guests = [SimpleNamespace(image=SimpleNamespace(source=source))]
    with pytest.raises(error) as caught, excuse_node(start):
        raise HostFault("the guest has ended", detail=("| the console",))
    assert "the guest has ended" in str(caught.value)
    assert caught.value.detail == ("| the console",)


def own_guest(tmp_path, source):
    """Return a start and the boot of its guest, whose lock file is ``fs-work.lock``."""
    start = StartAttempt(JobAttempt("7.srv", 0, "u", 1), None, None, 0.0, None, None, phase="boot")
    image = SimpleNamespace(source=source)
    plan = SimpleNamespace(image=image, hostname="vm", state_dir=tmp_path, uuid="")
    start.guests = [plan]
    each, lock = SimpleNamespace(plan=plan), str(tmp_path / "fs-work.lock")
    return start, SimpleNamespace(start=start, each=each, guest=plan, uri="", _locks=[lock])


@pytest.mark.parametrize(("source", "error"), [("/home/u/image", Refused), ("", HostFault)])
def test_job_is_refused_if_own_image_ends_its_guest_at_once(tmp_path, source, error, monkeypatch):
    """When root resumes it after its creation, so in the phase "boot"."""
    start, guest_boot = own_guest(tmp_path, source)

    def ended(*_):
        raise HostFault("the guest ended immediately")

    monkeypatch.setattr(hypervisor, "resume_domain", ended)
    guest_boot.worker = guest_boot.watch_daemons = contextlib.nullcontext
    with pytest.raises(error, match="the guest ended immediately"), excuse_node(start):
        boot.GuestBoot.resume(guest_boot)


@pytest.mark.parametrize(("source", "error"), [("/home/u/image", Refused), ("", HostFault)])
def test_job_is_refused_if_users_files_of_own_image_do_not_answer(
    tmp_path, source, error, monkeypatch
):
    """A user's FUSE file system can hang when QEMU connects to the daemon of a share."""
    monkeypatch.setattr(stopped_daemons, "HANDSHAKE", 0.1)
    start, guest_boot = own_guest(tmp_path, source)
    (tmp_path / "fs-work.lock").touch()
    with (
        holding(tmp_path / "fs-work.lock") as daemon,
        pytest.raises(error, match=r"\(fs-work\) did not answer"),
        excuse_node(start),
        boot.GuestBoot.watch_daemons(guest_boot),
    ):
        daemon.wait(LONG)


@pytest.mark.parametrize("patience", [0.0, 3.0])
def test_job_waits_for_leases_as_long_as_its_batch_system_allows(monkeypatch, patience):
    clock, tries, reaped, calls = [0.0], [], [], []

    def place(*_):
        tries.append(clock[0])
        raise ledger.InUse("in use by other jobs")

    monkeypatch.setattr(ledger, "place", place)
    monkeypatch.setattr(start_order.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(start_order.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    start = SimpleNamespace(journal=None, site=SimpleNamespace(paths=None), plugins=Plugins())
    with pytest.raises(ledger.InUse):
        let_hook_return = functools.partial(calls.append, 1)
        start_order._place_guests(
            start, (), None, lambda: reaped.append(1), let_hook_return, patience
        )
    assert bool(calls) == (patience > 0), "the hook does not return while the job waits for leases"
    assert tries == ([0.0, 0.0, 1.0, 2.0, 3.0] if patience else [0.0, 0.0])
    assert reaped == [1]


def test_reservations_of_a_plugin_disabled_for_the_job_still_apply(monkeypatch):
    away = PoolClaim("address", ("10.86.0.16",))
    plugin = SimpleNamespace(vtorque_reserved_items=hookimpl(lambda: [away]))
    plugins = Plugins()
    plugins.register("acme", plugin, "acme")
    found = []
    monkeypatch.setattr(ledger, "place", lambda *args: found.extend(args[-1]))
    withheld = plugins.withhold({"acme": "[[limits]]"})
    start = SimpleNamespace(journal=None, site=SimpleNamespace(paths=None), plugins=withheld)
    start_order._place_guests(start, (), None, lambda: None, lambda: None, 0.0)
    assert found == [away]
