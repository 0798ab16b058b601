"""What a plugin acquires on a node, and that is released after any crash: ``Resource``."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

RELEASE_TIME = 25.0  # seconds for one release; below the 30 that teardown gives it by default


def unjournalled(default: Any = None) -> Any:
    """Declare a resource field that only ``create()`` needs: contents, XML, secrets.

    It is not written to the journal; ``release()`` sees the default.
    """
    return field(default=default, repr=False, metadata={"journal": False})


class Resource:
    """Anything acquired that must be released: subclass as a frozen dataclass of JSON values.

    ``job.acquire(resource)`` journals the record, then calls :meth:`create`. Both run as root on
    the node. :meth:`release` runs in another process from the journalled fields alone, with no
    plan and no site config; it must succeed when called twice and after a half-done create.
    Tuples, bools, ints, floats, strings and None are the JSON values allowed (lists come back as
    tuples).
    """

    kind: ClassVar[str]
    """Unique over all distributions, e.g. ``"acme-shell"``."""

    scope: ClassVar[Literal["job", "node"]] = "job"
    """``"node"``: shared; created by the first job, released with the last open record."""

    volatile: ClassVar[bool] = True
    """Gone after a reboot: ``release()`` is then skipped."""

    needs_root: ClassVar[bool] = False
    """A user's own site, where nothing runs as root, refuses the job (Refused)."""

    def create(self) -> None:
        """Acquire it. Raises HostFault (or Refused) with what is wrong."""
        raise NotImplementedError

    def release(self) -> None:
        """Give it back. Raises HostFault if that cannot be done now: the reaper tries again."""
        raise NotImplementedError

    def lost(self) -> bool:
        """Return whether it is gone although a record says that it is there: a killed daemon.

        Asked when another job acquires a node-wide one; it is then released and created again.
        """
        return False


class CoreResource(Resource):
    """A kind that needs no plugin.

    ``blocking``: its release can hang, so a child runs it. ``settle``: seconds after the record
    during which it may still appear although its creator was killed, since another process does
    the work (libvirtd, mount(8)): release looks again until then.
    """

    blocking: ClassVar[bool] = False
    settle: ClassVar[float] = 0.0
