"""Domains that stand still and go on, with libvirt's test driver: twice is as good as once."""

import pytest

from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault

pytestmark = pytest.mark.integration

URI = "test:///default"
RUNS, PAUSED = 1, 3  # virDomainState


@pytest.fixture
def domain():
    yield hypervisor.call(URI, "test", lambda c: c.lookupByName("test").UUIDString())
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
