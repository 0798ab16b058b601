"""Several NICs of one guest: each found by its MAC, one default route, names in all networks."""

from __future__ import annotations

import os
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from sample_guests import DEBIAN, PLAN, FakeRoot
from vtorque_core.api.batch_system import BareNode
from vtorque_core.api.guest_plan import Address
from vtorque_linux_guest.boot import cloud_init, etc_files, keys, setup_script
from vtorque_linux_guest.settings import Settings

FIRST = PLAN.addresses[0]
HPC = Address("52:54:00:01:02:04", "10.9.0.16", 24, network="hpc", mtu=9000)
SECOND_ROUTE = Address(HPC.mac, HPC.ip, 24, "10.9.0.1", network="hpc", metric=2000)
BY_DHCP = Address(HPC.mac, network="hpc")
BARE = Address("52:54:00:01:02:05", network="raw", dhcp=False)
ALIASES = (("vn1-hpc", "vn1", "10.9.0.16"), ("vn2-hpc", "vn2", "10.9.0.80"))


@pytest.fixture
def three_cards(fake_root: FakeRoot) -> FakeRoot:
    for name, mac in (("eth1", BARE.mac), ("eth2", HPC.mac)):  # in another order
        fake_root.write(f"/sys/class/net/{name}/address", f"{mac}\n")
    return fake_root


def test_micro_guest_configures_each_nic_by_its_mac(three_cards: FakeRoot, plan) -> None:
    ran = three_cards.setup(plan(addresses=(FIRST, HPC, BARE)))
    assert (ran.code, ran.output) == (0, "")
    assert ran.calls_of("ip") == [
        ("link", "set", "dev", "eth0", "up"),
        ("addr", "add", "10.86.0.16/16", "dev", "eth0"),
        ("route", "add", "default", "via", "10.86.0.1", "dev", "eth0"),
        ("link", "set", "dev", "eth2", "mtu", "9000", "up"),
        ("addr", "add", "10.9.0.16/24", "dev", "eth2"),
        ("link", "set", "dev", "eth1", "up"),
    ]
    assert ran.calls_of("udhcpc") == []
    assert [s for s in ran.steps if s.startswith("network")] == [
        "network 10.86.0.16",
        "network hpc 10.9.0.16",
        "network raw without an address",
    ]


def test_second_default_route_has_a_higher_metric(three_cards: FakeRoot, plan) -> None:
    ran = three_cards.setup(plan(addresses=(FIRST, SECOND_ROUTE)))
    routes = [call for call in ran.calls_of("ip") if call[0] == "route"]
    assert routes[1] == (
        *("route", "add", "default", "via", "10.9.0.1", "dev", "eth2", "metric", "2000"),
    )


def test_dhcp_on_a_second_network_sets_an_address_and_no_route(three_cards: FakeRoot, plan) -> None:
    ran = three_cards.setup(plan(addresses=(FIRST, BY_DHCP)))
    assert ran.code == 0, ran.output
    assert len(ran.calls_of("udhcpc")) == 1
    assert three_cards.read("/etc/resolv.conf") == "search a.example b\nnameserver 10.0.0.53\n"
    script = setup_script.build(plan(addresses=(FIRST, BY_DHCP)), (), Settings())["setup.sh"]
    assert b"export VTORQUE_ADDRESS_ONLY=1\n" in script
    first = setup_script.build(plan(addresses=(Address(FIRST.mac),)), (), Settings())["setup.sh"]
    assert b"export VTORQUE_ADDRESS_ONLY=\n" in first


@pytest.mark.parametrize(("only", "routes"), [("1", 0), ("", 1)])
def test_dhcp_lease_sets_a_route_only_on_the_first_network(
    tmp_path: Path, only: str, routes: int
) -> None:
    log = tmp_path / "ip"
    (tmp_path / "run").mkdir()
    stub = tmp_path / "run/ip"
    stub.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    stub.chmod(0o755)
    text = files("vtorque_linux_guest.guest").joinpath("udhcpc.sh").read_text()
    script = tmp_path / "udhcpc.sh"
    script.write_text(text.replace("/etc/resolv.conf", str(tmp_path / "resolv.conf")))
    environ = {
        "PATH": f"{tmp_path}/run:{os.environ['PATH']}", "interface": "eth1", "ip": "10.9.0.50",
        "mask": "24", "router": "10.9.0.1", "dns": "10.9.0.2", "VTORQUE_ADDRESS_ONLY": only,
    }  # fmt: skip
    subprocess.run(["/bin/sh", script, "bound"], env=environ, check=True, timeout=180)
    said = log.read_text().splitlines()
    assert "addr add 10.9.0.50/24 dev eth1" in said
    assert len([line for line in said if line.startswith("route")]) == routes
    assert (tmp_path / "resolv.conf").exists() == bool(routes)


def network_config(guest):
    return yaml.safe_load(cloud_init.network_config(guest))


def test_cloud_init_gets_each_card(plan) -> None:
    config = network_config(plan(image=DEBIAN, addresses=(FIRST, HPC, BARE)))
    assert config["version"] == 1
    one, two, three = config["config"]
    assert one["subnets"][0]["gateway"] == "10.86.0.1"
    assert two == {
        "type": "physical", "name": "eth1", "mac_address": HPC.mac, "mtu": 9000,
        "subnets": [{"type": "static", "address": "10.9.0.16/24"}],
    }  # fmt: skip
    assert three["subnets"] == [{"type": "manual"}]


def test_cloud_init_gets_a_second_route_with_its_metric(plan) -> None:
    config = network_config(plan(image=DEBIAN, addresses=(FIRST, SECOND_ROUTE)))
    assert config["config"][1]["subnets"][0]["routes"] == [
        {"network": "0.0.0.0", "netmask": "0.0.0.0"}  # noqa: S104
        | {"gateway": "10.9.0.1", "metric": 2000}
    ]


def test_cloud_init_keeps_the_routes_of_a_second_networks_dhcp_out(plan) -> None:
    config = network_config(plan(image=DEBIAN, addresses=(FIRST, BY_DHCP)))
    assert config == {
        "version": 2,
        "ethernets": {
            "eth0": {
                "match": {"macaddress": FIRST.mac}, "set-name": "eth0", "dhcp4": False,
                "addresses": ["10.86.0.16/16"],
                "nameservers": {"addresses": ["10.0.0.53"], "search": ["a.example", "b"]},
                "routes": [{"to": "0.0.0.0/0", "via": "10.86.0.1"}],
            },
            "eth1": {
                "match": {"macaddress": HPC.mac}, "set-name": "eth1", "dhcp4": True,
                "dhcp4-overrides": {"use-routes": False, "use-dns": False},
            },
        },
    }  # fmt: skip


def test_names_in_all_networks_are_known_to_hosts_and_ssh(plan) -> None:
    bare = (BareNode("n3", 8, "10.0.0.3"), BareNode("n4", 8))  # of a mixed request
    guest = plan(image=DEBIAN, addresses=(FIRST, HPC), aliases=ALIASES, bare=bare)
    hosts = etc_files.hosts_text(guest).splitlines()
    assert hosts[2:] == [
        "10.86.0.16 vn1", "10.86.0.80 vn2", "10.9.0.16 vn1-hpc", "10.9.0.80 vn2-hpc",
        "10.0.0.3 n3",
    ]  # fmt: skip
    (first_line,) = (line for line in etc_files.ssh_text(guest).splitlines() if "Host " in line)
    assert {"vn2", "vn2-hpc", "10.9.0.80"} <= set(first_line.split())
    known = dict(line.split(" ", 1) for line in _known_hosts(guest))
    assert known["vn2-hpc,10.9.0.80"] == known["vn2,10.86.0.80"]
    assert known["vn2-hpc,10.9.0.80"] == keys.host_key(guest.secret, "vn2").public


def _known_hosts(guest):
    files = {path: text for path, text, *_ in etc_files.ssh_files(guest)}
    return files["/etc/ssh/ssh_known_hosts"].splitlines()


def test_setup_waits_for_the_address_configured_by_cloud_init(fake_root: FakeRoot, plan) -> None:
    guest = plan(image=DEBIAN)
    head = "Iface\tDestination\tGateway\n"
    fake_root.write("/proc/net/route", head)
    route = shlex.quote(str(fake_root.path / "proc/net/route"))
    fake_root.stub("sleep", f"#!/bin/sh\nprintf 'eth0\\t0A560000\\n' >>{route}\n")
    ran = fake_root.setup(guest, [])
    assert ran.code == 0, ran.output
    assert "network 10.86.0.16" in ran.steps
    assert fake_root.read("/proc/net/route") == head + "eth0\t0A560000\n"
