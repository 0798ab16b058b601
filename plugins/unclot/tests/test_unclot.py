"""Requests, regions and guest variables of the plugin; real files in /dev/shm, real schema."""

import dataclasses
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.claims import MemoryClaim, Notice
from vtorque_core.api.guest_context import EnvVar, PciMemory
from vtorque_core.api.libvirt_domain import find_forbidding
from vtorque_core.api.values import Extra, JobRequest
from vtorque_core.records.reading import arguments
from vtorque_testing import planned
from vtorque_testing.planned import guest_plan
from vtorque_unclot import node, plugin
from vtorque_unclot.shm import Shm

LINUX = frozenset({"EnvVar", "PciMemory"})
PLUGINS = planned.load_with_core("unclot", plugin, node)


def on(site=""):
    return planned.PlannedNode.make(PLUGINS, site)


def request_of(*pairs, site=""):
    return on(site).request(*pairs)


def guest(unclot=True, mib=64, **changes):
    values = {
        "guests_per_node": 2, "hostname": "vn1-0", "qemu_uid": os.getuid(), "supports": LINUX,
        "request": JobRequest({"unclot": unclot, "unclot_shmem": mib}),
    }  # fmt: skip
    return guest_plan(**values | changes)


def pre_boot(*guests, reserve=64):
    return on(f"[plugin.unclot]\nshm_reserve = {reserve}").pre_boot_resources(*guests)


# -- Options of the user ---------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "mib"), [("64M", 64), ("1M", 1), ("2G", 2048), ("1024K", 1)])
def test_power_of_two_is_accepted(text, mib):
    assert request_of("unclot=true", f"unclot_shmem={text}")[plugin.SHMEM] == mib


def test_other_size_is_refused_with_the_rule():
    power = "unclot_shmem=3M: is not a power of two: request 2M or 4M"
    for text, why in (
        ("3M", power), ("1025M", "request 1G or 2G"), ("512K", "not a whole number of MiB"),
        ("0", "between 1M"), ("-4M", "is not a size"), ("../x", "is not a size"),
    ):  # fmt: skip
        with pytest.raises(Refused, match=why):
            request_of("unclot=true", f"unclot_shmem={text}")


def test_site_sets_the_limit():
    site = '[options.unclot_shmem]\nmax = "1G"'
    with pytest.raises(
        Refused, match=r"unclot_shmem=2G: .*\(limit: 1G, set by \[options.unclot_shmem\] max in"
    ):
        request_of("unclot=true", "unclot_shmem=2G", site=site)


def test_size_without_the_memory_is_refused():
    with pytest.raises(Refused, match="unclot_shmem=4M: requires unclot=true"):
        request_of("unclot_shmem=4M")
    request_of()
    request_of("unclot_shmem=4M", site="[options.unclot]\ndefault = true")


def test_memory_is_requested_from_the_batch_system():
    both = [
        on().needs(*pairs, "vms_per_node=2").mib
        for pairs in ((), ("unclot=true", "unclot_shmem=256M"))
    ]
    assert both[1] - both[0] == 256
    assert list(plugin.vtorque_needs(guest().request)) == [Extra(mib=64)]


# -- Actions of the node ---------------------------------------------------------------------------


def test_memory_is_claimed_once():
    claims = [list(node.vtorque_plan(guest(index=i))) for i in range(2)]
    assert claims == [[MemoryClaim(64, use="unclot", key="unclot_shmem")], []]
    assert list(node.vtorque_plan(guest(unclot=False))) == []


def test_single_guest_gets_a_notice():
    (_, notice) = node.vtorque_plan(guest(guests_per_node=1))
    assert isinstance(notice, Notice)
    assert "vms_per_node=2" in notice.text


def test_region_name_is_unique_per_job_and_node_and_unpredictable():
    one = node.region(guest())
    assert one == node.region(guest(index=1, rank=1, hostname="vn1-1"))
    elsewhere = guest(job=dataclasses.replace(guest().job, node="n2"))
    others = {node.region(elsewhere), node.region(guest(secret=b"y" * 32)), one}
    assert len(others) == 3
    assert len(one) == len("vtorque-") + 64
    assert "42" not in {one[8:], one[8:10]}


def test_region_is_zeroed_and_accessible_only_to_qemu(tmp_path):
    ((shm, owner),) = pre_boot(guest(mib=1), guest(index=1, mib=1), reserve=0)
    assert owner is None  # both domains need it, so it is released after both
    assert arguments(shm) == {
        "name": node.region(guest()), "size": 1 << 20, "mode": 0o600, "uid": os.getuid(),
        "gid": -1,
    }  # fmt: skip
    path = Path("/dev/shm", shm.name)
    shm.release()  # never created
    shm.create()
    try:
        status = path.stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_size) == (
            0o600, os.getuid(), 1 << 20,
        )  # fmt: skip
        assert path.read_bytes() == bytes(1 << 20)
        path.write_bytes(b"secret")
    finally:
        again = Shm(**arguments(shm))
        again.release()
        again.release()
    assert not path.exists()
    with pytest.raises(HostFault, match="not a valid name"):
        Shm("../etc/passwd").release()


def test_region_is_fully_allocated_and_never_overwritten():
    shm = Shm(f"vtorque-test-{os.getpid()}", size=8192)
    shm.create()
    try:
        status = Path(shm.path).stat()
        assert (status.st_size, status.st_blocks * 512) == (8192, 8192)  # no holes
        with pytest.raises(HostFault, match=r"cannot create .*: File exists"):
            shm.create()
    finally:
        shm.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
def test_region_is_accessible_only_to_qemu_users_of_the_job():
    ((shm, _),) = pre_boot(guest(mib=1, qemu_uid=4001), guest(mib=1, qemu_uid=4002), reserve=0)
    shm.create()
    try:
        opens = ("sh", "-c", f": <> /dev/shm/{shm.name}")
        ended = [
            subprocess.run(opens, user=uid, group=4003, extra_groups=(), check=False).returncode
            for uid in (4001, 4002, 4003)
        ]
        assert ended[:2] == [0, 0] and ended[2]
    finally:
        shm.release()


def test_region_that_leaves_no_room_in_dev_shm_is_a_host_fault():
    shm = os.statvfs("/dev/shm")
    ((region, _),) = pre_boot(guest(mib=1), reserve=(shm.f_blocks * shm.f_frsize >> 20) + 1)
    said = r"1M of shared memory do not fit: /dev/shm has 0M free for guests, and"
    with pytest.raises(HostFault, match=said):
        region.create()
    assert not Path(region.path).exists()


def test_doctor_reports_the_memory_for_regions(monkeypatch):
    (known,) = node.vtorque_health_checks()
    monkeypatch.setattr(Shm, "room", lambda spare: (1 << 30) - spare)
    for reserve, status, said in ((512, "ok", "512M"), (1000, "warning", "24M")):
        (result,) = known.check({node.Settings: node.Settings(reserve)})
        assert (result.status, bool(result.fix)) == (status, status == "warning")
        assert result.message.startswith(f"{said} of /dev/shm for all jobs (limit of one: ")


def test_nothing_is_created_without_the_option():
    assert pre_boot(guest(unclot=False)) == []
    assert list(node.vtorque_render_domain(guest(unclot=False))) == []
    assert list(node.vtorque_guest_context(guest(unclot=False))) == []


def domain(one):
    return on().domain(one)


def test_device_is_rendered():
    shmem = ElementTree.fromstring(domain(guest(mib=2048))).find("devices/shmem")  # noqa: S314
    assert shmem.attrib == {"name": node.region(guest()), "role": "peer"}
    assert shmem.find("model").get("type") == "ivshmem-plain"
    assert (shmem.find("size").text, shmem.find("size").get("unit")) == ("2048", "M")
    assert shmem.find("alias").get("name") == "ua-unclot-shmem"


@pytest.mark.integration
def test_domain_matches_the_libvirt_schema():
    planned.check_schema(domain(guest()))


def test_region_forbids_save_and_migrate():
    elements = list(node.vtorque_render_domain(guest()))
    assert [find_forbidding(act, elements) for act in ("suspend", "save", "migrate")] == [
        [], ["SharedMemory"], ["SharedMemory"],
    ]  # fmt: skip


def test_linux_guest_gets_the_device_and_variables():
    assert list(node.vtorque_guest_context(guest())) == [
        PciMemory("1af4:1110", 2, "/dev/vtorque/shmem"),
        EnvVar("VTORQUE_SHMEM", "/dev/vtorque/shmem"),
        EnvVar("VTORQUE_SHMEM_SIZE", str(64 << 20)),
    ]


def test_guest_type_without_device_paths_is_accepted():
    osv = dataclasses.replace(guest(), supports=frozenset({"EnvVar"}))
    assert list(node.vtorque_guest_context(osv)) == []
    assert len(list(node.vtorque_render_domain(osv))) == 1
