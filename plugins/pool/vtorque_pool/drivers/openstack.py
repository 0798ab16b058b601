"""Driver for OpenStack Nova. openstacksdk finds the credentials (``clouds.yaml``).

Options:

- ``cloud``: name of the cloud in clouds.yaml.
- ``clouds``: path of clouds.yaml.
- ``network``, ``key``.
- ``security_groups``: comma-separated.
- ``timeout``: seconds (60).
"""

from __future__ import annotations

import base64
import calendar
import contextlib
import time
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
    State,
    StockOut,
)

try:
    import openstack
    from keystoneauth1.exceptions import ClientException
    from openstack.config import OpenStackConfig
    from openstack.exceptions import HttpException, SDKException
except ImportError:
    openstack = None

# https://docs.openstack.org/api-guide/compute/server_concepts.html
# A server with any other status (MIGRATING, REBOOT, UNKNOWN, ...) runs or will run again.
_STATES: dict[str, State] = {
    "BUILD": "building", "REBUILD": "building", "DELETED": "deleting", "SOFT_DELETED": "deleting",
    "ERROR": "ended", "SHUTOFF": "ended", "SHELVED": "ended", "SHELVED_OFFLOADED": "ended",
}  # fmt: skip


def driver(options: Mapping[str, str]) -> Driver:
    """Return the driver.

    Raises:
        HostFault: If openstacksdk is missing.
    """
    if openstack is None:
        raise HostFault("the driver openstack needs openstacksdk: install vtorque-pool[openstack]")
    with _faults():
        files = [options["clouds"]] if options.get("clouds") else None
        config = OpenStackConfig(config_files=files, load_envvars=False)
        region = config.get_one(
            cloud=options.get("cloud") or None, api_timeout=float(options.get("timeout", "60"))
        )
        return OpenStack(openstack.connection.Connection(config=region), options)


class OpenStack:
    """The OpenStack driver."""

    def __init__(self, connection: Any, options: Mapping[str, str]) -> None:
        self._cloud = connection
        self._options = options

    def create(self, order: MachineOrder) -> Machine:
        """Create a server, with the tags as its metadata in the same call."""
        compute = self._cloud.compute
        with _faults():
            wanted: dict[str, Any] = {
                "name": order.node,
                "image_id": order.image,
                "flavor_id": order.flavor,
                "metadata": {CLUSTER: order.cluster, NODE: order.node, SHAPE: order.shape},
                "networks": [{"uuid": n}] if (n := self._options.get("network")) else "auto",
            }
            if order.user_data:
                wanted["user_data"] = base64.b64encode(order.user_data).decode()
            if key := self._options.get("key"):
                wanted["key_name"] = key
            if groups := self._options.get("security_groups"):
                wanted["security_groups"] = [{"name": each} for each in groups.split(",")]
            made = compute.create_server(**wanted)
            return Machine(made.id, order.node, order.shape, time.time(), "building")

    def machines(self, cluster: str) -> list[Machine]:
        """Return the cluster's servers, including those with the status ERROR."""
        with _faults():
            found = list(self._cloud.compute.servers(details=True))
            ours = [each for each in found if (each.metadata or {}).get(CLUSTER) == cluster]
            return [_machine(each) for each in ours]

    def destroy(self, machine: str) -> None:
        """Delete a server."""
        with _faults():
            self._cloud.compute.delete_server(machine, ignore_missing=True)

    def quota(self) -> int | None:
        """Return how many more servers Nova's absolute limits allow."""
        with _faults():
            absolute = self._cloud.compute.get_limits().absolute
            most, used = absolute.instances, absolute.instances_used
            return None if most is None or most < 0 else max(0, int(most) - int(used or 0))


def _machine(found: Any) -> Machine:
    addresses = [a["addr"] for each in (found.addresses or {}).values() for a in each]
    deleting = getattr(found, "task_state", None) == "deleting"
    state: State = "deleting" if deleting else _STATES.get(found.status, "running")
    created = calendar.timegm(time.strptime(found.created_at[:19], "%Y-%m-%dT%H:%M:%S"))
    tags = found.metadata
    return Machine(
        found.id,
        tags.get(NODE, ""),
        tags.get(SHAPE, ""),
        float(created),
        state,
        addresses[0] if addresses else "",
    )


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except HttpException as error:
        said = f"{error} {getattr(error, 'details', '') or ''}"
        full = any(word in said for word in ("Quota exceeded", "No valid host"))
        kind = StockOut if full else CloudFault
        raise kind(f"OpenStack: {printable(said, 500)}") from None
    except (SDKException, ClientException, KeyError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CloudFault(f"OpenStack: {printable(said, 500)}") from None
