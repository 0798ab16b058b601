"""The core kind that says which version of an image a job uses."""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.record import dataclass
from vtorque_core.images import store

_WAIT = 20.0  # seconds for a change of the pool to end


@dataclass(frozen=True)
class ImageUse(CoreResource):
    """The use of one version of an image: it stays on disk as long as a record names it.

    Node-wide: the release by its last job removes a version that no name has any more.

    Args:
        path: the version's directory, in the pool or in the node's cache.
    """

    kind = store.KIND
    scope = "node"
    volatile = False
    path: str

    def create(self) -> None:
        """Look whether it is still there, now that the journal names it. Raises HostFault.

        Who removes a version looks at the journals under the pool's lock: either they see the
        record and leave it, or this sees that it is gone.
        """
        version = Path(self.path)
        pool = version.parent.parent
        with (
            safefs.naming(f"image {self.path}"),
            store.locked(pool, shared=True, wait=_WAIT),
        ):
            there = version.is_dir()
        if not there:
            raise HostFault(f"image {self.path} was removed while the job was being started")

    def release(self) -> None:
        """Remove the version if no name has it and the time for which it was kept is over."""
        store.collect_version(Path(self.path))
