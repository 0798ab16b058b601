"""Domains that stand still and go on, with libvirt's test driver: twice is as good as once."""

import pytest

from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault

pytestmark = pytest.mark.integration

URI = "test:///default"
RUNS, PAUSED = 1, 3  # virDomainState


@pytest.fixture
def domain():
    def started(connection):
        found = connection.lookupByName("test")
        if not found.isActive():  # it has been ended by another test
            found.create()
        return found.UUIDString()

    yield hypervisor.call(URI, "test", started)
    hypervisor.close()


def state(uuid):
    return hypervisor.on_domain(URI, uuid, "state", lambda d: d.state()[0])


def test_a_domain_stands_still_and_goes_on_as_often_as_it_is_told(domain):
    for act, wanted in ((hypervisor.suspend_domain, PAUSED), (hypervisor.resume_domain, RUNS)):
        for _ in range(2):
            act(URI, domain, 10.0)
            assert state(domain) == wanted


def test_one_that_has_ended_is_said(domain):
    hypervisor.destroy_domain(URI, domain)
    for act in (hypervisor.suspend_domain, hypervisor.resume_domain):
        with pytest.raises(HostFault):
            act(URI, domain)


def test_what_a_domain_does_and_what_another_node_needs_to_know(domain):
    assert hypervisor.domain_state(URI, domain) == "runs"
    assert "<domain" in hypervisor.migratable_xml(URI, domain)
    assert {"libvirt", "QEMU", "processor"} == set(hypervisor.versions(URI))
    hypervisor.suspend_domain(URI, domain)
    assert hypervisor.domain_state(URI, domain) == "still"
    hypervisor.destroy_domain(URI, domain)
    assert hypervisor.domain_state(URI, domain) == ""
    nobody = "00000000-0000-0000-0000-000000000000"
    assert hypervisor.domain_state(URI, nobody) == ""
    with pytest.raises(HostFault, match="the guest has ended"):
        hypervisor.migratable_xml(URI, nobody)


def test_a_move_that_libvirt_cannot_make_is_said_and_the_domain_stays(domain):
    with pytest.raises(HostFault, match="migrate domain: "):
        hypervisor.migrate_domain(URI, domain, "test:///elsewhere", "<domain/>", 10.0)
    assert hypervisor.domain_state(URI, domain) == "runs"
