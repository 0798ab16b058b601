"""Resources that record that a job uses a pool's item, a warm guest or an image version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import CoreResource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.images import store
from vtorque_core.records.reading import SPARE


@dataclass(frozen=True)
class Lease(CoreResource):
    """A job's use of ``item`` of ``pool``, while the journal entry is open.

    The pools: :mod:`vtorque_core.plan.placement.ledger`.

    Attributes:
        node: NUMA node of the memory; -1: unknown.
        page_kib: size of huge pages; 0: ordinary pages.
        use: purpose of a CPU: ``vcpu``, ``emulator``, ``io`` or ``idle``.
        least, most: range of a resizable number of CPUs.
        cpus: in the pool ``core``, CPUs that a resize can add; in the pool ``share``, the CPUs of
            the job. A cpuset(7) list.
        amount: leased amount of a countable pool.
    """

    kind = "lease"
    pool: str
    item: str
    mib: int = 0
    use: str = ""
    node: int = -1
    page_kib: int = 0
    least: int = 0
    most: int = 0
    cpus: str = ""
    amount: int = 0

    def create(self) -> None:
        """Do nothing: the journal entry is the lease."""

    def release(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class SpareUse(CoreResource):
    """A warm guest that the job has claimed, identified by the key of the guest's journal."""

    kind = SPARE
    blocking = True
    volatile = False  # the warm guest's journal outlives a reboot
    key: str

    def create(self) -> None:
        """Do nothing: the journal entry is the claim."""

    def release(self) -> None:
        """Do nothing: :mod:`vtorque_core.node.end.teardown` tears the warm guest down."""


_WAIT = 20.0  # seconds for a change of the pool to end


@dataclass(frozen=True)
class ImageUse(CoreResource):
    """Use of an image version, which stays on disk while a journal names it.

    ``path`` is the version's directory. The epilogue of the last job that uses the version removes
    it, unless an image name refers to it.
    """

    kind = store.KIND
    scope = "node"
    volatile = False
    blocking = True
    path: str

    def create(self) -> None:
        """Check that the image version still exists.

        A process that removes versions reads the journals under the pool's lock. It therefore sees
        this journal entry, or it has already removed the version.
        """
        version = Path(self.path)
        pool = version.parent.parent
        with safefs.name_errors(f"image {self.path}"), store.locked(pool, shared=True, wait=_WAIT):
            there = version.is_dir()
        if not there:
            raise HostFault(f"image {self.path} was removed while the job was being started")

    def release(self) -> None:
        store.collect_version(Path(self.path))
