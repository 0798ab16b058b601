"""The driver ec2 against moto's server in a separate process. Real EC2 was not available."""

import contextlib
import datetime
import socket
import subprocess
import sys
import time

import pytest

from vtorque_pool.api import CloudFault, Machine, MachineOrder, StockOut
from vtorque_pool.drivers import ec2
from vtorque_pool.machines import Machines
from vtorque_pool.settings import MachineShape, Settings
from vtorque_testing.pool_driver import PoolDriverContract

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def endpoint():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < end and server.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


class Ec2Harness:
    def __init__(self, endpoint):
        self.options = {"endpoint": endpoint, "region": "us-east-1", "timeout": "5"}
        import boto3

        self.client = boto3.client("ec2", region_name="us-east-1", endpoint_url=endpoint)
        self.image = self.client.describe_images()["Images"][0]["ImageId"]

    def driver(self):
        return ec2.driver(self.options)

    def order(self, node, cluster="contract"):
        return MachineOrder(
            cluster, node, "small", self.image, "t3.micro", user_data=b"#!/bin/sh\n"
        )

    def stranger(self):
        made = self.client.run_instances(ImageId=self.image, MinCount=1, MaxCount=1)
        return made["Instances"][0]["InstanceId"]

    def list_machines(self):
        pages = self.client.get_paginator("describe_instances").paginate()
        every = [i for p in pages for r in p["Reservations"] for i in r["Instances"]]
        gone = {"terminated", "shutting-down"}
        return {i["InstanceId"] for i in every if i["State"]["Name"] not in gone}

    @contextlib.contextmanager
    def silence(self):
        before = self.options["endpoint"]
        self.options["endpoint"] = "http://127.0.0.1:9"
        yield
        self.options["endpoint"] = before

    def user_data(self, machine):
        import base64

        said = self.client.describe_instance_attribute(InstanceId=machine, Attribute="userData")
        return base64.b64decode(said["UserData"]["Value"])


class TestEc2(PoolDriverContract):
    # moto is never full: test_a_full_ec2_is_a_stock_out... has EC2's own answers
    test_full_cloud_raises_stock_out_and_leaves_nothing = None

    @pytest.fixture
    def cloud(self, endpoint):
        return Ec2Harness(endpoint)


def test_duplicate_machine_is_ended_without_client_token_support(endpoint, tmp_path):
    cloud = Ec2Harness(endpoint)
    options = {"driver": "ec2"}
    shape = MachineShape("small", "n[1-2]", "aws", image=cloud.image, flavor="t3.micro")
    settings = Settings("twice", (shape,), {"aws": options}, state=str(tmp_path / "state"))
    driver = cloud.driver()
    first, second = (driver.create(cloud.order("n1", "twice")) for _ in range(2))
    machines = Machines(settings, {"aws": cloud.driver()}, lambda _: None)
    answers = machines.make(["n1", "n2"], "a test")
    assert all(isinstance(answer, Machine) for answer in answers.values())
    assert answers["n1"].id in {first.id, second.id}
    left = [m for m in driver.machines("twice") if m.is_live]
    assert sorted(m.node for m in left) == ["n1", "n2"]
    assert machines.make(["n1", "n2"], "again")["n2"].id == answers["n2"].id
    assert machines.end(["n1", "n2"], "done") == {}
    assert not any(m.is_live for m in driver.machines("twice"))


def test_machines_get_the_role_of_the_site(endpoint):
    import boto3

    iam = boto3.client("iam", region_name="us-east-1", endpoint_url=endpoint)
    profile = iam.create_instance_profile(InstanceProfileName="worker")["InstanceProfile"]
    cloud = Ec2Harness(endpoint)
    with_role = ec2.driver({**cloud.options, "role": "worker"})
    made = [each.create(cloud.order("n1", "roles")).id for each in (with_role, cloud.driver())]
    pages = cloud.client.describe_instances(InstanceIds=made)["Reservations"]
    found = {i["InstanceId"]: i.get("IamInstanceProfile") for p in pages for i in p["Instances"]}
    assert found[made[0]]["Arn"] == profile["Arn"]
    assert found[made[1]] is None


def test_missing_capacity_is_a_stock_out_and_bad_credentials_are_a_fault():
    """Texts of EC2 itself; moto has neither."""
    from botocore.stub import Stubber

    driver = ec2.driver({"region": "us-east-1"})
    with Stubber(driver._client) as stub:
        for code in ("InsufficientInstanceCapacity", "VcpuLimitExceeded"):
            stub.add_client_error("run_instances", code, "none left")
            with pytest.raises(StockOut, match="none left"):
                driver.create(MachineOrder("contract", "n1", "small", "ami-1", "t3.micro"))
        for code in ("AuthFailure", "ExpiredToken", "UnauthorizedOperation"):
            stub.add_client_error("describe_instances", code, "not you")
            with pytest.raises(CloudFault, match="not you") as raised:
                driver.machines("contract")
            assert not isinstance(raised.value, StockOut)


def test_instance_metadata_needs_a_token_and_has_hop_limit_1():
    from botocore.stub import ANY, Stubber

    driver = ec2.driver({"region": "us-east-1"})
    wanted = dict.fromkeys(
        ("ImageId", "InstanceType", "MinCount", "MaxCount", "TagSpecifications"), ANY
    )
    wanted["InstanceInitiatedShutdownBehavior"] = "terminate"
    wanted["MetadataOptions"] = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    made = {
        "InstanceId": "i-1",
        "LaunchTime": datetime.datetime.now(datetime.UTC),
        "State": {"Name": "pending"},
    }
    with Stubber(driver._client) as stub:
        stub.add_response("run_instances", {"Instances": [made]}, wanted)
        assert (
            driver.create(MachineOrder("contract", "n1", "small", "ami-1", "t3.micro")).id == "i-1"
        )
        stub.assert_no_pending_responses()
