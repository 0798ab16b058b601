"""The packet filter's script: only a name, a MAC and an address can be inserted."""

import pytest

from vtorque_core.base.errors import HostFault
from vtorque_core.config.schema import Network
from vtorque_core.resources import netfilter
from vtorque_core.resources.netfilter import guard, guard_table, rules

MAC = "52:54:00:01:02:03"


def test_rules_with_address_allow_that_address_only() -> None:
    script = rules("vt525400010203", MAC, "10.86.0.16")
    assert f"ether saddr != {MAC} drop" in script
    assert "ether type ip ip saddr 10.86.0.16 jump ipv4" in script
    assert "ether type 0x8035 @nh,48,16 3 @nh,64,48 0x525400010203 accept" in script
    assert "senders" not in script


def test_rules_without_address_check_the_mac_and_the_number_of_addresses() -> None:
    script = rules("vt525400010203", MAC, None)
    assert f"ether saddr != {MAC} drop" in script
    assert "update @senders { ip saddr }" in script
    assert "10.86." not in script


def test_rules_limit_connections_only_if_the_node_tracks_connections() -> None:
    tables = ["bridge vt525400010203", "inet vt525400010203"]
    for connections, made in ((0, tables[:1]), (8192, tables)):
        script = rules("vt525400010203", MAC, "10.86.0.16", connections)
        assert [each for each in tables if f"table {each} {{" in script] == made
        assert all(f"delete table {each}\n" in script for each in tables)
    assert "ct count over 128 " in script and "ct mark set 1979777539\n" in script


def test_rules_leave_no_placeholder_with_and_without_an_address() -> None:
    for ip in ("10.86.0.16", None):
        assert "$" not in rules("vt525400010203", MAC, ip, 64, ipv6=True)


@pytest.mark.parametrize("ip", ["10.86.0.16", None])
def test_rules_accept_ipv6_only_with_the_key_and_without_an_assigned_address(
    ip: str | None,
) -> None:
    assert "icmpv6" not in rules("vt525400010203", MAC, ip)
    assert ("icmpv6" in rules("vt525400010203", MAC, ip, ipv6=True)) is (ip is None)


@pytest.mark.parametrize(
    ("tap", "mac", "ip"),
    [
        ('x" drop', MAC, None),
        ("", MAC, None),
        ("vt5254000102031", "52:54:00:01:02", None),
        ("vt1", MAC, "10.86.0.16 accept"),
        ("vt1", MAC, "::1"),
        ("vt1", MAC + "\naccept", None),
        ("a" * 16, MAC, None),
    ],
)
def test_invalid_tap_mac_or_address_raises_value_error(tap: str, mac: str, ip: str | None) -> None:
    with pytest.raises(ValueError):
        rules(tap, mac, ip)


def test_node_guard_drops_all_but_the_ports_of_the_site() -> None:
    script = guard("vtorque", "vtorque0", ("tcp/2049", "udp/123"), dhcp=False)
    lines = [line.strip() for line in script.splitlines()]
    assert lines[:2] == [
        "table inet vtorque-node-vtorque",
        "delete table inet vtorque-node-vtorque",
    ]
    assert 'iifname "vtorque0" fib saddr type local drop' in lines
    first = lines.index("chain input {") + 2
    assert lines[first : first + 7] == [
        'iifname != "vtorque0" accept',
        "ct state established,related accept",
        "# An ICMP error about no connection of the node would change the path MTU to any host.",
        "ct state != invalid meta l4proto { icmp, ipv6-icmp } accept",
        "tcp dport 2049 accept",
        "udp dport 123 accept",
        "drop",
    ]
    assert lines[-6:-2] == [
        "meta l4proto { icmp, ipv6-icmp } accept",
        "meta l4proto tcp ct original proto-dst 2049 accept",
        "meta l4proto udp ct original proto-dst 123 accept",
        "drop",
    ]
    assert "udp dport 67 accept" in guard("vtorque", "vtorque0", (), dhcp=True)


@pytest.mark.parametrize(
    ("bridge", "port"),
    [('x" accept #', "tcp/1"), ("br*", "tcp/1"), ("", "tcp/1"), ("b" * 16, "tcp/1"),
     ("br0", "tcp/1 accept"), ("br0", "sctp/1"), ("br0", "tcp/"), ("br0", "tcp/123456")],
)  # fmt: skip
def test_guard_accepts_only_valid_bridges_and_ports(bridge: str, port: str) -> None:
    with pytest.raises(ValueError):
        guard("n", bridge, (port,), dhcp=False)


def test_network_name_makes_a_table_name() -> None:
    assert guard_table('a b"; accept') == "vtorque-node-a_b___accept"


def _network(forward: str, bridge: str = "<bridge name='br7'/>") -> str:
    return f"<network><name>n</name>{forward}{bridge}</network>"


@pytest.mark.parametrize(
    ("xml", "bridge"),
    [
        (_network("<forward mode='nat'><nat/></forward>"), "br7"),
        (_network("<forward/>"), "br7"),  # nat is libvirt's default
        (_network("<forward mode='route'/>"), "br7"),
        (_network(""), "br7"),
        (_network("<forward mode='bridge'/>"), None),  # the site's network
        (_network("<forward mode='private'><interface dev='e0'/></forward>", ""), None),
    ],
)
def test_only_a_bridge_of_libvirt_is_guarded(xml: str, bridge: str | None) -> None:
    assert netfilter.guest_bridge(xml) == bridge


def test_inactive_network_is_a_host_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netfilter.hypervisor, "network_xml", lambda _uri, _name: None)
    with pytest.raises(HostFault, match="vtorque is not active: run vtorque setup install"):
        netfilter.node_guard(Network(), "test:///default")
    assert netfilter.node_guard(Network(kind="bridge"), "test:///default") == ""


def test_guard_has_the_ports_of_the_site_and_dhcp_of_libvirt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netfilter.hypervisor, "network_xml", lambda _uri, _name: _network(""))
    assert "dport" not in netfilter.node_guard(Network(), "test:///default")
    guard = netfilter.node_guard(Network(node_ports=("tcp/2049",)), "test:///default")
    assert 'iifname != "br7" accept' in guard and "tcp dport 2049 accept" in guard
    guard = netfilter.node_guard(Network(addressing="dhcp"), "test:///default")
    assert "udp dport 67 accept" in guard


def test_sweep_removes_guards_of_missing_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """libvirt's test driver has one network, ``default``."""
    tables = "table inet filter\ntable inet vtorque-node-default\ntable inet vtorque-node-old\n"
    loaded: list[bytes] = []

    def tool(_name: str, *_words: str, stdin: bytes = b"") -> str:
        if stdin:
            loaded.append(stdin)
        return tables

    monkeypatch.setattr(netfilter, "run_tool", tool)
    assert netfilter.sweep("test:///default") == ["vtorque-node-old"]
    assert loaded == [b"table inet vtorque-node-old\ndelete table inet vtorque-node-old\n"]
    assert netfilter.has_guard("default") and not netfilter.has_guard("other")
    tables = "table inet filter\n"
    with monkeypatch.context() as patch:
        patch.setattr(netfilter.hypervisor, "network_names", lambda _uri: 1 / 0)  # not asked
        assert netfilter.sweep("test:///default") == []
    netfilter.hypervisor.close()
