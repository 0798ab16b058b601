"""Spare guests: when they end and when they are kept. Their domains are not libvirt's."""

import contextlib
import dataclasses
import fcntl
import os
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from vtorque_core.api.batch_system import JobState
from vtorque_core.api.boot_source import BootSource, ColdBoot, Offer
from vtorque_core.api.claims import CoreClaim, MemoryClaim, Placement
from vtorque_core.api.guest_driver import WarmDriver
from vtorque_core.api.host_topology import flat
from vtorque_core.api.job_files import Tree
from vtorque_core.api.values import JobRequest, hookimpl
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.locks import Busy, job_lock
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.reap import reap
from vtorque_core.node.end.teardown import ENDS, release_job
from vtorque_core.node.start import boot, spare_boot
from vtorque_core.node.start import spare as module
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.node.start.spare import WAITS, apply_offers, end_unclaimed, main
from vtorque_core.plan import host_ids, job_context
from vtorque_core.plan.domain.merge import MergedDomain
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.plan.placement.ledger import InUse
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, read
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.lease import Lease, SpareUse
from vtorque_testing import planned


@dataclasses.dataclass(frozen=True)
class Offered(BootSource):
    """A warm guest that a plugin offers."""

    key: str
    name = "warm"
    forbids = frozenset({"save"})
    fallback = True

    @property
    def warm_key(self):
        return self.key


def site_at(paths):
    return dataclasses.replace(Site(), paths=paths)


@pytest.fixture
def spare(paths, tmp_path):
    """Return the key of a spare guest that has a directory."""
    header = JobHeader(JobAttempt("spare-1", 0, "root", 0), "warm", spare="warm")
    with Journal.start(paths, header) as journal:
        journal.acquire(Tree(str(tmp_path / "has"), mode=0o700), plugin="core", phase="boot")
        journal.phase(WAITS)
    return header.job.key


@pytest.fixture
def job(paths, spare):
    """Return the journal of a job that has taken the guest."""
    with Journal.start(paths, JobHeader(JobAttempt("7", 0, "u", 1000), "local")) as journal:
        journal.acquire(SpareUse(spare), plugin="core", phase="plan")
    return journal.path


@pytest.fixture
def keeper_process(paths):
    """Simulate a running process that keeps the spare guests."""
    paths.run.mkdir(exist_ok=True)
    descriptor = os.open(paths.run / "warm.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def reaped(paths, lives=None):
    asked = []

    def alive(ids):
        asked.extend(ids)
        return lives or {}

    found = {r.job: r.action for r in reap(site_at(paths), alive)}
    assert "spare-1" not in asked
    return found


def test_reaper_keeps_a_spare_guest_that_its_daemon_keeps(paths, spare, keeper_process, tmp_path):
    assert reaped(paths) == {"spare-1": "alive"}
    assert (tmp_path / "has").exists()


def test_reaper_ends_a_spare_guest_without_a_daemon(paths, spare, tmp_path):
    paths.run.mkdir()
    (paths.run / "warm.lock").touch()  # of a killed process
    assert reaped(paths) == {"spare-1": "released"}
    assert not (tmp_path / "has").exists()
    assert not any(paths.kept.rglob("spare*"))


def test_claimed_spare_guest_ends_with_its_job(paths, job, tmp_path):
    assert reaped(paths, {"7": JobState.ALIVE}) == {"7": "alive", "spare-1": "alive"}
    assert (tmp_path / "has").exists()
    (report,) = release_job(paths, "7")
    assert report.clean and not job.exists()
    assert not (tmp_path / "has").exists()
    assert not list(paths.journal.iterdir())


def record_use(paths, key):
    with Journal.start(paths, JobHeader(JobAttempt("7", 0, "u", 1000), "local")) as journal:
        journal.acquire(SpareUse(key), plugin="core", phase="plan")


def test_reaper_keeps_a_spare_guest_that_is_claimed_during_the_check(paths, spare, tmp_path):
    def alive(_ids):
        record_use(paths, spare)
        return {}

    assert [(r.job, r.action) for r in reap(site_at(paths), alive)] == [("spare-1", "alive")]
    assert (tmp_path / "has").exists()


def test_reaper_of_a_single_spare_guest_keeps_a_claimed_one(paths, job, tmp_path):
    (result,) = reap(site_at(paths), lambda _: {}, only="spare-1")
    assert result.action == "alive"
    assert (tmp_path / "has").exists()


def test_reaper_keeps_spare_guests_while_a_journal_is_unreadable(paths, job, tmp_path):
    job.write_text("broken\n" * 2)
    found = {r.job: r.action for r in reap(site_at(paths), lambda _: {})}
    assert found == {"7": "unreadable", "spare-1": "unknown"}
    assert (tmp_path / "has").exists()


def test_claimed_spare_guest_is_not_ended_for_room(paths, spare, job, tmp_path):
    assert not end_unclaimed(paths, spare)
    assert (tmp_path / "has").exists()


def test_ending_a_spare_guest_for_room_is_idempotent(paths, spare, tmp_path, capsys):
    assert main(str(paths.state), str(paths.run), spare) == 0
    assert not (tmp_path / "has").exists()
    assert main(str(paths.state), str(paths.run), spare) == 0
    assert capsys.readouterr().out == "ended\nended\n"


def test_spare_guest_with_a_failed_release_can_no_longer_be_claimed(
    paths, spare, tmp_path, capsys, monkeypatch
):
    def fail(_self):
        raise OSError("no")

    monkeypatch.setattr(Tree, "release", fail)
    assert main(str(paths.state), str(paths.run), spare) == 1
    assert "no" in capsys.readouterr().err
    marks = [mark.name for mark in read(paths.journal / f"{spare}.jsonl").phases]
    assert ENDS in marks and marks[-1] != WAITS


def test_end_waits_for_the_holder_of_the_lock(paths, spare, tmp_path, monkeypatch):
    said, says = os.pipe()
    monkeypatch.setattr(module, "_stop", lambda *_: os.write(says, b"busy"))
    taken = job_lock(paths, "spare-1")
    taken.__enter__()
    pid = os.fork()
    if pid == 0:
        try:
            from vtorque_core.base import locks

            locks.close_inherited()
            os._exit(0 if end_unclaimed(paths, spare) else 1)
        finally:
            os._exit(2)
    os.close(says)
    assert os.read(said, 4) == b"busy"  # nothing, if it ended without waiting
    assert os.waitpid(pid, os.WNOHANG)[0] == 0
    assert (tmp_path / "has").exists()
    taken.__exit__(None, None, None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(said)
    assert not (tmp_path / "has").exists()


@pytest.fixture
def destroyed_domains(monkeypatch):
    """Return the uuids of domains that were destroyed."""
    found = []
    monkeypatch.setattr(hypervisor, "destroy_domain", lambda _uri, uuid, _: found.append(uuid))
    monkeypatch.setattr(module, "_PATIENCE", 0.3)
    return found


@contextlib.contextmanager
def lock_of_another(lock):
    """Let another process hold a lock, like a process that boots a guest."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_booting_spare_guest_is_stopped_for_room(paths, spare, take_guests, destroyed_domains):
    with lock_of_another(paths.job_lock("spare-1")), pytest.raises(Busy):
        end_unclaimed(paths, spare)
    assert set(destroyed_domains) == {"u-u"}


def test_claimed_spare_guest_is_not_stopped_while_its_lock_is_held(
    paths, spare, take_guests, destroyed_domains
):
    take_guests("7")
    with lock_of_another(paths.job_lock("spare-1")), pytest.raises(Busy):
        end_unclaimed(paths, spare)
    assert destroyed_domains == []


def test_spare_guest_is_not_stopped_while_the_node_lock_is_held(
    paths, spare, take_guests, destroyed_domains, monkeypatch
):
    def fail(*_):
        raise Busy("the node's lock")

    monkeypatch.setattr(module, "retire_spare", fail)
    with pytest.raises(Busy, match="node's lock"):
        end_unclaimed(paths, spare)
    assert destroyed_domains == []


def test_spare_guest_stopped_after_another_failure_is_not_rebooted(paths, monkeypatch):
    stopped, anew = threading.Event(), []
    prepared = []
    for index in (0, 1):
        guest = planned.guest_plan(index=index, source=Offered(f"spare-{index}.0"))
        prepared.append(GuestSpec(guest, mock.Mock(), "p", (), MergedDomain(()), ()))

    def cold(each, _error):
        anew.append(each.guest.index)
        plan = dataclasses.replace(each.guest, source=ColdBoot())
        prepared = dataclasses.replace(each.each, plan=plan)
        return boot.GuestBoot(each.start, prepared, each.accel, each.failed)

    def await_ready(each):
        if each.guest.index == 1 and each.source.fallback:
            assert stopped.wait(60)
        raise HostFault(f"guest {each.guest.index} is not ready")

    monkeypatch.setattr(hypervisor, "destroy_domain", lambda *_: stopped.set())
    monkeypatch.setattr(boot.kvm, "choose", lambda *_: SimpleNamespace(type="tcg", warning=""))
    monkeypatch.setattr(boot, "boot_one", lambda *_: None)
    monkeypatch.setattr(boot, "await_ready", await_ready)
    monkeypatch.setattr(boot, "_fall_back", cold)
    node = SimpleNamespace(accel="tcg", qemu_user="q", libvirt_uri="test:///default")
    start = mock.Mock(site=SimpleNamespace(paths=paths, node=node), deadline=time.monotonic() + 60)
    with pytest.raises(HostFault, match="guest 0 is not ready"):
        boot.boot_all(start, boot.guest_boots(start, prepared))
    assert anew == [0]


# -- A job takes a guest ---------------------------------------------------------------------------


@pytest.fixture
def take_guests(paths, spare, monkeypatch):
    """Return a function that lets a job take guests; a plugin offers the spare guest for any."""
    monkeypatch.setattr(hypervisor, "qemu_uid", lambda _: 64055)
    with Journal.open(paths, paths.journal / f"{spare}.jsonl") as journal:
        domain = Domain("vt-spare", "u-u", "test:///default", lambda: None)
        journal.acquire(domain, plugin="core", phase="boot", guest=0)
    plugins = Plugins()
    offers = hookimpl(lambda guests: [Offer(g.plan.index, Offered(spare)) for g in guests])
    plugins.register("warm", SimpleNamespace(vtorque_rendered_sources=offers), "vtorque-warm 1")
    node = SimpleNamespace(accel="tcg", qemu_user="q", uefi="", allow_qemu_args=False, guest_uids=0)
    site = SimpleNamespace(paths=paths, node=node, templates=None)

    def taken(number="7", gone=(), **changes):
        guest = planned.guest_plan(**changes)
        driver = mock.create_autospec(WarmDriver, instance=True)
        each = GuestSpec(guest, driver, "p", (), MergedDomain(()), ())
        header = JobHeader(JobAttempt(number, 0, "u", 1000), "local")
        with Journal.start(paths, header) as journal:
            start = StartAttempt(
                header.job, guest.user, site, time.monotonic() + 60, journal, plugins
            )
            (found,) = apply_offers(start, [each], gone)
        return found.plan.source.warm_key

    taken.node = node
    return taken


def test_claimed_spare_guest_is_never_offered_again(paths, spare, take_guests):
    assert take_guests("7") == spare
    (paths.journal / "7.0.jsonl").unlink()  # as an admin does who abandons its records
    assert take_guests("8") == ""


@pytest.mark.parametrize("fault", [Busy("locked"), HostFault("libvirtd is dead")])
def test_spare_guest_that_does_not_end_for_room_does_not_blame_the_node(
    paths, spare, take_guests, monkeypatch, fault
):
    monkeypatch.setattr(module, "end_unclaimed", mock.Mock(side_effect=fault))
    with pytest.raises(InUse, match=f"cannot end warm guest spare-2.0: {fault}") as raised:
        take_guests(gone=[spare, "spare-2.0"])
    assert not raised.value.blames_node


@pytest.mark.parametrize(
    ("leased", "first", "fits"),
    [("", 0, True), ("", 70000, False), ("70001", 70000, True), ("70001", 80000, False)],
)
def test_spare_guest_with_a_uid_outside_guest_uids_is_not_claimed(
    paths, spare, take_guests, leased, first, fits
):
    take_guests.node.guest_uids = first
    if leased:
        with Journal.open(paths, paths.journal / f"{spare}.jsonl") as journal:
            journal.acquire_leases([(Lease(host_ids.POOL, leased), 0)], phase="plan")
    mine = {host_ids.POOL: (str(first + 2),)} if first else {}
    assert take_guests(placement=Placement(leased=mine)) == (spare if fits else "")


def test_spare_guest_that_cannot_be_saved_is_not_claimed_by_a_job_that_needs_it(spare, take_guests):
    assert take_guests(request=JobRequest({}, needs=frozenset({"save"}))) == ""
    assert take_guests("8", request=JobRequest({}, needs=frozenset({"suspend"}))) == spare


def test_spare_guest_with_dedicated_cores_is_not_booted(paths, monkeypatch):
    planned_one = SimpleNamespace(
        plan=planned.guest_plan(),
        driver=mock.create_autospec(WarmDriver, instance=True),
        claims=(CoreClaim("vcpu", 1, exclusive=True), MemoryClaim(256)),
    )
    node = SimpleNamespace(
        start_timeout=60, libvirt_uri="", host_reserve_cores=0, host_reserve_ram=0, guest_uids=0,
        qemu_user="q",
    )  # fmt: skip
    monkeypatch.setattr(spare_boot.policy, "check_options", lambda *_: None)
    monkeypatch.setattr(job_context.node_hardware, "topology", lambda _: flat((0, 1, 2, 3), 4096))
    monkeypatch.setattr(spare_boot, "replace", lambda each, **_: each)
    monkeypatch.setattr(spare_boot.plan, "plan_guests", lambda *_: [planned_one])
    site = SimpleNamespace(paths=paths, node=node)
    with pytest.raises(Refused, match="dedicated cores"):
        spare_boot.boot(site, Plugins(), "warm", 8, {})
    assert not list(paths.journal.iterdir())


def test_claimed_spare_guest_survives_a_late_failure_of_its_boot(paths, tmp_path, monkeypatch):
    """A job can claim the guest before its boot ends, so the failed boot must not release it."""

    def waits_and_fails(start, job, wanted, ports):
        start.acquire(Tree(str(tmp_path / "has"), mode=0o700))
        start.enter(WAITS)
        if ports:
            record_use(paths, start.job.key)
        raise OSError("no space left")

    monkeypatch.setattr(spare_boot, "_boot", waits_and_fails)
    site = SimpleNamespace(paths=paths, node=SimpleNamespace(start_timeout=60))
    for of_job in (0, 1):
        with pytest.raises(OSError, match="no space"):
            spare_boot.boot(site, Plugins(), "warm", of_job, {})
        assert (tmp_path / "has").exists() == bool(of_job)


@pytest.mark.parametrize(
    ("had", "set_to"), [(1024, [16, 1024]), (100, [2, 100]), (0, [])], ids=["v1", "v2", "none"]
)
def test_booting_spare_guest_has_low_cpu_shares_until_ready(monkeypatch, had, set_to):
    """libvirt sets the shares in the guest's control group if the host has control groups."""
    shares = [had]

    def cpu_shares(uri, uuid, wanted=0):
        before = shares[-1]
        if before and wanted:
            shares.append(wanted)
        return before

    monkeypatch.setattr(spare_boot.hypervisor, "cpu_shares", cpu_shares)
    with spare_boot._low_priority(planned.guest_plan(), "test:///default"):
        assert shares[1:] == set_to[:1]
    assert shares[1:] == set_to
