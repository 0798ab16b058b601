"""The resources of a guest that the core acquires."""

import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from vtorque_core.api.boot_source import ColdBoot
from vtorque_core.api.libvirt_domain import Disk, Filesystem, Interface
from vtorque_core.base.errors import HostFault
from vtorque_core.config.site_config import Site
from vtorque_core.node.start import guest_resources
from vtorque_core.plan.domain.merge import MergedDomain
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.resources.netfilter import Netfilter
from vtorque_testing import planned

GUARD = "table inet guard {}\n"


def test_limit_of_a_nic_does_not_depend_on_the_order_of_nics(monkeypatch):
    """The guard of one network makes the node track connections, also of a bridge without a guard.

    A filter without a guard has no limit on a node that does not track connections yet.
    """
    monkeypatch.setattr(guest_resources, "daemons", lambda *_: [])
    nics = [
        Interface("lab", "bridge", "br7", "52:54:00:00:00:01"),
        Interface("main", "network", "vtorque", "52:54:00:00:00:02"),
    ]
    guest = SimpleNamespace(merged=SimpleNamespace(lists=lambda _: nics))
    filters = list(guest_resources._helpers(guest, Site(), GUARD))
    assert [type(each) for each in filters] == [Netfilter, Netfilter]
    assert [each.guard for each in filters] == [GUARD, GUARD]
    assert {each.connections for each in filters} == {Site().network.max_connections}


def daemons_of(tmp_path, *elements, source=""):
    """Return the services of a guest's shares and disks; ``source`` is the user's own image."""
    user = SimpleNamespace(uid=1000, gid=1000, groups=(), subordinate_id=0)
    plan = SimpleNamespace(
        user=user, qemu_uid=0, run_dir=tmp_path, state_dir=tmp_path, source=ColdBoot(), ram_mib=512,
        image=SimpleNamespace(source=source),
    )  # fmt: skip
    merged = SimpleNamespace(
        lists=lambda kind: [each for each in elements if isinstance(each, kind)],
        single=lambda _: None,
    )
    _, *found = guest_resources.daemons(SimpleNamespace(plan=plan, merged=merged))
    return [each.service for each in found]


HOME = Filesystem("home", "/home/ada", "/home/ada", user_owned=True)


def test_descriptors_of_a_share_are_limited_by_guest_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(guest_resources, "file_limit", lambda ram_mib: 1000 * ram_mib)
    (service,) = daemons_of(tmp_path, HOME)
    assert service.nofile == 512_000


@pytest.mark.parametrize("source", ["", "/home/ada/app.squashfs"])
def test_job_with_own_image_is_refused_if_its_files_cannot_be_opened(tmp_path, source):
    """Otherwise the user could let the job be requeued on each node."""
    site = Filesystem("data", "/data", "/data")
    disk = Disk("image", "/home/ada/app.squashfs", "raw", readonly=True, user_owned=True)
    found = [each.users_fault for each in daemons_of(tmp_path, HOME, site, disk, source=source)]
    assert found == [bool(source), False, bool(source)]


@pytest.mark.parametrize("source", ["", "/home/ada/app.squashfs"])
def test_guest_of_own_image_cannot_leave_setuid_files_in_shares(tmp_path, source):
    (service,) = daemons_of(tmp_path, HOME, source=source)
    assert service.nosuid is bool(source)


def test_helper_that_fails_fails_the_start_when_the_others_have_ended(monkeypatch):
    failing, ended = threading.Event(), []

    def acquire(resource, *_):
        if resource == "bad":
            raise HostFault("no filter")
        if resource == "slow":
            assert failing.wait(60)
            ended.append(resource)

    def render():
        failing.set()
        ended.append("rendered")

    monkeypatch.setattr(guest_resources, "_helpers", lambda *_: ["slow", "bad"])
    plan = planned.guest_plan()
    start = mock.Mock(site=Site(), job=plan.job, acquire=acquire)
    guest = GuestSpec(plan, mock.Mock(), "p", (), MergedDomain(()), ())
    with pytest.raises(HostFault, match="no filter"):
        guest_resources.acquire_all(start, [guest], guard=False, meanwhile=render)
    assert ended == ["rendered", "slow"]
