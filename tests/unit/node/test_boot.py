"""Boot of guests, without libvirt; with it: tests/e2e/test_hypervisor.py."""

import select
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import running_journal
from holding import holding
from patience import LONG, eventually
from vtorque_core.api import hooks
from vtorque_core.api.boot_source import BootSource, ColdBoot
from vtorque_core.api.libvirt_domain import Filesystem, Interface
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.node.start import boot
from vtorque_core.plan.domain.merge import Merged, MergedDomain
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.resources import stopped_daemons
from vtorque_testing import planned


def boot_of(paths, lock=None, source=None, **start):
    """Return the boot of a guest; ``lock``: of the daemon of its share ``home``."""
    shares = [] if lock is None else [Merged(Filesystem("home", "/h", "h"), "ua-home", 0, ("p",))]
    run_dir = Path("/r") if lock is None else lock.parent
    guest = planned.guest_plan(run_dir=run_dir, source=source or ColdBoot())
    each = GuestSpec(guest, mock.Mock(), "p", (), MergedDomain(tuple(shares)), ())
    node = SimpleNamespace(libvirt_uri="test:///default", start_timeout=300.0)
    site = SimpleNamespace(paths=paths, node=node, templates=None)
    values = {"site": site, "deadline": time.monotonic() + LONG, "phase": "boot", "id": "42.srv"}
    return boot.GuestBoot(SimpleNamespace(**values | start), each, "tcg", threading.Event())


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "fs-home.lock"
    path.touch()
    return path


def test_daemon_stopped_during_a_restore_is_killed(paths, lock, monkeypatch):
    with holding(lock) as daemon:
        daemon.send_signal(signal.SIGSTOP)

        def waits(*_):
            eventually(lambda: daemon.poll() is not None)

        monkeypatch.setattr(hypervisor, "resume_domain", waits)
        with pytest.raises(HostFault, match=r"stopped \(SIGSTOP\).*fs-home"):
            boot_of(paths, lock).resume()
        daemon.kill()


def test_daemons_of_a_restored_guest_may_be_silent_while_memory_is_read(paths, lock, monkeypatch):
    """A large guest's memory is read for longer than a handshake takes."""
    with holding(lock) as daemon:

        def restores(*_):
            assert select.select([], [], [], 0.3) == ([], [], [])
            assert daemon.poll() is None

        monkeypatch.setattr(stopped_daemons, "HANDSHAKE", 0.05)
        monkeypatch.setattr(hypervisor, "saved_xml", lambda *_: "<domain/>")
        monkeypatch.setattr(hypervisor, "restore_domain", restores)
        monkeypatch.setattr(boot, "domain_spec", lambda *_: None)
        monkeypatch.setattr(boot, "render", lambda *_, **__: "<domain/>")
        boot_of(paths, lock).restore(Path("/c/g0.memory"), Path("/s"), Path("/r"))
        daemon.kill()


@pytest.mark.parametrize("warm", [False, True])
def test_filters_of_nics_are_complete_before_the_guest_runs(paths, tmp_path, monkeypatch, warm):
    """An own image sends frames as soon as its guest runs, and root may be killed before."""
    did = []
    domain = mock.Mock(**{"state.return_value": [3], "maxVcpus.return_value": 0})
    domain.attachDeviceFlags.side_effect = lambda xml, _: did.append(xml)
    domain.resume.side_effect = lambda: did.append("resume")
    monkeypatch.setattr(hypervisor, "library", lambda: mock.Mock(VIR_DOMAIN_PAUSED=3))
    monkeypatch.setattr(hypervisor, "on_domain", lambda _, __, ___, work, *____: work(domain))
    created = lambda *_, paused: did.append("create" if paused else "run")  # noqa: E731
    monkeypatch.setattr(hypervisor, "create_domain", created)
    monkeypatch.setattr(boot.netfilter, "filter_tap", did.append)
    monkeypatch.setattr(boot, "domain_spec", lambda *_: None)
    monkeypatch.setattr(boot, "render", lambda *_, **__: "<domain/>")
    monkeypatch.setattr(boot, "metadata", lambda _: "")
    monkeypatch.setattr(boot, "render_devices", lambda *_: ("nic", "seed"))

    class Warm(BootSource):
        def start(self, boot):
            boot.adopt_guest()

    nic = Merged(Interface("nic0", "bridge", "br0", "52:54:00:76:74:01", "10.86.0.16"), "n", 0, ())
    each = boot_of(
        paths,
        source=Warm() if warm else ColdBoot(),
        enter=did.append,
        acquire=lambda domain, guest: domain.create(),
    )
    made = GuestSpec(each.guest, mock.Mock(), "p", (), MergedDomain((nic,)), ())
    each = boot.GuestBoot(each.start, made, "tcg", threading.Event())
    assert boot.boot_one(each) is None
    tap = "vt525400767401"
    expected = ["nic", tap, "resume", "seed"] if warm else ["create", tap, "resume"]
    assert did[: len(expected)] == expected
    assert did.count(tap) == 1


class ArrivingGuest(BootSource):
    """A guest that arrives from another node; ``late`` is called on arrival."""

    name = "remote"
    remote = True

    def __init__(self, late=lambda: None):
        self.late = late

    def start(self, boot):
        self.late()


def test_arriving_guest_gets_a_new_start_deadline(paths):
    """The guest's clock is set and plugins' hooks run, as after any start."""
    did = []
    over = time.monotonic() - 1.0

    def late():
        did.append("comes")
        each.start.deadline = over  # it took that long

    each = boot_of(
        paths,
        source=ArrivingGuest(late),
        enter=did.append,
        acquire=lambda domain, guest: domain.create(),
    )
    assert boot.boot_one(each) is None
    assert did == ["arrives", "comes"]
    assert each.start.deadline > over


def test_arrived_guest_is_kept_when_another_guest_has_died(monkeypatch):
    """The arrived guest no longer exists on any other node."""
    ended = []
    monkeypatch.setattr(boot.hypervisor, "destroy_domain", lambda _, uuid, *__: ended.append(uuid))
    monkeypatch.setattr(boot, "boot_one", lambda *_: None)
    monkeypatch.setattr(boot.kvm, "choose", lambda *_: SimpleNamespace(type="tcg", warning=""))

    def ready(each):
        if each.guest.index == 0:
            raise HostFault("the guest died")
        time.sleep(0.3)  # it can be ended that long

    monkeypatch.setattr(boot, "await_ready", ready)
    node = SimpleNamespace(libvirt_uri="test:///default", accel="tcg", qemu_user="")
    site = SimpleNamespace(node=node, paths=SimpleNamespace(run=""))
    start = SimpleNamespace(site=site, deadline=0.0, enter=lambda _: None, call_hook=lambda _: None)
    plans = [planned.guest_plan(index=index, source=ArrivingGuest()) for index in range(2)]
    guests = [GuestSpec(plan, mock.Mock(), "p", (), MergedDomain(()), ()) for plan in plans]
    with pytest.raises(HostFault, match="the guest died"):
        boot.boot_all(start, boot.guest_boots(start, guests))
    assert ended == []


def test_processes_of_the_node_start_when_qemu_has_started(monkeypatch):
    """They would delay QEMU's start."""
    did = []
    monkeypatch.setattr(boot, "boot_one", lambda *_: did.append("domain"))
    monkeypatch.setattr(boot, "await_ready", lambda _: did.append("READY"))
    start = SimpleNamespace(site=mock.Mock(), deadline=0.0, enter=did.append, call_hook=did.append)
    each = GuestSpec(planned.guest_plan(), mock.Mock(), "p", (), MergedDomain(()), ())
    one = boot.GuestBoot(start, each, "tcg", threading.Event())
    boot.boot_all(start, [one], booting=lambda: did.append("others"))
    assert did == [
        "boot",
        "domain",
        "others",
        "ready",
        "READY",
        "post-boot",
        hooks.vtorque_post_boot,
    ]


@pytest.mark.parametrize("created", [True, False])
def test_nic_is_filtered_while_qemu_starts(paths, monkeypatch, created):
    filtered, there = threading.Event(), threading.Event()
    monkeypatch.setattr(boot.netfilter, "await_tap", lambda _, end: there.wait(LONG) and created)
    monkeypatch.setattr(boot.netfilter, "filter_tap", lambda _: filtered.set())
    each = boot_of(paths)
    each.rendered, each._unfiltered = "<domain/>", ["vt1"]

    def create(*_, paused):
        assert paused
        there.set()
        if not created:
            raise HostFault("QEMU does not start")
        assert filtered.wait(LONG), "the filter waits for the end of QEMU's start"

    monkeypatch.setattr(hypervisor, "create_domain", create)
    if created:
        each.create()
    else:
        with pytest.raises(HostFault, match="QEMU does not start"):
            each.create()
    assert (filtered.is_set(), each._unfiltered) == (created, [] if created else ["vt1"])


def test_guest_whose_nic_cannot_be_filtered_does_not_run(paths, monkeypatch):
    tries, resumed = [], []

    def fail(tap):
        tries.append(tap)
        raise HostFault("nft: no memory")

    monkeypatch.setattr(boot.netfilter, "await_tap", lambda *_: True)
    monkeypatch.setattr(boot.netfilter, "filter_tap", fail)
    monkeypatch.setattr(hypervisor, "create_domain", lambda *_, **__: None)
    monkeypatch.setattr(hypervisor, "resume_domain", resumed.append)
    each = boot_of(paths, acquire=lambda domain, guest: domain.create())
    each.rendered, each._unfiltered = "<domain/>", ["vt1"]
    with pytest.raises(HostFault, match="nft: no memory"):
        boot.boot_one(each)
    assert (tries, resumed) == (["vt1", "vt1"], [])


def test_process_ends_although_libvirtd_hangs(paths, monkeypatch):
    """The thread that filters the guest's NIC waits for libvirt, too."""
    called, answers = threading.Event(), threading.Event()

    def create(*_, **__):
        called.set()
        answers.wait(LONG)

    awaited = lambda _, end: bool(select.select([end], (), ())) and False  # noqa: E731
    monkeypatch.setattr(boot.netfilter, "await_tap", awaited)
    monkeypatch.setattr(hypervisor, "create_domain", create)
    each = boot_of(paths)
    each.rendered, each._unfiltered = "<domain/>", ["vt1"]
    creating = threading.Thread(target=each.create)
    creating.start()
    assert called.wait(LONG)
    waiting = [thread for thread in threading.enumerate() if thread.name == "filter NICs"]
    answers.set()
    creating.join()
    assert [thread.daemon for thread in waiting] == [True]
