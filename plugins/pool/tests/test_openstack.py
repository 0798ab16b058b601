"""The driver openstack, by openstacksdk, against a double of Nova over HTTP."""

import base64
import json

import pytest

from nova_double import Nova
from vtorque_pool.api import CloudFault, MachineOrder
from vtorque_pool.drivers import openstack
from vtorque_testing.pool_driver import PoolDriverContract

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning"),
    pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK60Warning"),
]


@pytest.fixture
def nova():
    found = Nova()
    yield found
    found.close()


class OpenStackHarness:
    def __init__(self, nova, top):
        self.nova = nova
        auth = {"auth_url": f"{nova.url}/identity/v3", "username": "u", "password": "p",
                "project_name": "p", "user_domain_name": "Default",
                "project_domain_name": "Default"}  # fmt: skip
        cloud = {"auth": auth, "region_name": "r"}
        (top / "clouds.yaml").write_text(json.dumps({"clouds": {"test": cloud}}))
        self.options = {"cloud": "test", "clouds": str(top / "clouds.yaml"), "timeout": "10",
                        "network": "net"}  # fmt: skip

    def driver(self):
        return openstack.driver(self.options)

    def order(self, node, cluster="contract"):
        return MachineOrder(cluster, node, "small", "image", "m1", user_data=b"#!/bin/sh\n\xff")

    def stranger(self):
        return self.nova.make({"name": "n1"})

    def list_machines(self):
        return set(self.nova.servers)

    def silence(self):
        return self.nova.set("down")

    def exhaust(self):
        return self.nova.set("full")

    def user_data(self, machine):
        return base64.b64decode(self.nova.servers[machine]["user_data"])


class TestOpenStack(PoolDriverContract):
    @pytest.fixture
    def cloud(self, nova, tmp_path):
        return OpenStackHarness(nova, tmp_path)


def test_unknown_cloud_is_a_fault(tmp_path):
    with pytest.raises(CloudFault):
        openstack.driver({"cloud": "nowhere", "clouds": str(tmp_path / "none.yaml")})


def test_server_in_error_has_ended_and_the_quota_is_read(nova, tmp_path):
    cloud = OpenStackHarness(nova, tmp_path)
    driver = cloud.driver()
    made = driver.create(cloud.order("n1"))
    assert driver.quota() == 19
    nova.servers[made.id]["status"] = "ERROR"
    [found] = driver.machines("contract")
    assert (found.state, found.is_live, found.address) == ("ended", False, "10.0.0.7")


@pytest.mark.parametrize("status", ["MIGRATING", "REBOOT", "UNKNOWN", "PAUSED", "A_FUTURE_STATE"])
def test_server_in_a_temporary_state_counts_as_live(nova, tmp_path, status):
    cloud = OpenStackHarness(nova, tmp_path)
    driver = cloud.driver()
    nova.servers[driver.create(cloud.order("n1")).id]["status"] = status
    assert [each.is_live for each in driver.machines("contract")] == [True]
