"""The packet filter's script: nothing but a name, a MAC and an address can get into it."""

import pytest

from vtorque_core.resources.netfilter import rules

MAC = "52:54:00:01:02:03"


def test_with_an_address_all_else_is_dropped() -> None:
    script = rules("vt525400010203", MAC, "10.86.0.16")
    assert f"ether saddr != {MAC} drop" in script
    assert "ether type ip ip saddr 10.86.0.16 accept" in script
    assert script.rstrip().splitlines()[-3].strip() == "drop"


def test_with_dhcp_only_the_mac_is_checked() -> None:
    assert "ip saddr" not in rules("vt525400010203", MAC, None)


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
def test_anything_else_is_refused(tap: str, mac: str, ip: str | None) -> None:
    with pytest.raises(ValueError):
        rules(tap, mac, ip)
