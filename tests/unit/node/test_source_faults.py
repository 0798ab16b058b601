"""A plugin's boot source that fails, on a recorded node: a cold boot, or a full release.

Its journal is released without the plugin.
"""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import pytest

import device_cases
from patience import LONG, eventually
from vtorque_core.api import HostFault
from vtorque_core.api.boot_source import BootSource, Offer
from vtorque_core.api.values import hookimpl
from vtorque_core.base import locks
from vtorque_core.node.start import boot
from vtorque_testing.faults import around_all, orphans, survive
from vtorque_testing.recorded import RecordedJob

pytestmark = pytest.mark.e2e

METHODS = ("start", "run", "ready")


@dataclasses.dataclass(frozen=True)
class Faulty(BootSource):
    """Boots like any guest, and fails in one of its methods."""

    method: str = ""
    error: Exception | None = None
    fallback: bool = True

    name = "faulty"

    def start(self, boot):
        boot.create()
        self._does("start")

    def run(self, boot):
        self._does("run")

    def await_ready(self, boot):
        boot.await_ready()
        self._does("ready")

    def _does(self, method):
        if method == self.method and self.error is not None:
            raise self.error


@dataclasses.dataclass(frozen=True)
class SourceRig(RecordedJob):
    """A job whose guest boots by a source of a plugin that is gone when it is released."""

    source: BootSource = dataclasses.field(default_factory=Faulty)

    def start(self, last=None):
        def offers(guests):
            locked = [path for path in locks._held if path == str(self.node.site.paths.node_lock)]
            assert not locked, "a hook is called under the node's lock"
            assert str(self.node.site.paths.job_lock(self.job.id)) in locks._held
            return [Offer(guest.plan.index, self.source) for guest in guests]

        plugin = SimpleNamespace(vtorque_rendered_sources=hookimpl(offers))
        self.node.plugins.register("acme", plugin, "vtorque-acme 1.0")
        with contextlib.ExitStack() as gone:
            gone.callback(self.node.plugins.unregister, "acme")
            return super().start(last)


@pytest.fixture
def rig(tmp_path):
    node = device_cases.node(tmp_path / "node", device_cases.load(()), device_cases.Case({}, {}))
    with orphans() as processes:
        yield SourceRig(node, node.job({"vcpus": "1", "ram": "256M"}), processes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [HostFault("no memory file"), KeyError("a defect")])
def test_source_that_raises_is_replaced_by_a_cold_boot(rig, method, error):
    before = rig.observe()
    faulty = dataclasses.replace(rig, source=Faulty(method, error))
    run = faulty.start()
    assert not run.error, run
    assert len(rig.node.domains()) == 1
    faulty.release()
    eventually(lambda: rig.observe() == before)


@pytest.mark.parametrize("method", METHODS)
def test_source_that_raises_without_a_fallback_fails_the_start(rig, method):
    before = rig.observe()
    faulty = dataclasses.replace(rig, source=Faulty(method, KeyError("a defect"), fallback=False))
    run = faulty.start()
    assert "boot source faulty: KeyError: 'a defect'" in run.error
    faulty.release()
    eventually(lambda: rig.observe() == before)


@dataclasses.dataclass(frozen=True)
class HangingSource(Faulty):
    """Hangs in one of its methods."""

    def _does(self, method):
        if method == self.method:
            threading.Event().wait()


@pytest.mark.parametrize(
    "method", ["run", *(pytest.param(each, marks=pytest.mark.full) for each in ("start", "ready"))]
)
def test_source_that_hangs_is_replaced_by_a_cold_boot(tmp_path, monkeypatch, method):
    monkeypatch.setattr(boot, "_OVERDUE", 0.0)
    tables = {"node": {"start_timeout": 30}}
    case = device_cases.Case({}, {})
    node = device_cases.node(tmp_path / "node", device_cases.load(()), case, tables=tables)
    with orphans() as processes:
        rig = SourceRig(
            node, node.job({"vcpus": "1", "ram": "256M"}), processes, source=HangingSource(method)
        )
        before = rig.observe()
        run = rig.start()
        assert not run.error, run
        assert len(node.domains()) == 1
        rig.release()
        eventually(lambda: rig.observe() == before)


@pytest.mark.parametrize("method", ["", "ready"])
@pytest.mark.parametrize(
    "part", [slice(3, None, 13), pytest.param(slice(None), marks=pytest.mark.full)]
)
def test_killed_start_with_a_source_is_released_without_its_plugin(rig, method, part):
    error = HostFault("silent") if method else None
    faulty = dataclasses.replace(rig, source=Faulty(method, error))
    assert survive(faulty, around_all, part=part, patience=LONG)


@dataclasses.dataclass(frozen=True)
class OwnDisk(Faulty):
    """Provides the guest's disk in the place of a cold boot's, and fails."""

    brings_disk = True

    def start(self, boot):
        boot.guest.root_disk.write_bytes(b"a disk of this source")
        raise HostFault("its memory does not fit this disk")


def test_cold_boot_replaces_the_memory_disk_of_a_failed_source(rig):
    node = rig.node
    wanted = node.job({"vcpus": "1", "ram": "256M", "fs_type": "ramdisk"})
    before = rig.observe()
    own = dataclasses.replace(rig, job=wanted, source=OwnDisk())
    run = own.start()
    assert not run.error, run
    assert len(node.domains()) == 1
    own.release()
    eventually(lambda: rig.observe() == before)


def test_source_is_not_offered_for_a_guest_that_already_has_one(rig):
    """Otherwise a warm guest or a cold boot could replace a restore."""
    before = rig.observe()
    restored = SimpleNamespace(vtorque_boot_sources=hookimpl(lambda: [Faulty()]))
    rig.node.plugins.register("other", restored, "vtorque-other 1.0")
    run = dataclasses.replace(rig, source=Faulty("start", HostFault("not this one"))).start()
    rig.node.plugins.unregister("other")
    assert not run.error, run
    rig.release()
    eventually(lambda: rig.observe() == before)
