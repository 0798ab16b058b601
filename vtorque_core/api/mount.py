"""A kind of what is acquired: a mount."""

from __future__ import annotations

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.record import dataclass
from vtorque_core.base.run_tool import run_tool


@dataclass(frozen=True)
class Mount(CoreResource):
    """A mount on an existing empty directory of vTorque's own (mount(8))."""

    kind = "mount"
    needs_root = True
    blocking = True
    settle = 2.0
    source: str
    target: str
    fstype: str = ""
    options: tuple[str, ...] = ()

    def create(self) -> None:
        """Mount it. Raises HostFault, also if something is mounted there."""
        if safefs.is_mount_point(self.target):
            raise HostFault(f"{self.target}: something is mounted there already")
        kind = ("-t", self.fstype) if self.fstype else ()
        options = ("-o", ",".join(self.options)) if self.options else ()
        run_tool("mount", *kind, *options, "--", self.source, self.target)

    def release(self) -> None:
        """Unmount it; nothing mounted is fine, in use is a HostFault."""
        if safefs.is_mount_point(self.target):
            run_tool("umount", "--", self.target, timeout=RELEASE_TIME)
