"""Rendered domains are accepted by libvirt's schema and by the parser of its test driver."""

import contextlib
import gc
import multiprocessing
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from vtorque_core.api.libvirt_domain import Channel, CpuModel
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_core.plan.placement import node_hardware
from vtorque_testing.planned import guest_plan

pytestmark = pytest.mark.integration

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.xml"))
SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
URI = "test:///default"
JOB = "{https://vtorque.org/xmlns/domain/1}job"


@pytest.fixture(autouse=True)
def fresh_driver() -> Iterator[None]:
    """The test driver lives as long as its connection (https://libvirt.org/drvtest.html)."""
    hypervisor.close()
    yield
    hypervisor.close()


def live_domains() -> list[Element]:
    """The live XML of vTorque's domains; the driver has its own example domain."""
    xml = hypervisor.call(URI, "list", lambda c: [d.XMLDesc() for d in c.listAllDomains()])
    found = [ElementTree.fromstring(text) for text in xml]  # noqa: S314 - libvirt's
    return [domain for domain in found if domain.find(f"./metadata/{JOB}") is not None]


def driver_xml(path: Path) -> str:
    """A golden domain, of the only type that the test driver accepts."""
    text = path.read_text()
    for kind in ("kvm", "qemu"):
        text = text.replace(f'<domain type="{kind}"', '<domain type="test"', 1)
    return text


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_domain_matches_the_libvirt_schema(path: Path) -> None:
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", str(SCHEMA), str(path)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_named_processor_matches_the_libvirt_schema(tmp_path: Path) -> None:
    wanted = merge([Contributed("survive", "vtorque-survive 1.0.0", CpuModel("Westmere"))])
    path = tmp_path / "domain.xml"
    path.write_text(render(DomainSpec(guest_plan(), "kvm"), wanted))
    test_golden_domain_matches_the_libvirt_schema(path)


OF_A_SITE = """\
<channel type="unix">
  <source mode="bind" path="{{ e.path }}"/>
  <log file="/var/log/{{ guest.name }}" append="on"/>
  <target type="virtio" name="{{ e.port }}"/>
  <alias name="{{ alias }}"/>
</channel>
"""


@pytest.mark.parametrize("fits", [True, False])
def test_template_of_a_site_is_checked_against_the_schema(tmp_path: Path, fits: bool) -> None:
    own = tmp_path / "channel.xml.j2"
    own.write_text(OF_A_SITE if fits else OF_A_SITE.replace("<log file", "<log flie"))
    channel = Channel("c", "org.vtorque.c", "/run/c.sock")
    merged = merge([Contributed("core", "core", channel)])
    made = tmp_path / "domain.xml"
    made.write_text(render(DomainSpec(guest_plan(), "tcg", templates=tmp_path), merged))
    done = subprocess.run(
        ["xmllint", "--noout", "--relaxng", SCHEMA, made], capture_output=True, check=False
    )
    assert (done.returncode == 0) == fits
    with contextlib.nullcontext() if fits else pytest.raises(HostFault, match="start domain"):
        hypervisor.create_domain(URI, driver_xml(made))
    assert len(live_domains()) == fits


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_domain_is_parsed_and_kept_by_libvirt(path: Path) -> None:
    hypervisor.create_domain(URI, driver_xml(path))
    (domain,) = live_domains()
    job = domain.find(f"./metadata/{JOB}")
    assert job is not None
    assert domain.findtext("name") == "vt-42.srv.0-n1-0"
    assert (job.get("id"), job.get("owner")) == ("42.srv", "ada")
    uuid = domain.findtext("uuid", "")
    assert hypervisor.domain_runs(URI, uuid)
    live = ElementTree.tostring(domain, encoding="unicode")
    for text in ("ua-linux-guest-control", "<on_reboot>destroy", 'owner="ada"'):
        assert text in live


def test_unknown_element_is_not_dropped_silently() -> None:
    xml = driver_xml(GOLDEN[0]).replace("<devices>", "<devices><nonsense/>")
    with pytest.raises(HostFault, match="start domain"):
        hypervisor.create_domain(URI, xml)
    assert live_domains() == []


def test_destroying_a_domain_is_final_and_idempotent(capfd: pytest.CaptureFixture[str]) -> None:
    hypervisor.create_domain(URI, driver_xml(GOLDEN[0]))
    (domain,) = live_domains()
    uuid = domain.findtext("uuid", "")
    assert hypervisor.domain_runs(URI, uuid)
    hypervisor.destroy_domain(URI, uuid)
    assert not hypervisor.domain_runs(URI, uuid)
    hypervisor.destroy_domain(URI, uuid)
    assert capfd.readouterr().err == ""


def test_libvirt_errors_are_not_printed_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HostFault, match="start domain"):
        hypervisor.create_domain(URI, "<domain/>")
    assert capfd.readouterr().err == ""


def test_missing_libvirtd_is_named_with_the_fix(tmp_path: Path) -> None:
    uri = f"qemu+unix:///system?socket={tmp_path}/none"
    with pytest.raises(HostFault, match=r"does not answer at .*none.*start libvirtd"):
        hypervisor.network_names(uri)


def test_cpus_memory_and_topology_are_read_from_libvirt() -> None:
    assert node_hardware.host_cpus(URI)
    assert node_hardware.host_memory_mib(URI) > 0
    assert [len(node.cpus) for node in node_hardware.topology(URI).nodes] == [8, 8]


def test_missing_qemu_user_is_a_host_fault() -> None:
    with pytest.raises(HostFault, match=r"no-such-user.*qemu_user"):
        hypervisor.qemu_uid("no-such-user")


def test_unresponsive_libvirtd_times_out(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(HostFault, match=r"no answer from libvirtd within 0\.5 s"):
            uri = f"qemu+unix:///system?socket={path}"
            hypervisor.call(uri, "connect", lambda c: c.getLibVersion(), timeout=0.5)


def test_forked_child_does_not_close_the_connection_of_its_parent() -> None:
    hypervisor.create_domain(URI, driver_xml(GOLDEN[0]))
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert len(live_domains()) == 1
