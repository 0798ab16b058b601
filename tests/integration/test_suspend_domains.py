"""Suspend and resume of domains with libvirt's test driver; both are idempotent."""

import pytest

from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_survive import domains

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


def test_domain_can_be_suspended_and_resumed_repeatedly(domain):
    for act, wanted in ((hypervisor.suspend_domain, PAUSED), (hypervisor.resume_domain, RUNS)):
        for _ in range(2):
            act(URI, domain, 10.0)
            assert state(domain) == wanted


def test_suspend_of_an_ended_domain_raises(domain):
    hypervisor.destroy_domain(URI, domain)
    for act in (hypervisor.suspend_domain, hypervisor.resume_domain):
        with pytest.raises(HostFault):
            act(URI, domain)


def test_state_and_migratable_xml_of_a_domain_are_reported(domain):
    assert domains.domain_state(URI, domain) == "runs"
    assert "<domain" in domains.migratable_xml(URI, domain)
    assert {"vTorque", "libvirt", "QEMU", "processor"} == set(hypervisor.versions(URI))
    hypervisor.suspend_domain(URI, domain)
    assert domains.domain_state(URI, domain) == "still"
    hypervisor.destroy_domain(URI, domain)
    assert domains.domain_state(URI, domain) == ""
    nobody = "00000000-0000-0000-0000-000000000000"
    assert domains.domain_state(URI, nobody) == ""
    with pytest.raises(HostFault, match="the guest has ended"):
        domains.migratable_xml(URI, nobody)


def test_failed_migration_is_reported_and_the_domain_keeps_running(domain):
    with pytest.raises(HostFault, match="migrate domain: "):
        domains.migrate_domain(URI, domain, "test:///elsewhere", "<domain/>", 10.0)
    assert domains.domain_state(URI, domain) == "runs"
