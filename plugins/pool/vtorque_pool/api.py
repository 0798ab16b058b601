"""Public, for drivers: what the pool asks of a cloud. An entry point of ``vtorque1.pool``.

The entry point is a function that takes the cloud's table of the site config (text to text) and
returns a :class:`Driver`. It imports what it needs when it is called. A driver keeps nothing in
memory that it could ask the cloud: another process may have made or ended a machine meanwhile.
``vtorque_testing.pool_driver.PoolDriverContract`` tests one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from vtorque_core.api import HostFault

CLUSTER, NODE, SHAPE = "vtorque-cluster", "vtorque-node", "vtorque-shape"
"""Names of the tags of a machine: whose it is, which node it is, of which shape."""


State = Literal["building", "running", "ended", "deleting"]
"""Of a machine. One that its cloud may have again, whatever it says of it now, is running."""


class CloudFault(HostFault):
    """The cloud did not do it or did not answer: the API is down, slow, or refuses us."""


class StockOut(CloudFault):
    """The cloud has no such machine to give now: its capacity or our quota is used up."""


@dataclass(frozen=True)
class Order:
    """A machine that is wanted. Memory in MiB; image and flavor in the cloud's words."""

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
    """A machine that the cloud has with our tags. ``created`` in seconds since 1970.

    ``address``: where it can be reached, where the cloud knows; else empty.
    """

    id: str
    node: str
    shape: str
    created: float
    state: State = "running"
    address: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it is, or will be, a node's: it has not ended and is not about to."""
        return self.state in {"building", "running"}


class Driver(Protocol):
    """A cloud. Methods are called from several threads and processes at once.

    All raise :class:`CloudFault` when the cloud does not answer: no answer is never an empty one.
    """

    def create(self, order: Order) -> Machine:
        """Make a machine with its tags in one step, so that a kill leaves none without.

        It need not be up when this returns. Raises StockOut, and then leaves nothing.
        """
        ...

    def machines(self, cluster: str) -> list[Machine]:
        """Return all machines of the cluster, by tag, and no others; all pages of the answer."""
        ...

    def destroy(self, machine: str) -> None:
        """End the machine with this id and remove what is its own; one that is gone is right."""
        ...

    def quota(self) -> int | None:
        """Return how many machines more may be made; None: the cloud does not say."""
        ...
