"""RDMA by backend on recorded machines: claims, context, hardware, set-up and release."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from vtorque_core.api import ConfigError, HostFault, JobAttempt, Refusal, Refused
from vtorque_core.api.claims import Notice, PoolClaim
from vtorque_core.api.guest_context import GuestDevice, Package, RootCommand
from vtorque_core.api.guest_plan import Address
from vtorque_core.api.job_files import File
from vtorque_core.api.libvirt_domain import Disk, QemuArgs, find_forbidding
from vtorque_core.api.values import Image
from vtorque_passthrough.pci_functions import virtual_functions
from vtorque_passthrough.vfio import PciDevice, Vfio
from vtorque_testing import planned
from vtorque_testing.planned import NoFit
from vtorque_testing.sysfs_tree import tree, write
from vtorque_vrdma import fence, guid, node, plugin
from vtorque_vrdma.fence import Fence
from vtorque_vrdma.guid import NOBODY, VfGuid

TOOL = "/usr/lib/vtorque/vtorque-rdma"
NIC = Address("52:54:00:aa:bb:cc", "10.86.0.5")
HPC = Address("52:54:00:aa:bb:dd", "10.186.0.5", network="hpc")
SRIOV = 'cards = ["ibp94s0", "ens1f0"]\nallow_unfiltered = true\n'
PLUGINS = planned.load_with_core("vrdma", plugin, node)


def on(text):
    return planned.PlannedNode.make(PLUGINS, text, "rdma")


def site_of(top, kind="rxe", more=""):
    sysfs = tree("rdma-node", top / "sys")
    backends = f'[[plugin.vrdma.backends]]\nkind = "{kind}"\n'
    return on(f'[plugin.vrdma]\nsysfs = "{sysfs}"\n{more}\n{backends}')


def guests(site, vrdma="true", count=1, **changes):
    values = {
        "guests_per_node": 2, "hostname": "vn1-0", "addresses": (NIC, HPC),
        "image": Image("m", "linux", "debian", "x86_64", "0" * 64),
        "peers": (("vn1-0", "10.86.0.5"), ("vn1-1", "10.86.0.6")),
        "aliases": (("vn1-0-hpc", "vn1-0", "10.186.0.5"), ("vn1-1-hpc", "vn1-1", "10.186.0.6"),
                    ("vn1-1-other-hpc", "vn1-1", "10.199.0.6")),
        "qemu_uid": os.geteuid(),
    }  # fmt: skip
    request = site.request(f"vrdma={vrdma}", f"vms_per_node={count}")
    return site.guests(request, **values | changes)


def guest(site, vrdma="true", **changes):
    return guests(site, vrdma, **changes)[0]


def fenced(card, *peers):
    return Fence(card.mac, card.ip, peers)


def answers_of(site, *args, **changes):
    return site.answers(guest(site, *args, **changes))


def placed(site, count=1, **changes):
    return site.place(*guests(site, count=count, **changes))


def chosen(site, **changes):
    """Return a guest whose backend the plan has chosen."""
    return placed(site, **changes)[0]


def context(site, got):
    items = site.context(got)
    assert {i.family for i in items if isinstance(i, Package)} in ({"debian", "redhat"}, set())
    return [i for i in items if not isinstance(i, Package)]


def acquired(site, *guests):
    return [resource for resource, _ in site.pre_boot_resources(*guests)]


def elements(site, got):
    return site.elements(got)


# -- Choice of the backend -------------------------------------------------------------------------


def test_nothing_is_claimed_or_rendered_without_the_option(tmp_path):
    for kind in ("rxe", "sriov", "hyv"):
        site = site_of(tmp_path / kind, kind)
        got = guest(site, "false")
        assert site.answers(got) == context(site, got) == elements(site, got) == []
        assert acquired(site, got) == []


def test_node_name_selects_the_backend(tmp_path):
    more = '[[plugin.vrdma.backends]]\nkind = "sriov"\nnodes = "ib[0-9]+"\n'
    text = f'{more}[[plugin.vrdma.backends]]\nkind = "rxe"\nnodes = "n.*"\n'
    site = on(text)
    chosen = site.site[node.Settings].backend
    assert [chosen(n) for n in ("ib7", "ib7x", "n1", "xn1")] == ["sriov", "", "rxe", ""]
    assert on("").site[node.Settings].backend("n1") == "rxe"
    (answer,) = answers_of(site, job=JobAttempt("42.srv", 0, "ada", 1000, "x"))
    assert isinstance(answer, Refusal)
    assert "vrdma=true: node x has no RDMA" in str(answer)


@pytest.mark.parametrize("text", ['kind = "roce"', 'kind = "rxe"\nnodes = "("', 'nodes = "n"'])
def test_bad_backend_is_a_config_error(text):
    with pytest.raises(ConfigError, match="backends"):
        on(f"[[plugin.vrdma.backends]]\n{text}")


def test_every_backend_forbids_suspend_save_and_migrate(tmp_path):
    site = site_of(tmp_path)
    found = [Disk("d", "/d", "raw"), *elements(site, chosen(site))]
    assert [find_forbidding(act, found) for act in ("suspend", "save", "migrate")] == [
        ["Fabric"]
    ] * 3


# -- rxe -------------------------------------------------------------------------------------------


def test_soft_roce_uses_the_first_nic(tmp_path):
    site = site_of(tmp_path)
    assert answers_of(site) == [PoolClaim("vrdma/rxe", ("vt-42.srv.0-n1-0",), key="vrdma")]
    tool, soft, device, check = context(site, chosen(site))
    assert (tool.path, tool.mode, tool.owner) == (TOOL, 0o755, "root")
    assert soft == RootCommand((TOOL, "soft", NIC.mac), stage="boot")
    assert device == GuestDevice("infiniband/uverbs*", "/dev/vtorque/rdma0", owner="job")
    assert check == RootCommand((TOOL, "check"))
    assert acquired(site, chosen(site)) == [fenced(NIC, "10.86.0.5", "10.86.0.6")]


def test_soft_roce_uses_the_nic_of_the_named_network(tmp_path):
    site = site_of(tmp_path, more='network = "hpc"')
    assert context(site, chosen(site))[1].argv[2] == HPC.mac
    assert acquired(site, chosen(site)) == [fenced(HPC, "10.186.0.5", "10.186.0.6")]


def test_single_guest_without_known_peers_is_fenced(tmp_path):
    site = site_of(tmp_path)
    assert acquired(site, chosen(site, peers=())) == [fenced(NIC, "10.86.0.5")]


def test_guest_without_an_address_is_refused(tmp_path):
    site = site_of(tmp_path)
    for addresses in ((), (HPC,), (Address(NIC.mac),)):
        with pytest.raises(
            Refused,
            match=r"guests have no address from vTorque in \[network\], which Soft-RoCE needs",
        ):
            context(site, chosen(site, addresses=addresses))


def test_unfiltered_nic_needs_the_permission_of_the_site(tmp_path):
    site = site_of(tmp_path)
    bare = (dataclasses.replace(NIC, filtered=False),)
    with pytest.raises(Refused, match=r"cannot filter .* \[plugin.vrdma\] allow_unfiltered = fal"):
        context(site, chosen(site, addresses=bare))
    accepted = site_of(tmp_path / "b", more="allow_unfiltered = true")
    assert len(context(accepted, chosen(accepted, addresses=bare))) == 4


def test_guests_with_equal_addresses_on_two_networks_have_separate_fences(monkeypatch):
    scripts = []
    monkeypatch.setattr(fence, "run_tool", lambda *_, stdin: scripts.append(stdin.decode()))
    here, there = (dataclasses.replace(a, ip="10.86.0.5") for a in (NIC, HPC))
    for one in (fenced(here, "10.86.0.6"), fenced(there, "10.86.0.7")):
        one.create()
        one.release()
    made, removed = scripts[::2], scripts[1::2]
    assert removed[0] != removed[1]
    for script, card in zip(made, (here, there), strict=True):
        (rule,) = [each for each in script.split("; ") if " saddr " in each]
        assert rule.startswith(f"ether daddr {card.mac} ip daddr 10.86.0.5 udp dport 4791 ")


def test_fence_accepts_only_addresses(monkeypatch):
    scripts = []
    monkeypatch.setattr(fence, "run_tool", lambda *argv, stdin: scripts.append((argv, stdin)))
    one = fenced(NIC, "10.86.0.5", "10.86.0.6")
    one.create()
    one.release()
    (argv, made), (_, removed) = scripts
    assert argv == ("nft", "-f", "-")
    assert b"ip saddr != { 10.86.0.5, 10.86.0.6 } drop" in made
    assert removed.splitlines() == [
        b"table bridge vrdma-525400aabbcc", b"delete table bridge vrdma-525400aabbcc",
    ]  # fmt: skip
    assert removed in made
    for bad in (
        Fence(NIC.mac, "10.0.0.1; flush ruleset", ()), Fence(NIC.mac, "10.0.0.1", ("x",)),
        Fence(NIC.mac, "::1", ()), Fence("x; flush ruleset", "10.0.0.1", ()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r".+"):  # in various ways
            bad.create()
    assert len(scripts) == 2


# -- sriov -----------------------------------------------------------------------------------------


def test_virtual_functions_are_leased_near_their_numa_node(tmp_path):
    site = site_of(tmp_path, "sriov", SRIOV)
    (claim,) = answers_of(site)
    near = {"0000:5e:00.1": 0, "0000:5e:00.2": 0, "0000:81:00.2": 1}
    assert claim == PoolClaim("pci/vrdma", tuple(near), 1, near=near, key="vrdma")
    assert len({item for g in placed(site, 3) for item in g.leased_items("pci/vrdma")}) == 3
    with pytest.raises(NoFit, match="4 of pci/vrdma"):
        placed(site, 4)


def test_unfiltered_virtual_functions_need_the_permission_of_the_site(tmp_path):
    (answer,) = answers_of(site_of(tmp_path, "sriov", 'cards = ["ibp94s0"]'))
    assert isinstance(answer, Refusal)
    assert "cannot filter what a guest sends through a virtual function" in str(answer)
    assert "[plugin.vrdma] allow_unfiltered = false" in str(answer)


def test_infiniband_function_gets_a_guid_derived_for_the_guest(tmp_path, monkeypatch):
    site = site_of(tmp_path, "sriov", 'cards = ["ibp94s0"]\nallow_unfiltered = true')
    one, two = placed(site, 2)
    state = [{"vf": 0, "node guid": "00:11", "port guid": "00:12", "link_state": "disable"}]
    shown = json.dumps([{"ifname": "ibp94s0", "vfinfo_list": [*state, {"vf": 1}]}])
    calls = []

    def ip(*argv):
        calls.append(" ".join(argv))
        return shown

    monkeypatch.setattr(guid, "run_tool", ip)
    card, first, other_card, second = acquired(site, one, two)
    assert (card.address, other_card.address) == ("0000:5e:00.1", "0000:5e:00.2")
    assert (card.uid, card.must_reset) == (one.qemu_uid, True)
    assert (first.card, first.number, first.old) == ("ibp94s0", 0, ("00:11", "00:12", "disable"))
    assert (second.number, second.old) == (1, (NOBODY, NOBODY, "auto"))
    assert first.guid.startswith("02:")
    assert len({first.guid, second.guid}) == 2
    assert len(first.guid.split(":")) == 8
    assert first == acquired(site, one)[1]  # every attempt of the same job has the same
    calls.clear()
    first.create()
    first.release()  # this machine has no such card
    assert calls == [
        f"ip link set dev ibp94s0 vf 0 node_guid {first.guid}",
        f"ip link set dev ibp94s0 vf 0 port_guid {first.guid}",
        "ip link set dev ibp94s0 vf 0 state auto",
    ]
    calls.clear()
    for _ in range(2):
        dataclasses.replace(first, card="lo").release()
    assert calls == 2 * [
        "ip link set dev lo vf 0 node_guid 00:11",
        "ip link set dev lo vf 0 port_guid 00:12",
        "ip link set dev lo vf 0 state disable",
    ]
    assert [type(e) for e in elements(site, one)] == [node.Fabric, PciDevice]
    assert elements(site, one)[1].mac is None
    assert not [i for i in context(site, one) if isinstance(i, RootCommand) and "up" in i.argv]


def test_function_unknown_to_ip_is_a_host_fault(tmp_path, monkeypatch):
    sysfs = tree("rdma-node", tmp_path / "sys")
    monkeypatch.setattr(guid, "run_tool", lambda *_: "[{}]")
    vf = virtual_functions(["ibp94s0"], sysfs)["0000:5e:00.2"]
    with pytest.raises(HostFault, match="ibp94s0 has no virtual function 1"):
        VfGuid.for_function(vf, "02:00")


def test_output_of_ip_on_this_machine_is_parsed():
    """``ip -json link show`` has the form that VfGuid.of parses, also without functions."""
    with pytest.raises(HostFault, match="lo has no virtual function 0"):
        VfGuid.for_function(SimpleNamespace(card="lo", number=0), "02:00")


def test_ethernet_function_gets_the_mac_of_the_guest_and_is_set_up(tmp_path):
    site = site_of(tmp_path, "sriov", 'cards = ["ens1f0"]\nallow_unfiltered = true')
    (got,) = placed(site)
    fabric, card = elements(site, got)
    assert (fabric.value, card.address) == ("sriov", "0000:81:00.2")
    assert card.mac.startswith("52:54:00:")
    assert RootCommand((TOOL, "up", card.mac), stage="boot") in context(site, got)
    sysfs = site.site[node.Settings].sysfs
    assert acquired(site, got) == [Vfio.for_function(card, got.qemu_uid, sysfs)]
    assert card.mac != elements(site, dataclasses.replace(got, name="other"))[1].mac


def test_domains_of_both_functions_match_the_libvirt_schema(tmp_path):
    for card, kind in (("ibp94s0", "hostdev"), ("ens1f0", "interface")):
        more = f'cards = ["{card}"]\nallow_unfiltered = true'
        site = site_of(tmp_path / card, "sriov", more)
        (got,) = placed(site)
        xml = site.domain(got)
        (device,) = ElementTree.fromstring(xml).findall(f"devices/{kind}")  # noqa: S314 - our own
        assert device.get("managed") == "yes"
        planned.check_schema(xml)


def test_node_without_functions_is_named(tmp_path):
    (answer,) = answers_of(site_of(tmp_path, "sriov", "allow_unfiltered = true"))
    assert "node n1 has no virtual function for guests (cards is empty)" in str(answer)
    site = site_of(tmp_path / "b", "sriov", 'cards = ["eth9"]\nrequired = false')
    (answer,) = answers_of(site)
    assert isinstance(answer, Notice)
    assert "runs without vrdma=true: node n1 has no virtual function" in answer.text
    got = guest(site)
    assert context(site, got) == elements(site, got) == acquired(site, got) == []
    assert (
        answers_of(site, host=dataclasses.replace(planned.host("rdma"), nodes=())) == []
    )  # a front end


# -- hyv -------------------------------------------------------------------------------------------


def test_hyv_needs_its_module_and_a_card(tmp_path):
    site = site_of(tmp_path, "hyv")
    assert "node n1 has no kernel module vhost_hyv" in str(answers_of(site)[0])
    write(Path(site.site[node.Settings].sysfs, "module/vhost_hyv/refcnt"), "0")
    assert answers_of(site) == [PoolClaim("vrdma/hyv", ("vt-42.srv.0-n1-0",), key="vrdma")]
    (fabric, args), (config,) = elements(site, chosen(site)), acquired(site, chosen(site))
    assert fabric.value == "hyv"
    assert args == QemuArgs(
        "hyv",
        ("-device", "virtio-hyv-pci,config_path=/r/hyv.conf", "-device", "virtio-rdmacm-pci"),
    )
    content = b"0002:c903:00ab:cdef\n506b:4b03:00c2:9a1e\n"
    assert config == File("/r/hyv.conf", 0o400, os.geteuid(), content=content)
    with pytest.raises(Refused, match="allow_qemu_args"):
        site.domain(chosen(site))
    assert "virtio-hyv-pci" in site.domain(chosen(site), allow_qemu_args=True)


# -- Between plan and boot -------------------------------------------------------------------------


def test_resource_missing_since_the_plan_is_a_host_fault(tmp_path):
    site = site_of(tmp_path, "hyv")
    module = Path(site.site[node.Settings].sysfs, "module/vhost_hyv/refcnt")
    write(module, "0")
    got = chosen(site)
    module.unlink()
    module.parent.rmdir()
    assert elements(site, got)[0].value == "hyv"
    with pytest.raises(HostFault, match="node n1 no longer has kernel module vhost_hyv"):
        acquired(site, got)


def test_virtual_function_in_use_since_the_plan_is_a_host_fault(tmp_path):
    site = site_of(tmp_path, "sriov", SRIOV)
    (got,) = placed(site)
    (item,) = got.leased_items("pci/vrdma")
    write(Path(site.site[node.Settings].sysfs, "devices", item, "net/eth9/flags"), "0x1003")
    for hook in (elements, context, acquired):
        with pytest.raises(
            HostFault, match=f"virtual function {item} is no longer available to guests"
        ):
            hook(site, got)


def test_resource_available_only_after_the_plan_is_not_used(tmp_path):
    """The guest has no virtual function, GUID or memory for it."""
    site = site_of(tmp_path, "hyv", "required = false")
    assert isinstance(answers_of(site)[0], Notice)
    write(Path(site.site[node.Settings].sysfs, "module/vhost_hyv/refcnt"), "0")
    got = guest(site)
    assert context(site, got) == elements(site, got) == acquired(site, got) == []


def test_submit_host_claims_soft_roce_without_checks(tmp_path):
    nowhere = dataclasses.replace(planned.host("rdma"), nodes=())
    assert len(answers_of(site_of(tmp_path), host=nowhere)) == 1
    assert answers_of(site_of(tmp_path / "b", "hyv"), host=nowhere) == []


# -- Inside the guest ------------------------------------------------------------------------------


@pytest.fixture
def run_guest_program(tmp_path):
    """Run the guest's program with the test's programs in place of its tools."""
    text = node.files("vtorque_vrdma").joinpath("guest", "vtorque-rdma").read_text()
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("cat", "grep", "wc", "uname"):
        (bin_ / name).symlink_to(
            f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}"
        )
    program = tmp_path / "tool"
    program.write_text(
        text.replace("PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"PATH={bin_}")
        .replace("/sys/", f"{tmp_path}/sys/").replace("sleep 0.2", "sleep 0")
    )  # fmt: skip
    write(tmp_path / "sys/class/net/eth0/address", "52:54:00:00:00:01")
    write(tmp_path / "sys/class/net/eth1/address", NIC.mac)

    def tool(name, script):
        (bin_ / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_ / name).chmod(0o755)

    def run(*argv):
        done = subprocess.run(
            ["/bin/sh", str(program), *argv], capture_output=True, timeout=180, check=False
        )
        return done.returncode, done.stdout.decode()

    for name in ("sleep", "modprobe"):
        tool(name, "exit 0")
    return SimpleNamespace(run=run, tool=tool, sys=tmp_path / "sys", log=tmp_path / "log")


def test_soft_roce_in_the_guest_uses_the_nic_with_the_address(run_guest_program):
    assert run_guest_program.run("soft", NIC.mac) == (
        1, "vrdma: this image has no program rdma, of the package iproute2\n",
    )  # fmt: skip
    run_guest_program.tool("rdma", f'echo "$@" >>{run_guest_program.log}')
    assert run_guest_program.run("soft", NIC.mac) == (0, "")
    assert run_guest_program.log.read_text() == "link add rxe0 type rxe netdev eth1\n"
    assert run_guest_program.run("soft", "52:54:00:99:99:99") == (
        1, "vrdma: no network card of the guest has the address 52:54:00:99:99:99\n",
    )  # fmt: skip
    run_guest_program.tool("modprobe", "exit 1")
    code, said = run_guest_program.run("soft", NIC.mac)
    assert code == 1
    assert "has no module rdma_rxe: take an image whose kernel has it" in said
    run_guest_program.tool("modprobe", "exit 0")
    run_guest_program.tool("rdma", "exit 1")
    assert run_guest_program.run("soft", NIC.mac) == (1, "vrdma: Soft-RoCE cannot be put on eth1\n")
    (run_guest_program.sys / "class/infiniband/rxe0").mkdir(parents=True)
    assert run_guest_program.run("soft", NIC.mac) == (0, "")


def test_function_in_the_guest_is_set_up(run_guest_program):
    run_guest_program.tool("ip", f'echo "$@" >>{run_guest_program.log}')
    assert run_guest_program.run("up", NIC.mac) == (0, "")
    assert run_guest_program.log.read_text() == "link set dev eth1 up\n"


def test_missing_device_in_the_guest_is_reported(run_guest_program):
    assert (
        "no program ibv_devices, of the package ibverbs-utils (Debian)"
        in run_guest_program.run("check")[1]
    )
    run_guest_program.tool("ibv_devices", "echo '  device  node GUID'; echo '  ------  ------'")
    assert run_guest_program.run("check") == (
        1,
        "vrdma: ibv_devices finds no RDMA device in the guest\n",
    )
    run_guest_program.tool("ibv_devices", "printf 'device\\n------\\nrxe0 505400fffeaabbcc\\n'")
    state = run_guest_program.sys / "class/infiniband/rxe0/ports/1/state"
    write(state, "1: DOWN")
    code, said = run_guest_program.run("check")
    assert code == 1
    assert "no RDMA port is active after 10 s" in said
    write(state, "4: ACTIVE")
    assert run_guest_program.run("check") == (0, "")


def test_packages_of_both_families_are_requested(tmp_path):
    site = site_of(tmp_path)
    items = site.context(chosen(site))
    assert [i.name for i in items if isinstance(i, Package) and i.family == "debian"] == [
        "rdma-core", "ibverbs-providers", "ibverbs-utils", "iproute2",
    ]  # fmt: skip


def test_doctor_reports_the_backend_of_the_node(tmp_path):
    (known,) = node.vtorque_health_checks()
    assert [r.status for r in known.check(site_of(tmp_path).site)] == ["ok"]
    (lacking,) = known.check(site_of(tmp_path / "b", "hyv").site)
    assert (lacking.status, lacking.fix) == ("warning", "it is part of a patched kernel")
