"""Map a device file of the host to its PCI function. Batch systems name devices by such files.

Do not cache the result: drivers may number their files differently after a card returns from a
guest.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vtorque_passthrough.pci_functions import ADDRESS, SYSFS, functions, group_of

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Directory in which NVIDIA's driver lists its cards by address. Sysfs lacks their devices."""

_NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt of the kernel


def function_of_file(file: str, sysfs: str = SYSFS) -> str:
    """Return the address of the PCI function behind a device file, or an empty string."""
    try:
        number = Path(file).stat().st_rdev
    except OSError:
        return ""
    return function_of_number(os.major(number), os.minor(number), sysfs)


def function_of_number(major: int, minor: int, sysfs: str = SYSFS, nvidia: Path = NVIDIA) -> str:
    """Return the address of the PCI function behind a character device, or an empty string.

    For /dev/vfio/<group> the result is the first function of the group.
    """
    if major == _NVIDIA_MAJOR:
        this = re.compile(rf"^Device Minor:\s+{minor}\s*$", re.MULTILINE)
        files = nvidia.glob("*/information")
        return next((f.parent.name for f in files if this.search(f.read_text("latin-1"))), "")
    at = Path(sysfs, "dev/char", f"{major}:{minor}")
    if not at.exists():
        return ""
    parts = at.resolve().parts
    if parts[-2] == "vfio":  # /sys/devices/virtual/vfio/17
        group = group_of(functions(sysfs).values(), parts[-1])
        return group[0].address if group else ""
    return next((part for part in reversed(parts) if ADDRESS.fullmatch(part)), "")
