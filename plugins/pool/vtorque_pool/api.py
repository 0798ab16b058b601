"""Public API for cloud drivers, which are entry points of the group ``vtorque1.pool``.

The entry point is a function that takes the cloud's table in the site config (strings) and returns
a :class:`Driver`. Import heavy modules in this function. A driver must not cache the cloud's state,
because other processes create and delete machines. Test a driver with
``vtorque_testing.pool_driver.PoolDriverContract``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from vtorque_core.api import HostFault

CLUSTER, NODE, SHAPE = "vtorque-cluster", "vtorque-node", "vtorque-shape"
"""Names of a machine's tags: the pool's cluster, the node, and the shape (kind of node)."""


State = Literal["building", "running", "ended", "deleting"]
"""A machine's state. A machine that is down but may run again (reboot) counts as running."""


class CloudFault(HostFault):
    """A failure of a cloud: its API does not answer, or rejects the request."""


class StockOut(CloudFault):
    """A lack of capacity: the cloud has no machine left, or the quota is used up."""


@dataclass(frozen=True)
class MachineOrder:
    """A machine to create for a node.

    ``memory`` is in MiB. ``image`` and ``flavor`` are names in the cloud. ``shape`` is the name of
    the node's ``[[plugin.pool.shapes]]`` table in the site config.
    """

    cluster: str
    node: str
    shape: str
    image: str = ""
    flavor: str = ""
    cpus: int = 1
    memory: int = 2048
    user_data: bytes = b""


@dataclass(frozen=True)
class Machine:
    """A machine with the pool's tags.

    Attributes:
        created: Unix time.
        address: Its network address; empty if the cloud does not know it.
    """

    id: str
    node: str
    shape: str
    created: float
    state: State = "running"
    address: str = ""

    @property
    def is_live(self) -> bool:
        """True if the machine has not ended and is not being deleted."""
        return self.state in {"building", "running"}


class Driver(Protocol):
    """A cloud. Threads and processes call the methods concurrently.

    If the cloud does not answer, all methods raise :class:`CloudFault` instead of returning an
    empty result.
    """

    def create(self, order: MachineOrder) -> Machine:
        """Create a machine and its tags in one step. On return, the machine may still be booting.

        If the process is killed, a machine that remains must have its tags.

        Raises:
            StockOut: If there is no capacity. No machine remains.
        """
        ...

    def machines(self, cluster: str) -> list[Machine]:
        """Return all machines with the cluster's tag, from all pages of the cloud's response."""
        ...

    def destroy(self, machine: str) -> None:
        """Delete a machine and its own resources, such as disks. Idempotent."""
        ...

    def quota(self) -> int | None:
        """Return how many more machines can be created; None if unknown."""
        ...
