"""From a request to planned guests: refusals before anything is acquired."""

import dataclasses
import os
import pwd
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtorque_core.api.batch_system import BareNode, BatchJob
from vtorque_core.api.boot_source import BootSource, Identity
from vtorque_core.api.claims import MemoryClaim, Notice, Placement, PoolClaim, RamClaim
from vtorque_core.api.guest_context import EnvVar, RootCommand
from vtorque_core.api.guest_plan import JobUser, report_missing
from vtorque_core.api.host_topology import flat
from vtorque_core.api.libvirt_domain import Disk, MemoryBacking
from vtorque_core.api.strategies import GuestType
from vtorque_core.api.values import Image, JobRequest, hookimpl
from vtorque_core.api.vm_options import RAM, VCPUS
from vtorque_core.base import hypervisor, names
from vtorque_core.base.errors import Conflict, HostFault, Refusal, Refused
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.option_limits import Limits
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.schema import Images, Network
from vtorque_core.config.site_config import Site
from vtorque_core.images import pool
from vtorque_core.plan import guests as plan
from vtorque_core.plan import host_ids
from vtorque_core.plan.job_context import JobContext, job_user
from vtorque_core.plan.placement.model import FreeResources, Leases, NodeShare, NoFit, demand
from vtorque_core.plan.placement.refusals import check_memory

USER = JobUser("u", 1000, 1000, (("u", 1000),), "/nfs/home/u", "/bin/bash")
IMAGE = Image("tiny", "double", "tiny", "x86_64", "0" * 64, min_ram_mib=128)
JOB = BatchJob("7.srv", "u", "n2", ("n1", "n2"), b"", attempt=1)


class DoubleDriver:
    """A double of a guest type's driver, without requirements."""

    def context(self, guest, site):
        yield EnvVar("DISTRO", "TINY")


class NoElements:
    """A double of a driver that adds nothing to the domain."""

    def elements(self, guest, site):
        return ()


class DoublePlugin:
    """A double of a guest type's plugin, with additional attributes of the test."""

    claims = ()
    items = ()
    saved = ()

    def __init__(self):
        self.other = SimpleNamespace(saved=())
        self.other.vtorque_boot_sources = hookimpl(lambda: self.other.saved)

    @hookimpl
    def vtorque_guest_types(self):
        yield GuestType("double", frozenset({"EnvVar"}), DoubleDriver)

    @hookimpl
    def vtorque_boot_sources(self, job, request, image, user, site):
        return self.saved

    @hookimpl
    def vtorque_plan(self, guest, site):
        return self.claims

    @hookimpl
    def vtorque_guest_context(self, guest, site):
        return self.items


@pytest.fixture
def plugin():
    return DoublePlugin()


@pytest.fixture
def plan_guests(monkeypatch, plugin):
    """Return a function that plans two guests of 256 MiB on the second node of a job."""
    monkeypatch.setattr(pool, "select", lambda *_: IMAGE)
    monkeypatch.setattr(hypervisor, "qemu_uid", lambda _: 64055)
    plugins = Plugins.load(node=False, only=())
    plugins.register("double", plugin, "vtorque-double 1.0")
    plugins.register("other", plugin.other, "vtorque-other 1.0")
    site = dataclasses.replace(Site(), network=Network(first=10, per_node=4))

    def make(granted=None, limits=None, machine=None, **wanted):
        values = {o.key: o.default for o in plugins.options().values()}
        values |= {"ram": 256, "vms_per_node": 2, **wanted}
        here = dataclasses.replace(site, options=limits or {})
        secret = b"s" * 32
        context = JobContext(JOB, USER, here, plugins, secret, machine, granted or JobGrant())
        return plan.plan_guests(context, JobRequest(values)), here, context

    return make


def test_names_ranks_and_directories_follow_from_the_job(plan_guests):
    guests, site, _ = plan_guests()
    one, two = (g.plan for g in guests)
    assert (one.rank, two.rank) == (2, 3)
    assert (one.hostname, two.hostname) == ("vn2-0", "vn2-1")
    assert one.name == "vt-7.srv.1-n2-0"
    assert one.uuid != two.uuid
    assert one.supports == {"EnvVar"}
    assert one.state_dir == site.paths.state / "jobs/7.srv.1/g0"
    assert [s.source for s in one.shares] == ["/nfs/home/u"]
    assert [s.target for s in one.shares] == ["/home/u"]


def test_core_claims_cpus_memory_and_an_address(plan_guests):
    claims = plan_guests()[0][0].claims
    assert sum(c.mib for c in claims if isinstance(c, MemoryClaim)) == 256 + 256
    pools = {c.pool: c.items for c in claims if isinstance(c, PoolClaim)}
    assert pools.pop("address") == ("10.86.0.20",)  # of a job on two nodes: fixed
    assert list(pools) == ["qemu-uid"]


def test_each_guest_has_a_separate_qemu_uid(plan_guests):
    guests, site, context = plan_guests()
    placements = [Placement(leased={"qemu-uid": (str(2146900000 + n),)}) for n in range(2)]
    one, two = plan.place_guests(context, guests, placements)
    assert (one.qemu_uid, two.qemu_uid) == (2146900000, 2146900001)
    shared = dataclasses.replace(site, node=dataclasses.replace(site.node, guest_uids=0))
    assert host_ids.free_uids(shared) == ()
    assert not list(host_ids.claims(guests[0].plan, ()))
    assert host_ids.guest_uid(guests[0].plan, shared) == 64055


def test_guests_know_the_jobs_nodes_without_guests_by_this_nodes_names(plan_guests):
    """The host's name service has localhost, which no other machine could use."""
    guests, _, context = plan_guests()
    placements = [Placement(leased={"qemu-uid": (str(2146900000 + n),)}) for n in range(2)]
    bare = (BareNode("10.1.2.3", 8), BareNode("localhost", 2), BareNode("n" * 64, 1))
    mixed = dataclasses.replace(context, job=dataclasses.replace(JOB, bare=bare))
    for guest in plan.place_guests(mixed, guests, placements):
        assert guest.bare == (BareNode("10.1.2.3", 8, "10.1.2.3"), *bare[1:])


def test_guest_uid_of_an_existing_user_is_a_host_fault(plan_guests):
    guests, _, context = plan_guests()
    placements = [Placement(leased={"qemu-uid": (str(uid),)}) for uid in (0, 2146900000)]
    with pytest.raises(HostFault, match=r"guest_uids includes 0, which is the uid of root"):
        plan.place_guests(context, guests, placements)


def test_uid_of_a_running_process_is_not_free(plan_guests):
    _, site, _ = plan_guests()
    uid, as_user = (64999, {"user": 64999}) if os.getuid() == 0 else (os.getuid(), {})
    mine = dataclasses.replace(site, node=dataclasses.replace(site.node, guest_uids=uid - 9))
    with subprocess.Popen(("sleep", "999"), **as_user) as process:
        free = host_ids.free_uids(mine)
        process.kill()
    assert str(uid) not in free and len(free) > host_ids.COUNT // 2
    assert free != host_ids.free_uids(mine), "the uids are in a predictable order"


def test_guest_with_uefi_variables_uses_the_libvirt_user(plan_guests):
    guests, _, _ = plan_guests()
    image = dataclasses.replace(IMAGE, arch="aarch64")
    for kernel, claimed in ((None, 0), (Path("/k"), 1)):
        made = dataclasses.replace(image, kernel=kernel)
        guest = dataclasses.replace(guests[0].plan, image=made)
        assert len(list(host_ids.claims(guest, ("1",)))) == claimed


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_memory_root_disk_is_claimed_with_its_virtual_size(
    plan_guests, monkeypatch, tmp_path, kind
):
    disk = tmp_path / "disk"
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, disk, "77M"], check=True)
    image = dataclasses.replace(IMAGE, disk=disk, disk_format=kind)
    monkeypatch.setattr(pool, "select", lambda *_: image)
    for fs_type, more in (("ramdisk", 77 + 2), ("sharedfs", 0)):
        claims = plan_guests(fs_type=fs_type)[0][0].claims
        assert sum(c.mib for c in claims if isinstance(c, MemoryClaim)) == 512 + more


def test_unsupported_wish_refuses_the_job_or_is_noted(plan_guests, plugin):
    (guest, _), _, _ = plan_guests()
    said = {
        required: report_missing(
            guest.plan,
            "Acme",
            option=VCPUS,
            required=required,
            where="[plugin.a] required",
            fix="go",
        )
        for required in (True, False)
    }
    plugin.claims = (said[False],)
    (guest, _), _, _ = plan_guests()
    assert guest.notices == (Notice("runs without vcpus=1: node n2 has no Acme; go"),)
    plugin.claims = (said[True], said[False])
    with pytest.raises(
        Refused, match=r"vcpus=1: node n2 has no Acme .*\[plugin.a\] required = true"
    ):
        plan_guests()


def test_unfollowed_numa_advice_is_reported(plan_guests, plugin):
    plugin.claims = (RamClaim(near=(1, 2), advisor="numad"),)
    one = plan_guests()[0][0]
    assert plan.distance_notices(one, Placement(nodes=(2,))) == []
    assert plan.distance_notices(one, Placement()) == []  # one NUMA node only
    (said,) = plan.distance_notices(one, Placement(nodes=(0,)))
    assert said.text.startswith("numad advised NUMA node 1-2; guest 0 is on 0,")


def test_huge_pages_need_no_file_system_of_the_host(plan_guests):
    guests, site, _ = plan_guests()
    one = dataclasses.replace(guests[0].plan, placement=Placement(page_kib=2048))
    found = [e for e in plan._core_elements(one, site) if isinstance(e, MemoryBacking)]
    assert MemoryBacking(hugepages_kib=2048, source="memfd") in found


def test_guests_have_equal_parts_and_plugins_get_numbers(plan_guests):
    guests, _, _ = plan_guests(JobGrant(5, 2048), ram=0)
    for one in guests:
        assert (one.plan.vcpus, one.plan.ram_mib) == (2, 768)
        assert (one.plan[VCPUS], one.plan[RAM]) == (2, 768)
        assert one.notices == ()


def test_user_is_notified_when_limits_make_guests_smaller(plan_guests):
    guests, _, _ = plan_guests(
        JobGrant(16), {"vcpus": Limits(max=4, set_by={"max": "options.vcpus.max"})}
    )
    assert [one.plan.vcpus for one in guests] == [4, 4]
    (notice,) = {notice for one in guests for notice in one.notices}
    assert notice.text.startswith("each guest gets vcpus=4 instead of 8, its share of the job ")
    assert "(limit set by [options.vcpus] max in " in notice.text


def test_slots_of_other_nodes_are_computed_alike_on_all_nodes(plan_guests, monkeypatch):
    """An option for all guests of a job is the same on each node."""
    told = []
    monkeypatch.setattr(plan, "domain_contributions", lambda *_: [])
    monkeypatch.setattr(plan, "merge", lambda _: None)
    for index, counts in enumerate(((9, 4), (9, 4))):
        guests, _, context = plan_guests(JobGrant(counts[index], 4096))
        job = dataclasses.replace(
            JOB, node=JOB.nodes[index], cpu_counts=counts, cpu_count=counts[index]
        )
        context = dataclasses.replace(context, job=job)
        plans = [one.plan for one in guests]
        told.append(plan.peer_guests(context, plans))
        prepared = plan.prepare_guests(context, plans, guests)
        assert {each.plan.slots for each in prepared} == {(4, 4, 2, 2)}, "plugins get other slots"
    assert told[0] == told[1]
    assert [(peer.hostname, peer.slots, peer.mib) for peer in told[0]] == [
        ("vn1-0", 4, 256), ("vn1-1", 4, 256), ("vn2-0", 2, 256), ("vn2-1", 2, 256),
    ]  # fmt: skip
    guests, _, context = plan_guests(JobGrant(4, 4096), vcpus=1)
    job = dataclasses.replace(JOB, cpu_counts=(9, 4), cpu_count=4)
    context = dataclasses.replace(context, job=job)
    peers = plan.peer_guests(context, [one.plan for one in guests])
    assert {peer.slots for peer in peers} == {1}, "the nodes count different slots for vcpus=1"


def test_ram_below_the_images_minimum_is_refused_with_the_limit(plan_guests):
    with pytest.raises(Refused, match=r"ram=64M: image tiny needs more RAM .*at least 128M"):
        plan_guests(ram=64)


def test_refusal_of_a_plugin_ends_the_plan(plan_guests, plugin):
    plugin.claims = (PoolClaim("x", ("a",)), Refusal("no card left", key="cards", value="2"))
    with pytest.raises(Refused, match="cards=2: no card left"):
        plan_guests()


def test_unsupported_item_names_plugin_and_image(plan_guests, plugin):
    plugin.items = (RootCommand(("true",)),)
    guests, _, context = plan_guests()
    with pytest.raises(
        Refused, match=r"plugin double needs RootCommand .* image tiny does not support it"
    ):
        plan.context_of(context, guests[0].plan, guests[0].driver)


def test_context_has_items_of_core_driver_and_plugins(plan_guests, plugin):
    plugin.items = (EnvVar("ACME", "1"),)
    guests, _, context = plan_guests()
    items = plan.context_of(context, guests[0].plan, guests[0].driver)
    assert [i.name for i in items] == ["VTORQUE_JOBID", "VTORQUE_RANK", "DISTRO", "ACME"]


def test_root_and_unknown_users_get_no_guest():
    with pytest.raises(Refused, match="jobs of root"):
        job_user("root", Site())
    with pytest.raises(HostFault, match="unknown on this node"):
        job_user("no-such-user", Site())


def test_groups_of_a_user_come_from_the_node():
    name = next(p.pw_name for p in pwd.getpwall() if p.pw_uid not in (0, os.getuid()))
    user = job_user(name, Site())
    assert user.groups[0][1] == user.gid
    assert Path(user.home).is_absolute()


def test_memory_root_disk_is_an_overlay_or_copy_by_site_config(plan_guests, monkeypatch):
    image = dataclasses.replace(IMAGE, disk=Path("/pool/tiny/v1/disk.raw"), disk_format="raw")
    monkeypatch.setattr(pool, "select", lambda *_: image)
    monkeypatch.setattr(
        plan, "ramdisk_mib", lambda request, _: 80 * (request.values["fs_type"] == "ramdisk")
    )
    for way, fs_type, base in (
        ("overlay", "ramdisk", str(image.disk)),
        ("copy", "ramdisk", None),
        ("copy", "sharedfs", str(image.disk)),
    ):
        guests, site, context = plan_guests(fs_type=fs_type)
        site = dataclasses.replace(site, images=Images(ramdisk=way))
        guest, context = guests[0], dataclasses.replace(context, site=site)
        found = plan.domain_contributions(context, guest.plan, NoElements())
        (root,) = (c.element for c in found if isinstance(c.element, Disk))
        assert (root.base, root.format) == (base, "qcow2"), (way, fs_type)
        assert plan.has_copied_disk(guest.plan, site) == (base is None)
        assert sum(c.mib for c in guest.claims if isinstance(c, MemoryClaim)) == (
            512 + (80 if fs_type == "ramdisk" else 0)
        )


def test_memory_root_disk_that_does_not_fit_is_refused_with_limit_and_key(plan_guests, monkeypatch):
    image = dataclasses.replace(IMAGE, disk=Path("/pool/tiny/v1/disk.raw"), disk_format="raw")
    monkeypatch.setattr(pool, "select", lambda *_: image)
    monkeypatch.setattr(plan, "ramdisk_mib", lambda *_: 900)
    share = NodeShare(flat((0, 1), 8192), cpus=(0, 1), mem_mib=1024)
    (guest, _), _, _ = plan_guests(fs_type="ramdisk")
    with pytest.raises(NoFit) as caught:
        check_memory([demand(guest.claims)], FreeResources(share, Leases()))
    refusal = caught.value.refusal
    assert (refusal.key, refusal.value, refusal.limit) == ("fs_type", "900M", "1G")
    assert "more than the job's memory on this node" in refusal.message
    assert refusal.fix.startswith("ask for fs_type=sharedfs or fewer guests")


def test_memory_overlays_are_below_run(plan_guests):
    on_disk = plan_guests()[0][0].plan
    in_memory = plan_guests(fs_type="ramdisk")[0][0].plan
    assert on_disk.root_disk.is_relative_to(on_disk.state_dir)
    assert in_memory.root_disk.is_relative_to(in_memory.run_dir)


@dataclasses.dataclass(frozen=True)
class Saved(BootSource):
    guest: Identity

    @property
    def identity(self):
        return self.guest


def saved_guest(name, address="10.86.0.19"):
    uuid = "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f"
    return Saved(Identity(name, uuid, "vn7", "5.srv", 2, (("address", address),)))


def test_saved_guest_keeps_its_name_uuid_and_address(plan_guests, plugin):
    plugin.saved = [saved_guest("vt-5.srv.2-n7-0")]
    (guest,), _, _ = plan_guests(machine=flat(range(4), 4096), vms_per_node=1)
    assert guest.plan.name == "vt-5.srv.2-n7-0" and guest.plan.source == plugin.saved[0]
    assert guest.plan.secret == names.derive(b"s" * 32, "job", "5.srv", 2)
    pools = {c.pool: c.items for c in guest.claims if isinstance(c, PoolClaim)}
    assert pools["address"] == ("10.86.0.19",)
    assert pools[plan.SAVED] == (plugin.saved[0].identity.uuid,), "two jobs could restore the guest"


@pytest.mark.parametrize("address", ["10.87.0.16", "10.86.0.1"])
def test_saved_guest_with_an_address_outside_the_subnet_is_refused(plan_guests, plugin, address):
    """A server may use it now, and the packet filter would let the guest send from it."""
    plugin.saved = [saved_guest("vt-5.srv.2-n7-0", address)]
    with pytest.raises(Refused, match=rf"has the address {address} \(address\), which"):
        plan_guests(machine=flat(range(4), 4096), vms_per_node=1)


def test_sources_of_two_plugins_are_a_conflict_that_names_both(plan_guests, plugin):
    plugin.saved = plugin.other.saved = [saved_guest("vt-5.srv.2-n7-0")]
    with pytest.raises(Conflict, match=r"vtorque-double 1.0 and vtorque-other 1.0"):
        plan_guests(machine=flat(range(4), 4096), vms_per_node=1)


def test_job_with_more_guests_than_were_saved_is_refused(plan_guests, plugin):
    plugin.saved = [saved_guest("vt-5.srv.2-n7-0")]
    with pytest.raises(Refused, match=r"vms_per_node=.*which have 1 guests per node"):
        plan_guests(machine=flat(range(4), 4096), vms_per_node=2)


@dataclasses.dataclass(frozen=True)
class Odd(BootSource):
    warm_key: str = ""
    remote: bool = False
    fallback: bool = False


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Odd(warm_key="spare-1.0"), "adopts a warm guest before the guests are rendered"),
        (Odd(remote=True), "comes from another node"),
    ],
)
def test_source_that_a_plugin_may_not_offer_is_a_host_fault(plan_guests, plugin, source, said):
    plugin.saved = [source]
    with pytest.raises(HostFault, match=f"boot source .* {said}"):
        plan_guests(machine=flat(range(4), 4096), vms_per_node=1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Odd(remote=True, fallback=True), "has a fallback"),
        (Odd(), "does not come from another node"),
    ],
)
def test_arriving_guest_needs_one_remote_source_without_fallback(source, said):
    with pytest.raises(HostFault, match=f"boot source .* {said}"):
        plan.require_possible([source], remote=True)
