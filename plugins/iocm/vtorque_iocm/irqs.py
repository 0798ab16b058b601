"""Move the interrupts of configured network interfaces to the I/O cores."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, Paths, closing, name_errors
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_core.api.job_files import File


def affinity_files(nics: Iterable[str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return ``/proc/irq/N/smp_affinity_list`` for each MSI interrupt of these interfaces.

    The interrupts of a virtio NIC belong to its parent PCI device (sysfs-bus-pci, msi_irqs).
    Interfaces that this node lacks are skipped, because all nodes share the site's config.
    """
    devices = [(root / "sys/class/net" / nic / "device").resolve() for nic in nics]
    owners = (d.parent if d.name.startswith("virtio") else d for d in devices)
    numbers = {irq.name for owner in owners for irq in owner.glob("msi_irqs/*")}
    files = (root / "proc/irq" / number / "smp_affinity_list" for number in sorted(numbers))
    return tuple(str(file) for file in files if file.exists())


def memo(paths: Paths) -> str:
    """Return the path of the file with the original IRQ affinities. A reboot deletes the file."""
    return str(paths.run / "iocm-irqs.json")


@dataclass(frozen=True)
class IrqAffinity(Resource):
    """The original IRQ affinities, saved for the node's first IOcm job and restored after the last.

    While IOcm jobs (``-vm iocm=true``) run, the process :mod:`vtorque_iocm.manager` changes the
    affinities. All jobs of the node share this resource. Its only journaled field is ``memo``, the
    path of the saved file.
    """

    kind = "iocm-irqs"
    needs_root = True
    scope = "node"
    memo: str
    files: tuple[str, ...] = unjournalled(())

    def create(self) -> None:
        """Save the current affinities, unless a saved file remains after a crash."""
        if not Path(self.memo).exists():
            text = json.dumps({file: _current(file) for file in self.files})
            File(self.memo, replace=True, content=text.encode()).create()

    def release(self) -> None:
        """Restore the affinities that were changed, then delete the saved file."""
        for file, old in saved_affinities(self.memo).items():
            if Path(file).exists() and _current(file) != old:
                _set(file, old)
        File(self.memo, replace=True).release()


def saved_affinities(memo: str) -> dict[str, str]:
    """Return the original value of each affinity file, as saved by :class:`IrqAffinity`."""
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads(Path(memo).read_text(encoding="ascii")))
    return {}


def direct(memo: str, cpus: Iterable[int]) -> None:
    """Move the interrupts listed in the file ``memo`` to these CPUs, as far as this is possible."""
    for file in saved_affinities(memo):
        with contextlib.suppress(HostFault):
            _set(file, ",".join(map(str, cpus)))


def _current(path: str) -> str:
    with name_errors(f"cannot read {path}"):
        return Path(path).read_text(encoding="utf-8").strip()


def _set(path: str, value: str) -> None:
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with name_errors(f"cannot set {path}"), closing(os.open(path, flags)) as descriptor:
        # Do not truncate first: a kill in between would lose the old value.
        size = os.write(descriptor, value.encode())
        with contextlib.suppress(OSError):  # not possible for files in /proc and /sys
            os.ftruncate(descriptor, size)
