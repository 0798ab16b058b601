"""Base class of resources that are acquired on a node and released after any crash."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

RELEASE_TIME = 25.0  # seconds for one release; below the 30 that teardown gives it by default


def unjournalled(default: Any = None) -> Any:
    """Declare a resource field that only ``create()`` needs, such as contents or secrets.

    The journal omits the field, so ``release()`` sees the default.
    """
    return field(default=default, repr=False, metadata={"journal": False})


class Resource:
    """Something acquired on a node that must be released. Subclass it as a frozen dataclass.

    ``job.acquire(resource)`` writes the journal record, then calls :meth:`create`. Fields are JSON
    values: strings, ints, floats, bools, None and tuples of them.

    Privileges: root, on the node; the job's owner on a personal site.
    """

    kind: ClassVar[str]
    """Unique over all distributions: ``"acme-shell"``."""

    scope: ClassVar[Literal["job", "node"]] = "job"
    """``"node"``: shared by jobs; created by the first, released with the last open record."""

    volatile: ClassVar[bool] = True
    """True if a reboot removes it, so that ``release()`` is then skipped."""

    needs_root: ClassVar[bool] = False
    """True: a personal site, where nothing runs as root, refuses the job."""

    def create(self) -> None:
        """Acquire the resource.

        Raises:
            HostFault: the node cannot provide it.
            Refused: the job must not have it.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Release the resource, using the journaled fields only.

        Called in another process, without plan or site config. It must succeed when called twice
        and after an incomplete ``create()``.

        Raises:
            HostFault: the resource cannot be released now. The reaper retries.
        """
        raise NotImplementedError

    def lost(self) -> bool:
        """Return True if the resource of scope ``node`` is gone, as a killed daemon is.

        Called when another job acquires it. If True, it is released and created again.
        """
        return False


class CoreResource(Resource):
    """Base of the resource kinds that the core defines.

    Attributes:
        blocking: ``release()`` can hang, so a child process must run it.
        settle: seconds that the release polls for a resource that libvirtd or mount(8) may still
            create for a killed creator.
    """

    blocking: ClassVar[bool] = False
    settle: ClassVar[float] = 0.0
