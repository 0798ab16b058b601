"""Teardown releases everything. A failed release keeps its dependencies. It is idempotent."""

import fcntl
import json
import os
import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from acme_card import AcmeCard, AcmePlugin, CardManager, loaded, starter
from patience import LONG, eventually, with_more_time
from processes import alive
from vtorque_core.api import children
from vtorque_core.api.children import Child
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.job_files import File, Tree
from vtorque_core.api.values import hookimpl
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import node_lock
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.end import teardown as module_under_test
from vtorque_core.node.end.teardown import teardown
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader, journals, read
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.kinds import CORE_KINDS
from vtorque_core.resources.lease import Lease, SpareUse
from vtorque_core.resources.netfilter import Netfilter


def numbers(outcomes):
    return [outcome.seq for outcome in outcomes]


def test_resources_are_released_in_reverse_and_the_journal_last(
    paths, start, tmp_path, monkeypatch
):
    journal = start()
    journal.acquire_leases([(Lease("core", "1"), 0)], phase="plan")
    journal.take(Tree(str(tmp_path / "job")))
    journal.take(File(str(tmp_path / "job" / "f")), guest=0)
    journal.take(AcmeCard(str(tmp_path / "job" / "card")), guest=0)
    report = teardown(journal.path, paths, loaded())
    assert numbers(report.released) == [4, 3, 2, 1]
    assert report.clean and report.lines() == []
    assert not (tmp_path / "job").exists()
    assert journals(paths) == []
    assert list((paths.run / "locks").iterdir()) == []
    again = teardown(journal.path, paths, loaded())
    assert again.clean and again.released == []


def test_spare_guest_keeps_its_uid_while_a_record_of_its_job_is_open(paths, start, tmp_path):
    header = JobHeader(JobAttempt("spare-1", 0, "root", 0), "warm", spare="warm")
    with Journal.start(paths, header) as spare:
        spare.acquire_leases([(Lease("qemu-uid", "7"), 0)], phase="plan")
    journal = start()
    journal.take(SpareUse(header.job.key), guest=0)
    mood = tmp_path / "card.mood"
    journal.take(AcmeCard(str(tmp_path / "card")), guest=0)
    mood.write_text("fail")
    report = teardown(journal.path, paths, loaded())
    assert numbers(report.failed) == [2] and numbers(report.held) == [1]
    assert read(spare.path).leases
    mood.unlink()
    assert teardown(journal.path, paths, loaded()).clean
    assert journals(paths) == []


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("fail", "card is busy"),
        ("hang", "timed out after {limit:g} s"),
        ("die", "exited with status 3 without a result"),
        ("exit", "SystemExit: leaving"),
    ],
)
def test_failing_release_keeps_its_dependencies_and_does_not_stop_others(tmp_path, mood, error):
    def attempt(limit):
        top = tmp_path / f"{limit}"
        top.mkdir()
        one_fails(top, mood, error.format(limit=limit), limit)

    with_more_time(attempt, *((0.5, 5, 20) if mood == "hang" else (LONG,)))


def one_fails(tmp_path, mood, error, limit):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    journal = starter(paths)()
    journal.acquire_leases([(Lease("card", "a"), 0), (Lease("card", "b"), 1)], phase="plan")
    journal.take(Tree(str(tmp_path / "job")))
    bad = journal.take(AcmeCard(str(tmp_path / "bad")), guest=0)
    journal.take(AcmeCard(str(tmp_path / "good")), guest=0)
    journal.take(AcmeCard(str(tmp_path / "other")), guest=1)
    (tmp_path / "bad.mood").write_text(mood)
    report = teardown(journal.path, paths, loaded(), release_timeout=limit)
    assert numbers(report.failed) == [bad]
    assert report.failed[0].message == f"{error} (try 1)"
    assert numbers(report.held) == [3, 1]
    assert sorted(numbers(report.released)) == [2, 5, 6]
    state = read(journal.path)
    assert [r.seq for r in state.open] == [1, 3, bad]
    assert (state.records[bad].tries, state.records[bad].error != "") == (1, True)
    assert any("held until" in line for line in report.lines())
    (tmp_path / "bad.mood").unlink()
    report = teardown(journal.path, paths, loaded())
    assert report.clean and numbers(report.released) == [bad, 3, 1]
    assert not (tmp_path / "bad").exists()


def test_hanging_release_is_killed_with_its_children(tmp_path):
    with_more_time(partial(hang, tmp_path), 0.3, 5, 20)


def hang(tmp_path, limit):
    def work():
        if os.fork() == 0:
            (tmp_path / f"pid{limit}").write_text(str(os.getpid()))
        time.sleep(1000)

    assert Child(work, limit).wait() == f"timed out after {limit:g} s"
    pid = (tmp_path / f"pid{limit}").read_text()
    eventually(lambda: not alive(pid))


def test_records_stay_open_after_the_deadline(paths, start, tmp_path):
    journal = start()
    journal.take(AcmeCard(str(tmp_path / "a")))
    report = teardown(journal.path, paths, loaded(), deadline=0)
    assert "teardown_timeout exceeded" in report.failed[0].message
    assert (tmp_path / "a").exists()
    assert teardown(journal.path, paths, loaded()).clean


def test_record_of_an_uninstalled_plugin_is_an_orphan_with_a_fix(paths, start, tmp_path):
    journal = start()
    journal.acquire_leases([(Lease("card", "a"), 0), (Lease("memory", "g0", 5), 0)], phase="plan")
    card = journal.take(AcmeCard(str(tmp_path / "card")), guest=0)
    journal.acquire(File(str(tmp_path / "f")), plugin="core", phase="x", guest=0)
    report = teardown(journal.path, paths, Plugins())
    assert numbers(report.orphaned) == [card]
    assert report.orphaned[0].message.endswith(
        "install vtorque-acme==1.0.0 from where its author offers it, then vtorque reap 42.srv; "
        "or vtorque reap --abandon 42.srv:3"
    )
    assert numbers(report.held) == [2, 1]
    assert not (tmp_path / "f").exists()
    assert len(read(journal.path).leases) == 2
    broken = Plugins()
    broken.broken["acme"] = "ImportError: no libacme"
    report = teardown(journal.path, paths, broken)
    assert "acme cannot be loaded (ImportError: no libacme)" in report.orphaned[0].message
    assert teardown(journal.path, paths, loaded()).clean
    assert not (tmp_path / "card").exists()


def test_abandoned_record_releases_its_leases(paths, start, tmp_path):
    journal = start()
    journal.acquire_leases([(Lease("card", "a"), 0)], phase="plan")
    card = journal.take(AcmeCard(str(tmp_path / "card")), guest=0)
    report = teardown(journal.path, paths, Plugins(), abandon=[card])
    assert report.clean and "2 acme-card abandoned" in report.notes[0]
    assert (tmp_path / "card").exists()


def test_teardown_after_a_reboot_releases_only_files(paths, start, tmp_path):
    journal = start(boot="another")
    file = tmp_path / "f"
    journal.take(File(str(file)))
    journal.take(AcmeCard(str(tmp_path / "card")))
    (tmp_path / "card.mood").write_text("fail")
    assert teardown(journal.path, paths, loaded()).clean
    assert not file.exists()
    assert (tmp_path / "card").exists()  # release() was not called


def test_last_look_hook_runs_once_and_does_not_stop_the_teardown(tmp_path):
    def attempt(limit):
        top = tmp_path / f"{limit}"
        top.mkdir()
        last_look(top, limit)

    with_more_time(attempt, 0.3, 5, 20)


def last_look(tmp_path, limit):
    paths = Paths(tmp_path / "state", tmp_path / "run")
    log = tmp_path / "log"
    journal = starter(paths)()
    journal.take(AcmeCard(str(tmp_path / "card")))
    (tmp_path / "card.mood").write_text("fail")
    plugins = loaded(AcmePlugin(log), AcmePlugin(mood="raise"), AcmePlugin(mood="hang"))
    report = teardown(journal.path, paths, plugins, release_timeout=limit)
    assert json.loads(log.read_text()) == ["42.srv", 0, "u", []]
    assert [note.partition(",")[0] for note in report.notes] == ["plugin acme1", "plugin acme2"]
    assert "counters are gone" in report.notes[0]
    assert "timed out after" in report.notes[1]
    assert numbers(report.failed) == [1]
    (tmp_path / "card.mood").unlink()
    report = teardown(journal.path, paths, plugins, release_timeout=limit)
    assert report.clean and report.notes == []
    assert len(log.read_text().splitlines()) == 1


def test_plugin_that_fails_to_list_its_kinds_is_named(paths, start, tmp_path):
    class Bad:
        @hookimpl
        def vtorque_resources(self):
            raise RuntimeError("no driver")

    journal = start()
    journal.take(AcmeCard(str(tmp_path / "card")))
    report = teardown(journal.path, paths, loaded(Bad()))
    assert report.notes == ["plugin acme: no driver"]
    assert numbers(report.orphaned) == [1]


# -- domains ----------------------------------------------------------------------------------


@pytest.fixture
def domains(tmp_path, monkeypatch):
    """A hypervisor whose domains are files.

    Each destroy waits until as many run at once as the file ``at_once`` contains.
    """
    top = tmp_path / "domains"
    top.mkdir()
    (tmp_path / "at_once").write_text("1")

    def create(uri, xml, paused=False):
        (top / xml).touch()

    def destroy(uri, uuid, deadline_s):
        if (top / uuid).exists():
            (tmp_path / f"{uuid}.ends").touch()
            least = int((tmp_path / "at_once").read_text())
            eventually(lambda: len([*tmp_path.glob("*.ends")]) >= least)
        if (top / f"{uuid}.stuck").exists():
            raise HostFault("QEMU is in state D")
        (top / uuid).unlink(missing_ok=True)

    monkeypatch.setattr(hypervisor, "create_domain", create)
    monkeypatch.setattr(hypervisor, "destroy_domain", destroy)
    return top


def domain(guest):
    uuid = f"u{guest}"
    return Domain(f"vt-{guest}", uuid, "x", partial(hypervisor.create_domain, "x", uuid))


def test_guests_are_destroyed_concurrently(paths, start, domains, tmp_path):
    """None has ended before the destruction of each has begun."""
    (tmp_path / "at_once").write_text("4")
    journal = start()
    for guest in range(4):
        journal.take(Tree(str(tmp_path / f"g{guest}")), guest=guest)
    for guest in range(4):
        journal.take(domain(guest), guest=guest)
    assert teardown(journal.path, paths, loaded()).clean
    assert list(domains.iterdir()) == []
    assert not list(tmp_path.glob("g*"))


def test_helpers_of_a_guest_are_released_concurrently(paths, start, domains, tmp_path, monkeypatch):
    """None has ended before the release of each has begun, and the domain has ended before."""
    journal = start()
    helpers = [Netfilter("vt0", "52:54:00:00:00:01"), DaemonProcess(("p",), str(tmp_path / "lock"))]
    for each in helpers:
        monkeypatch.setattr(type(each), "create", lambda _: None)

        def release(resource):
            assert list(domains.iterdir()) == []
            (tmp_path / f"{resource.kind}.helper").touch()
            eventually(lambda: len([*tmp_path.glob("*.helper")]) == len(helpers))

        monkeypatch.setattr(type(each), "release", release)
        journal.acquire(each, plugin="core", phase="pre-boot", guest=0)
    journal.take(domain(0), guest=0)
    (tmp_path / "at_once").write_text("0")
    assert teardown(journal.path, paths, loaded()).clean


def test_domain_that_does_not_end_keeps_all_resources_of_its_guest(paths, start, domains, tmp_path):
    journal = start()
    leases = [(Lease("address", "10.0.0.1"), 0), (Lease("address", "10.0.0.2"), 1)]
    journal.acquire_leases(leases, phase="plan")
    for guest in (0, 1):
        journal.take(Tree(str(tmp_path / f"g{guest}")), guest=guest)
        journal.take(File(str(tmp_path / f"g{guest}" / "overlay")), guest=guest)
        journal.take(domain(guest), guest=guest)
    (domains / "u0.stuck").touch()
    report = teardown(journal.path, paths, loaded())
    assert [o.message for o in report.failed] == ["QEMU is in state D (try 1)"]
    assert (tmp_path / "g0" / "overlay").exists()
    assert not (tmp_path / "g1").exists()
    assert [r.args["item"] for r in read(journal.path).leases] == ["10.0.0.1"]
    (domains / "u0.stuck").unlink()
    assert teardown(journal.path, paths, loaded()).clean


@pytest.mark.parametrize("needs", [False, True])
def test_process_of_the_node_that_hangs_delays_only_what_it_needs(
    paths, start, domains, tmp_path, monkeypatch, needs
):
    """The process's record is later than those of the guest, because it starts while they boot."""
    journal = start()
    made = [journal.take(AcmeCard(str(tmp_path / "card")), guest=0)]
    made.append(journal.take(domain(0), guest=0))
    journal.take(CardManager(str(tmp_path / "manager")), needs=made if needs else ())
    monkeypatch.setattr(CardManager, "release", lambda _: time.sleep(60))
    report = teardown(journal.path, paths, loaded(), release_timeout=0.5, deadline=30)
    assert [o.kind for o in report.failed] == ["acme-manager"]
    assert numbers(report.held) == (made[::-1] if needs else [])
    assert numbers(report.released) == ([] if needs else made[::-1])


def test_core_leased_at_run_time_is_held_by_its_domain(paths, start, domains, tmp_path):
    """The lease's record is later than the domain's, but is released after the domain."""
    journal = start()
    journal.take(domain(0), guest=0)
    journal.acquire_leases([(Lease("core", "7", use="io"), 0)], phase="run")
    (domains / "u0.stuck").touch()
    assert [o.kind for o in teardown(journal.path, paths, loaded()).held] == ["lease"]
    (domains / "u0.stuck").unlink()
    assert teardown(journal.path, paths, loaded()).clean


def test_domain_that_appears_after_its_creator_was_killed_is_destroyed(
    paths, start, domains, tmp_path, monkeypatch
):
    """libvirtd continues to create it for a client that is dead."""
    monkeypatch.setattr(hypervisor, "create_domain", lambda uri, xml, **_: 1 / 0)

    def attempt(settle):
        monkeypatch.setattr(Domain, "retry_seconds", settle)
        journal = start()
        with pytest.raises(ZeroDivisionError):
            journal.take(domain(0), guest=0)
        late = threading.Timer(0.4 * settle, (domains / "u0").touch)
        late.start()
        clean = teardown(journal.path, paths, loaded()).clean
        late.join()
        left = [path.unlink() for path in domains.iterdir()]
        assert (clean, left) == (True, [])

    with_more_time(attempt, 0.5, 5, 20)


@pytest.mark.parametrize("known", [True, False], ids=["clock", "no clock"])
def test_clock_set_back_does_not_delay_a_release(
    paths, start, domains, tmp_path, monkeypatch, known
):
    """Otherwise the release would wait until a killed create() must have ended by the new clock."""
    monkeypatch.setattr(hypervisor, "create_domain", lambda uri, xml, **_: 1 / 0)
    monkeypatch.setattr(Domain, "retry_seconds", 0.1)
    journal = start()
    with monkeypatch.context() as tomorrow, pytest.raises(ZeroDivisionError):
        real = time.time
        tomorrow.setattr(time, "time", lambda: real() + 86400)
        journal.take(domain(0), guest=0)
    if not known:  # a journal of an older version
        journal.path.write_text(re.sub(r', "clock": [0-9.]+', "", journal.path.read_text()))
    assert (read(journal.path).records[1].clock is not None) == known
    report = teardown(journal.path, paths, loaded(), release_timeout=20)
    assert report.clean, report.lines()


def test_connections_are_closed_before_a_fork(paths, start, tmp_path, monkeypatch):
    journal = start()
    journal.take(AcmeCard(str(tmp_path / "card")))
    order = []
    monkeypatch.setattr(hypervisor, "close", lambda: order.append("close"))
    real = children.Child
    monkeypatch.setattr(module_under_test, "Child", lambda *a: (order.append("fork"), real(*a))[1])
    assert teardown(journal.path, paths, loaded()).clean
    assert order[0] == "close" and "fork" in order


# -- shared by the jobs of a node ---------------------------------------------------------------


def test_node_wide_resource_ends_with_its_last_job(paths, start, tmp_path):
    path = tmp_path / "manager"
    first, second = start("1"), start("2")
    first.take(CardManager(str(path)))
    second.take(CardManager(str(path)))  # would fail if it were created twice
    other = start("3")
    other.take(CardManager(str(tmp_path / "other")))
    assert teardown(first.path, paths, loaded()).clean
    assert path.exists()
    assert teardown(second.path, paths, loaded()).clean
    assert not path.exists()
    assert (tmp_path / "other").exists()


def test_node_lock_is_free_while_only_resources_of_the_job_are_released(
    paths, start, tmp_path, monkeypatch
):
    """Otherwise no job could start on the node meanwhile."""

    def release(_):
        with node_lock(paths, LONG / 2):
            (tmp_path / "locked").touch()

    first, second = start("1"), start("2")
    first.take(AcmeCard(str(tmp_path / "card")), guest=0)
    first.take(CardManager(str(tmp_path / "manager")))
    second.take(CardManager(str(tmp_path / "manager")))
    monkeypatch.setattr(AcmeCard, "release", release)
    assert teardown(first.path, paths, loaded(), release_timeout=LONG, deadline=LONG).clean
    assert (tmp_path / "locked").exists()


def test_locked_node_delays_only_what_the_jobs_share(paths, start, tmp_path, monkeypatch):
    """The lock is freed by the release of the job's resource, which therefore must not wait."""
    journal = start()
    journal.take(AcmeCard(str(tmp_path / "card")), guest=0)
    journal.take(CardManager(str(tmp_path / "manager")))
    other = os.open(paths.node_lock, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(AcmeCard, "release", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
    monkeypatch.setattr(CardManager, "release", lambda _: None)
    report = teardown(journal.path, paths, loaded(), release_timeout=LONG, deadline=LONG)
    os.close(other)
    assert report.clean
    assert numbers(report.released) == [1, 2]


def test_class_that_another_version_lacks_holds_only_its_record(
    paths, start, tmp_path, monkeypatch
):
    """A reaper that runs for hours imports the classes of the version that is installed then."""
    journal = start()
    journal.take(File(str(tmp_path / "f")), guest=0)
    journal.take(AcmeCard(str(tmp_path / "card")), guest=1)
    monkeypatch.setitem(CORE_KINDS, "file", "api.job_files:Gone")
    report = teardown(journal.path, paths, loaded())
    assert (numbers(report.orphaned), numbers(report.released)) == ([1], [2])
    monkeypatch.undo()
    assert teardown(journal.path, paths, loaded()).clean


def test_partly_created_node_wide_resource_is_created_again(paths, start, tmp_path, monkeypatch):
    path = tmp_path / "manager"
    first, second = start("1"), start("2")
    with monkeypatch.context() as patch:
        patch.setattr(CardManager, "create", lambda self: Path(self.path).touch() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.take(CardManager(str(path)))
    second.take(CardManager(str(path)))
    assert path.read_text() == "running"
    assert teardown(first.path, paths, loaded()).clean
    assert path.exists()
    assert teardown(second.path, paths, loaded()).clean
    assert not path.exists()


def test_node_wide_resource_of_another_boot_is_created_again(paths, start, tmp_path):
    path = tmp_path / "manager"
    start("1", boot="another").take(CardManager(str(path)))
    path.unlink()  # the reboot
    start("2").take(CardManager(str(path)))
    assert path.read_text() == "running"
