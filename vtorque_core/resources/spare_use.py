"""The core kind that says which spare guest a job has taken."""

from __future__ import annotations

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base.record import dataclass
from vtorque_core.records.reading import SPARE


@dataclass(frozen=True)
class SpareUse(CoreResource):
    """A spare guest is the job's from this record on; its end is the end of all that it had.

    Written under the node's lock, so that no two jobs take one
    (:func:`vtorque_core.node.start.spare.take`).

    Args:
        key: of the spare guest's journal, which the teardown of this one then tears down.
    """

    kind = SPARE
    blocking = True
    volatile = False  # after a reboot the spare guest's journal is still to go
    key: str

    def create(self) -> None:
        """Do nothing: the record is the use."""

    def release(self) -> None:
        """Do nothing: :mod:`vtorque_core.node.end.teardown` tears the spare guest down."""
