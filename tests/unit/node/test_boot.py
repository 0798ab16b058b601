"""How guests are booted, without libvirt; with it: tests/e2e/test_hypervisor.py."""

import dataclasses
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import running_journal
from holding import holding
from patience import LONG, eventually
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.node.start import boot
from vtorque_core.resources.domain import Domain
from vtorque_testing import planned


def test_a_daemon_that_stops_before_its_restored_guest_runs_holds_up_no_worker(
    tmp_path, monkeypatch
):
    lock = tmp_path / "fs-home.lock"
    lock.touch()
    start = SimpleNamespace(
        site=SimpleNamespace(paths=running_journal.paths_below(tmp_path)),
        deadline=time.monotonic() + LONG,
    )
    domain = Domain("vt-1", "u-u", "test:///default", daemons=(str(lock),))
    with holding(lock) as daemon:
        daemon.send_signal(signal.SIGSTOP)

        def waits(*_):
            eventually(lambda: daemon.poll() is not None)

        monkeypatch.setattr(hypervisor, "resume_domain", waits)
        with pytest.raises(HostFault, match=r"stopped \(SIGSTOP\).*fs-home"):
            boot._let_run(start, planned.guest_plan(), domain, threading.Event())
        daemon.kill()


def test_a_guest_that_was_long_on_its_way_has_the_time_of_a_start_once_it_is_there(
    tmp_path, monkeypatch
):
    """Its clock is set, and plugins have their say, as after any start."""
    monkeypatch.setattr(boot, "domain_spec", lambda *_: None)
    monkeypatch.setattr(boot, "render", lambda *_, **__: "<domain/>")
    monkeypatch.setattr(boot, "moved", lambda *_: "<domain/>")
    did = []
    node = SimpleNamespace(libvirt_uri="test:///default", start_timeout=300.0)
    paths = running_journal.paths_below(tmp_path)
    start = SimpleNamespace(
        site=SimpleNamespace(paths=paths, node=node, templates={}),
        deadline=time.monotonic() + LONG,
        enter=did.append,
    )

    over = time.monotonic() - 1.0

    def comes(domain, guest):
        did.append(domain.arrive)
        start.deadline = over  # so long did it take

    start.acquire = comes
    nothing = SimpleNamespace(aliases=lambda _: {}, lists=lambda _: [], single=lambda _: None)
    saved = SimpleNamespace(arrive=print, xml="<domain/>")
    guest = dataclasses.replace(planned.guest_plan(), saved=saved)
    each = SimpleNamespace(plan=guest, merged=nothing)
    assert boot.boot_one(start, each, "tcg", threading.Event()) is None
    assert did[0] == "arrives" and did[1].func is print
    assert start.deadline > over


def test_one_that_has_come_is_not_ended_when_another_that_came_has_died(monkeypatch):
    """It is nowhere else any more."""
    ended = []
    monkeypatch.setattr(boot.hypervisor, "destroy_domain", lambda _, uuid, *__: ended.append(uuid))
    monkeypatch.setattr(boot, "boot_one", lambda *_: None)
    monkeypatch.setattr(boot.kvm, "choose", lambda *_: SimpleNamespace(type="tcg", warning=""))

    def ready(_start, each, _until):
        if each.plan.index == 0:
            raise HostFault("the guest died")
        time.sleep(0.3)  # so long it can be ended

    monkeypatch.setattr(boot, "await_ready", ready)
    node = SimpleNamespace(libvirt_uri="test:///default", accel="tcg", qemu_user="")
    site = SimpleNamespace(node=node, paths=SimpleNamespace(run=""))
    start = SimpleNamespace(site=site, deadline=0.0, enter=lambda _: None, act=lambda _: None)
    saved = SimpleNamespace(arrive=print)
    guests = [
        SimpleNamespace(plan=dataclasses.replace(planned.guest_plan(), index=index, saved=saved))
        for index in range(2)
    ]
    with pytest.raises(HostFault, match="the guest died"):
        boot.boot_all(start, guests)
    assert ended == []
