"""Base class of resources that are acquired on a node and released after any crash."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

RELEASE_TIME = 25.0  # seconds for one release; below the 30 that teardown gives it by default


def unjournalled(default: Any = None) -> Any:
    """Declare a resource field that only ``create()`` needs, such as a secret.

    It is not journaled: ``release()`` sees the default.
    """
    return field(default=default, repr=False, metadata={"journal": False})


class Resource:
    """Something acquired on a node that must be released: a frozen dataclass of JSON values.

    Privileges: root, on the node; the job's owner on a personal site.
    """

    kind: ClassVar[str]
    """Name of this type of resource (``"acme-shell"``), unique among all plugins."""

    scope: ClassVar[Literal["job", "node"]] = "job"
    """``"node"``: shared by jobs; created by the first, released with the last open record."""

    volatile: ClassVar[bool] = True
    """True if a reboot removes it, so that ``release()`` is then skipped."""

    needs_root: ClassVar[bool] = False
    """True: personal sites refuse the job."""

    def create(self) -> None:
        """Acquire the resource. Raises HostFault, or Refused if the job must not have it."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the resource, using the journaled fields only. Must work twice.

        Called in another process, also after an incomplete ``create()``. After HostFault the reaper
        retries.
        """
        raise NotImplementedError

    def is_lost(self) -> bool:
        """Return True if the resource of scope ``node`` is gone, like a killed daemon.

        Called when another job acquires it. A lost resource is released and created again.
        """
        return False


class CoreResource(Resource):
    """Base of the resource kinds that the core defines.

    ``blocking``: ``release()`` can hang, so a child process must run it.
    """

    blocking: ClassVar[bool] = False
    settle: ClassVar[float] = 0.0
