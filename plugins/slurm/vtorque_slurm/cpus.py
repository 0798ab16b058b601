"""Map Slurm's CPU ids to the kernel's. Slurm numbers CPUs by socket, then core, then thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")


def kernel_ids(ids: Sequence[int], sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the kernel's numbers for Slurm's CPU ``ids``, or an empty tuple if unknown.

    A Slurm id is an index in the order of socket, core and thread (slurm.conf(5), CpuSpecList). The
    numbers are unknown if slurm.conf configures more CPUs for the node than the node has.
    """
    order = _order(sysfs)
    if not ids or max(ids) >= len(order):
        return ()
    return tuple(sorted(order[i] for i in ids))


def _order(sysfs: Path) -> list[int]:
    places: list[tuple[int, int, int]] = []
    for topology in sysfs.glob("cpu[0-9]*/topology"):
        number = int(topology.parent.name[3:])
        try:
            socket = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            return []
        places.append((socket, core, number))
    return [number for _, _, number in sorted(places)]
