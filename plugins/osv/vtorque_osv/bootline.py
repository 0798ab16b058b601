"""The command line of a guest that boots from its disk: written into the job's own layer of it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import run_tool
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_osv.disk import BOOT_LINE, MAX_BOOT_LINE


@dataclass(frozen=True)
class BootLine(Resource):
    """OSv's command line on a qcow2 overlay of the job's; it goes with the overlay.

    Written by qemu-io(1), which knows qcow2, and needs a file for the bytes. It parses the image,
    which anybody may have made, so it has no more rights than the guest's QEMU.
    """

    kind: ClassVar[str] = "osv-bootline"
    overlay: str
    line: str = unjournalled("")

    def create(self) -> None:
        """Write the line. Raises HostFault."""
        owner = Path(self.overlay).lstat().st_uid
        with tempfile.NamedTemporaryFile(prefix="vtorque-osv-") as file:
            file.write(self.line.encode().ljust(MAX_BOOT_LINE + 1, b"\0"))
            file.flush()
            os.fchown(file.fileno(), owner, -1)
            write = f"write -q -s {file.name} {BOOT_LINE} {MAX_BOOT_LINE + 1}"
            run_tool("qemu-io", "-f", "qcow2", "-c", write, self.overlay, uid=owner)

    def release(self) -> None:
        """Do nothing: the overlay is a resource of its own, released after this."""
