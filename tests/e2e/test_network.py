"""Addresses in real guests: from the site's program, or by DHCP. Planned ones: test_networks."""

import platform

import pytest

pytestmark = pytest.mark.e2e

SHOW = (
    "#!/bin/sh\nip -4 -o addr show scope global | awk '{print $4}'\n"
    "ip route | awk '/default/{print $3}'\n"
)
DHCP_NETWORK = """
<network><name>vtorque-dhcp</name><bridge name='vtdhcp0' stp='off' delay='0'/>
<ip address='10.88.0.1' netmask='255.255.255.0'>
<dhcp><range start='10.88.0.50' end='10.88.0.60'/></dhcp></ip></network>
"""
LEASES = [f"10.88.0.{number}".encode() for number in range(50, 61)]


@pytest.fixture
def with_network(clean):
    """Return a function that changes the node's [network] table until the test ends."""
    saved = clean.config.read_text()

    def change(lines):
        head, _, rest = saved.partition("[network]\n")
        tail = rest[rest.index("\n[") :]
        clean.config.write_text(f"{head}[network]\n{lines}{tail}")

    yield change
    clean.config.write_text(saved)


@pytest.fixture
def dhcp_network(tmp_path):
    """Run a libvirt network whose DHCP server gives the addresses."""
    import subprocess

    xml = tmp_path / "network.xml"
    xml.write_text(DHCP_NETWORK)
    subprocess.run(["virsh", "-q", "net-create", xml], check=True)
    yield "vtorque-dhcp"
    subprocess.run(["virsh", "-q", "net-destroy", "vtorque-dhcp"], check=True)


@pytest.mark.full
def test_address_is_assigned_by_the_program_of_the_site(clean, with_network, tmp_path_factory):
    program = tmp_path_factory.mktemp("site") / "address"
    program.write_text(f'#!/bin/sh\n[ "$1" = {platform.node()} ] && echo "10.87.9.$(($2 + $3))"\n')
    program.chmod(0o755)
    with_network(
        'source = "vtorque-e2e"\nsubnet = "10.87.0.0/16"\naddressing = "command"\n'
        f'command = "{program}"\n'
    )
    result = clean.job(SHOW)
    assert result.out.split()[0] == b"10.87.9.1/16", result.err


def test_address_is_assigned_by_dhcp(clean, with_network, dhcp_network):
    with_network(f'source = "{dhcp_network}"\naddressing = "dhcp"\n')
    result = clean.job(SHOW)
    assert result.out.split(b"/")[0] in LEASES, result.err


@pytest.mark.full
def test_guest_without_a_network_runs(clean, with_network):
    with_network('kind = "none"\n')
    result = clean.job("#!/bin/sh\nls /sys/class/net\n")
    assert result.out == b"lo\n", result.err
