"""Driver for EC2. boto3 finds the credentials: the host's role, or boto3's files.

Options:

- ``region``, ``profile``, ``subnet``, ``key``.
- ``endpoint``: URL of another cloud with the EC2 API.
- ``security_groups``: comma-separated.
- ``role``: instance profile. Processes on the machine can get the role's credentials.
- ``timeout``: seconds (60).

To find duplicates, the pool lists machines by tag before and after it creates a machine. It does
not use ClientToken, which some clouds with the EC2 API do not support (moto 5.2).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from vtorque_core.api import HostFault, printable
from vtorque_pool.api import (
    CLUSTER,
    NODE,
    SHAPE,
    CloudFault,
    Driver,
    Machine,
    MachineOrder,
    StockOut,
)

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
except ImportError:
    boto3 = None

_STATES = {
    "pending": "building",
    "running": "running",
    "shutting-down": "deleting",
    "terminated": "deleting",
    "stopping": "ended",
    "stopped": "ended",
}
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
_STOCK_OUT = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InstanceLimitExceeded",
    "VcpuLimitExceeded",
    "MaxSpotInstanceCountExceeded",
    "InsufficientFreeAddressesInSubnet",
}


def driver(options: Mapping[str, str]) -> Driver:
    """Return the driver.

    Raises:
        HostFault: If boto3 is missing.
    """
    if boto3 is None:
        raise HostFault("the driver ec2 needs boto3: install vtorque-pool[ec2]")
    seconds = float(options.get("timeout", "60"))
    config = Config(
        connect_timeout=seconds, read_timeout=seconds, retries={"total_max_attempts": 3}
    )
    with _faults():
        session = _session(boto3, options.get("profile") or None)
        client = session.client(
            "ec2",
            region_name=options.get("region") or None,
            endpoint_url=options.get("endpoint") or None,
            config=config,
        )
    return Ec2(client, options)


@functools.cache
def _session(boto3: Any, profile: str | None) -> Any:
    """Return a profile's session. It is cached, because loading boto3's EC2 data takes a second."""
    return boto3.Session(profile_name=profile)


class Ec2:
    """The EC2 driver."""

    def __init__(self, client: Any, options: Mapping[str, str]) -> None:
        self._client = client
        self._options = options

    def create(self, order: MachineOrder) -> Machine:
        """Start an instance, and tag it in the same call."""
        tags = {CLUSTER: order.cluster, NODE: order.node, SHAPE: order.shape, "Name": order.node}
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        wanted: dict[str, Any] = {
            "ImageId": order.image,
            "InstanceType": order.flavor,
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceInitiatedShutdownBehavior": "terminate",
            # Keep the instance's credentials from forged requests (SSRF) and from its guests.
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": listed} for kind in ("instance", "volume")
            ],
        }
        if order.user_data:
            wanted["UserData"] = order.user_data
        if subnet := self._options.get("subnet"):
            wanted["SubnetId"] = subnet
        if groups := self._options.get("security_groups"):
            wanted["SecurityGroupIds"] = groups.split(",")
        if key := self._options.get("key"):
            wanted["KeyName"] = key
        if role := self._options.get("role"):
            wanted["IamInstanceProfile"] = {"Name": role}
        with _faults():
            return _machine(self._client.run_instances(**wanted)["Instances"][0])

    def machines(self, cluster: str) -> list[Machine]:
        """Return the cluster's instances, except terminated ones."""
        filters = [{"Name": f"tag:{CLUSTER}", "Values": [cluster]}]
        with _faults():
            pages = self._client.get_paginator("describe_instances").paginate(Filters=filters)
            found = [
                each
                for page in pages
                for reservation in page["Reservations"]
                for each in reservation["Instances"]
            ]
            return [_machine(each) for each in found if each["State"]["Name"] != "terminated"]

    def destroy(self, machine: str) -> None:
        """Terminate an instance. Volumes with DeleteOnTermination are also deleted."""
        with _faults():
            try:
                self._client.terminate_instances(InstanceIds=[machine])
            except ClientError as error:
                if not error.response["Error"]["Code"].startswith("InvalidInstanceID"):
                    raise

    def quota(self) -> int | None:
        """Return None: EC2's quotas are in another service, and limit vCPUs, not instances."""
        return None


def _machine(found: Mapping[str, Any]) -> Machine:
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    return Machine(
        found["InstanceId"],
        tags.get(NODE, ""),
        tags.get(SHAPE, ""),
        found["LaunchTime"].timestamp(),
        _STATES.get(found["State"]["Name"], "ended"),  # type: ignore[arg-type]
        found.get("PrivateIpAddress") or "",
    )


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        kind = StockOut if code in _STOCK_OUT else CloudFault
        raise kind(f"EC2: {printable(str(error), 500)}") from None
    except (BotoCoreError, HTTPClientError, KeyError, IndexError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CloudFault(f"EC2: {printable(said, 500)}") from None
