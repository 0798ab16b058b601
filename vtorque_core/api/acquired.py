"""Base class of resources that are acquired on a node and released even after a crash."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

RELEASE_TIME = 25.0  # seconds for one release; below the 30 that teardown gives it by default


def unjournalled(default: Any = None) -> Any:
    """Declare a resource field that only ``create()`` needs, such as a secret.

    ``release()`` runs on a copy from the journal, in which the field has its default.
    """
    return field(default=default, repr=False, metadata={"journal": False})


class Resource:
    """Base of all resources, which jobs acquire on a node and the epilogue releases.

    A subclass is a frozen dataclass whose fields are JSON values.

    Privileges: root, on the node; the job's owner on a personal site, which has no root.
    """

    kind: ClassVar[str]
    """Name of this type of resource (``"acme-shell"``), unique among all plugins."""

    scope: ClassVar[Literal["job", "node"]] = "job"
    """``"node"``: jobs share the resource. The first job creates it, the last one releases it."""

    volatile: ClassVar[bool] = True
    """True if a reboot removes the resource. ``release()`` is then skipped."""

    needs_root: ClassVar[bool] = False
    """True if only root can create the resource. Personal sites refuse the job."""

    def create(self) -> None:
        """Acquire the resource. Raises HostFault on failure, Refused if the job may not have it."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the resource, using only journaled fields. A second call must not fail.

        Called in another process, also after an incomplete ``create()``. After HostFault the reaper
        retries.
        """
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Return True if a shared resource no longer exists, such as a daemon that was killed.

        Called only if :attr:`scope` is ``"node"``, when another job acquires the resource. The core
        then releases a lost resource and creates it again.
        """
        return False


class CoreResource(Resource):
    """Base of the resource kinds that the core defines.

    Attributes:
        blocking: ``release()`` can hang, so a child process must run it.
        retry_seconds: for how long ``release()`` is repeated after an incomplete ``create()``.
    """

    blocking: ClassVar[bool] = False
    retry_seconds: ClassVar[float] = 0.0
