"""Domains of restored guests: paths of the new job, and equality with the request."""

from pathlib import Path

import pytest

from vtorque_core.base.errors import Refused
from vtorque_core.plan.domain.saved_domain import adapt_xml
from vtorque_testing import planned

PLACES = Path("/s/1.srv.0/g0"), Path("/r/1.srv.0/g0")
GUEST = planned.guest_plan(state_dir=Path("/s/2.srv.0/g0"), run_dir=Path("/r/2.srv.0/g0"))
WAS = """<domain type="kvm">
  <name>vt-1.srv.0-n1-0</name>
  <uuid>0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f</uuid>
  <metadata>
    <vtorque:job xmlns:vtorque="https://vtorque.org/xmlns/domain/1" id="1.srv" owner="ada"/>
  </metadata>
  <memory unit="KiB">524288</memory>
  <currentMemory unit="KiB">524288</currentMemory>
  <vcpu placement="static" cpuset="1">1</vcpu>
  <cputune><vcpupin vcpu="0" cpuset="1"/></cputune>
  <os><type arch="x86_64" machine="pc-q35-10.0">hvm</type><kernel>/p/micro/1/vmlinuz</kernel></os>
  <devices>
    <controller type="pci" index="1" model="pcie-root-port"/>
    <filesystem type="mount">
      <driver type="virtiofs" queue="1024"/>
      <source socket="/r/1.srv.0/g0/fs-home.sock"/>
      <target dir="home"/>
      <alias name="ua-linux-guest-home"/>
      <address type="pci" domain="0x0000" bus="0x00" slot="0x04" function="0x0"/>
    </filesystem>
    <interface type="network">
      <mac address="52:54:00:01:02:03"/>
      <source network="vtorque" portid="1" bridge="virbr7"/>
      <target dev="vt525400010203"/>
      <alias name="ua-core-nic0"/>
    </interface>
    <serial type="pty"><log file="/s/1.srv.0/g0/console.log" append="off"/></serial>
    <disk type="file" device="disk">
      <source file="/s/1.srv.0/g01/other"/><target dev="vdb" bus="virtio"/><serial>x</serial>
    </disk>
  </devices>
  <seclabel type="static" model="dac" relabel="no"><label>+101:libvirt-qemu</label></seclabel>
</domain>"""
WANTED = (
    WAS.replace("1.srv.0", "2.srv.0")
    .replace('id="1.srv" owner="ada"', 'id="2.srv" owner="a&amp;b"')
    .replace('memory unit="KiB">524288', 'memory unit="MiB">512')
    .replace('cpuset="1"', 'cpuset="3"')
    .replace("pc-q35-10.0", "q35")
    .replace("+101", "+202")
)


def test_restored_domain_has_paths_and_labels_of_the_new_job():
    xml = adapt_xml(WAS, WANTED, PLACES, GUEST)
    assert 'socket="/r/2.srv.0/g0/fs-home.sock"' in xml
    assert 'file="/s/2.srv.0/g0/console.log"' in xml
    assert 'file="/s/1.srv.0/g01/other"' in xml, "a path of another directory was changed"
    assert "<name>vt-1.srv.0-n1-0</name>" in xml, "the name was changed, which libvirt rejects"
    assert 'id="2.srv" owner="a&amp;b"' in xml and "1.srv" not in xml.split("metadata")[1]
    assert xml.count('cpuset="3"') == 2 and 'cpuset="1"' not in xml
    assert "+202:libvirt-qemu" in xml and "+101" not in xml


def test_restored_domain_keeps_the_hardware_of_the_guest():
    xml = adapt_xml(WAS, WANTED, PLACES, GUEST)
    assert "pc-q35-10.0" in xml and 'slot="0x04"' in xml and "pcie-root-port" in xml


HUGE = '<memoryBacking><hugepages><page size="2048" unit="KiB"/></hugepages></memoryBacking><os>'


def test_unfiltered_or_huge_page_guest_is_refused_if_the_site_or_job_differs():
    """The job has no lease of the huge pages."""
    with pytest.raises(Refused, match=r"vtorque open, not .* filtered"):
        adapt_xml(WAS.replace("vt525400010203", "vnet3"), WANTED, PLACES, GUEST)
    with pytest.raises(Refused, match="huge pages in KiB is 2048, not none"):
        adapt_xml(WAS.replace("<os>", HUGE), WANTED, PLACES, GUEST)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('unit="MiB">512<', 'unit="MiB">256<', "memory in KiB is 524288, not 262144"),
        (">1</vcpu>", ">2</vcpu>", "vcpu is 1, not 2"),
        ('dir="home"', 'dir="soft"', "filesystem linux-guest-home is home, not soft"),
        ("ua-linux-guest-home", "ua-x-y", "filesystem x-y is none, not home"),
        ("micro/1/", "micro/2/", "kernel is /p/micro/1/vmlinuz, not /p/micro/2/vmlinuz"),
        ('type="kvm"', 'type="qemu"', "hypervisor is kvm, not qemu"),
        ("  <os>", HUGE, "huge pages in KiB is none, not 2048"),
        ('network="vtorque"', 'network="inner"', "02:03 network vtorque filtered, not .* inner"),
        ('network="vtorque"', 'x="y"', "network vtorque filtered, not .* bridge virbr7 filtered"),
        ("vt525400010203", "vnet3", "network vtorque filtered, not .* network vtorque open"),
    ],
)
def test_saved_guest_that_differs_from_the_request_is_refused(old, new, said):
    assert old in WANTED
    with pytest.raises(Refused, match=said):
        adapt_xml(WAS, WANTED.replace(old, new), PLACES, GUEST)
