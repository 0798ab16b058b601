"""A PCI function of the host for a guest: the domain's element, and its way to vfio-pci and back.

Who yields a :class:`PciDevice` acquires its :class:`Vfio` in ``vtorque_pre_boot``. That is not left
to libvirt: it changes the owner of no device of ours (``relabel='no'``), so QEMU could not open the
IOMMU group; and it binds the host's driver again before anybody could reset the card.
``managed='yes'`` then finds all done. Files: sysfs-bus-pci of the kernel's ABI documentation.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import Act, HostFault, run_tool
from vtorque_core.api.acquired import Resource
from vtorque_core.api.libvirt_domain import ListElement
from vtorque_passthrough.pci_functions import ADDRESS, SYSFS, PciFunction, function
from vtorque_passthrough.plugin import PCI

DRIVER = "vfio-pci"
_APPEAR = 5.0  # seconds: devtmpfs makes /dev/vfio/<group> at once


@dataclass(frozen=True)
class PciDevice(ListElement):
    """A PCI function of the host, given to the guest by VFIO.

    libvirt lets QEMU lock the guest's RAM and 1 GiB more by itself. Claim ``address``
    (``0000:3b:00.0``) first, with all functions of its IOMMU group;
    :mod:`vtorque_passthrough.pci_functions` knows them.

    Args:
        mac: it is a virtual function of an Ethernet card: libvirt gives it this MAC through the
            physical one, and takes it back.
        must_reset: refuse a function that cannot be reset between two guests.
    """

    template: ClassVar[str] = "vtorque_passthrough:pcidevice.xml.j2"
    forbids: ClassVar[frozenset[Act]] = PCI.forbids
    unique: ClassVar[tuple[str, ...]] = ("address", "mac")
    name: str
    address: str
    mac: str | None = None
    must_reset: bool = True

    def __post_init__(self) -> None:
        if not ADDRESS.fullmatch(self.address):
            raise ValueError(f"{self.address!r} is not a PCI address like 0000:3b:00.0")


@dataclass(frozen=True)
class Vfio(Resource):
    """A function that is bound to vfio-pci, its group open to QEMU's user ``uid``.

    Released: reset, so that nobody finds what a guest has left in it, then bound to ``driver``
    again, the one it had (empty: none). A card that fails to reset stays the job's.
    """

    kind = "vfio"
    address: str
    driver: str
    uid: int
    must_reset: bool = True
    sysfs: str = SYSFS
    dev: str = "/dev/vfio"

    @classmethod
    def of(cls, device: PciDevice, uid: int, sysfs: str = SYSFS) -> Vfio:
        """Return the resource for a function as it is now. Raises HostFault if it has gone."""
        try:
            driver = function(device.address, sysfs).driver
        except FileNotFoundError:
            raise HostFault(f"PCI function {device.address} is not on this node") from None
        return cls(device.address, driver, uid, device.must_reset, sysfs)

    def create(self) -> None:
        """Bind it. Raises HostFault: no IOMMU, no vfio-pci, no way to reset it, or it is in use."""
        now = self._now()
        if now is None or not now.group or now.used:
            why = "has gone" if now is None else now.used or "has no IOMMU group"
            raise HostFault(f"PCI function {self.address}: {why}")
        if self.must_reset and not now.resets:
            raise HostFault(f"PCI function {self.address} cannot be reset")
        if not (self._pci / "drivers" / DRIVER).exists():
            run_tool("modprobe", DRIVER)
        self._bind(DRIVER, now)
        os.chown(self._wait(now.group), self.uid, -1)

    def release(self) -> None:
        """Reset it and give it back to the host's driver. Raises HostFault if that fails."""
        now = self._now()
        if now is None:
            return
        if now.driver == DRIVER and now.resets:
            self._write(f"devices/{self.address}/reset", "1")
        if self.driver == DRIVER:
            with contextlib.suppress(FileNotFoundError):  # it is the site that has bound it
                os.chown(Path(self.dev, now.group), 0, -1)
        else:
            self._bind(self.driver, now)

    @property
    def _pci(self) -> Path:
        return Path(self.sysfs, "bus/pci")

    def _now(self) -> PciFunction | None:
        with contextlib.suppress(FileNotFoundError):
            return function(self.address, self.sysfs)
        return None

    def _bind(self, driver: str, now: PciFunction) -> None:
        """Have it bound to this driver and no other; empty: to none. May be repeated."""
        override = DRIVER if driver == DRIVER else ""
        self._write(f"devices/{self.address}/driver_override", f"{override}\n")
        if now.driver == driver:
            return
        if now.driver:
            self._write(f"devices/{self.address}/driver/unbind", self.address)
        if driver:
            self._write("drivers_probe", self.address)
        bound = self._now()
        if driver == DRIVER and (bound is None or bound.driver != driver):
            raise HostFault(f"PCI function {self.address} does not bind to {driver}")

    def _wait(self, group: str) -> Path:
        node = Path(self.dev, group)
        deadline = time.monotonic() + _APPEAR
        while not node.exists():
            if time.monotonic() > deadline:
                raise HostFault(
                    f"{node} has not appeared: is another driver in IOMMU group {group}?"
                )
            time.sleep(0.02)
        return node

    def _write(self, name: str, text: str) -> None:
        try:
            (self._pci / name).write_text(text, "ascii")
        except OSError as error:
            where = f"PCI function {self.address}: {name.rpartition('/')[2]}"
            raise HostFault(f"{where}: {error.strerror or error}") from error
