"""Assign a PCI function to a guest: the domain's element, and the binding to vfio-pci.

A plugin that yields a :class:`PciDevice` must acquire its :class:`Vfio` in ``vtorque_pre_boot``,
before libvirt starts the domain. :class:`Vfio` binds the function to vfio-pci, because libvirt's
managed mode is not enough. First, with ``relabel='no'`` libvirt does not change the owner of
``/dev/vfio/<group>``, so QEMU could not open this file. Second, libvirt rebinds the host's driver
before the card is reset. The element still has ``managed='yes'``. This is harmless, because libvirt
does not change the driver of a function that is already bound to vfio-pci.
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
_APPEAR = 5.0  # seconds until devtmpfs has created /dev/vfio/<group>


@dataclass(frozen=True)
class PciDevice(ListElement):
    """A PCI function of the host, assigned to the guest by VFIO.

    Before you yield this element, claim all functions of the IOMMU group of ``address``
    (:mod:`vtorque_passthrough.pci_functions`). libvirt raises QEMU's memory lock limit to the
    guest's RAM plus 1 GiB.

    Args:
        mac: for a virtual function of an Ethernet card: the MAC that libvirt sets through the
            physical function, and removes afterwards.
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
    """A PCI function bound to vfio-pci. QEMU's user ``uid`` can open the function's IOMMU group.

    :meth:`release` resets the function, if the kernel can, to erase the guest's data. Then it
    rebinds the former ``driver`` (empty: none). If the reset fails, the card remains leased.
    """

    kind = "vfio"
    address: str
    driver: str
    uid: int
    must_reset: bool = True
    sysfs: str = SYSFS
    dev: str = "/dev/vfio"

    @classmethod
    def for_function(cls, device: PciDevice, uid: int, sysfs: str = SYSFS) -> Vfio:
        """Return the resource for a PCI function with its current driver.

        Raises HostFault if the function is missing.
        """
        try:
            driver = function(device.address, sysfs).driver
        except FileNotFoundError:
            raise HostFault(f"PCI function {device.address} is missing on this node") from None
        return cls(device.address, driver, uid, device.must_reset, sysfs)

    def create(self) -> None:
        """Bind the PCI function to vfio-pci.

        Raises:
            HostFault: the function is in use or cannot be reset, or IOMMU or vfio-pci is missing.
        """
        now = self._current_function()
        if now is None or not now.group or now.host_use:
            reason = "is missing" if now is None else now.host_use or "has no IOMMU group"
            raise HostFault(f"PCI function {self.address}: {reason}")
        if self.must_reset and not now.resets:
            raise HostFault(f"PCI function {self.address} cannot be reset")
        if not (self._pci / "drivers" / DRIVER).exists():
            run_tool("modprobe", DRIVER)
        self._bind(DRIVER, now)
        os.chown(self._wait(now.group), self.uid, -1)

    def release(self) -> None:
        """Reset the PCI function and rebind its former driver. Raises HostFault on failure."""
        now = self._current_function()
        if now is None:
            return
        if now.driver == DRIVER and now.resets:
            self._write(f"devices/{self.address}/reset", "1")
        if self.driver == DRIVER:
            with contextlib.suppress(FileNotFoundError):  # bound by the site, not by create()
                os.chown(Path(self.dev, now.group), 0, -1)
        else:
            self._bind(self.driver, now)

    @property
    def _pci(self) -> Path:
        return Path(self.sysfs, "bus/pci")

    def _current_function(self) -> PciFunction | None:
        with contextlib.suppress(FileNotFoundError):
            return function(self.address, self.sysfs)
        return None

    def _bind(self, driver: str, now: PciFunction) -> None:
        override = DRIVER if driver == DRIVER else ""
        self._write(f"devices/{self.address}/driver_override", f"{override}\n")
        if now.driver == driver:
            return
        if now.driver:
            self._write(f"devices/{self.address}/driver/unbind", self.address)
        if driver:
            self._write("drivers_probe", self.address)
        bound = self._current_function()
        if driver == DRIVER and (bound is None or bound.driver != driver):
            raise HostFault(f"PCI function {self.address} cannot be bound to {driver}")

    def _wait(self, group: str) -> Path:
        device = Path(self.dev, group)
        deadline = time.monotonic() + _APPEAR
        while not device.exists():
            if time.monotonic() > deadline:
                raise HostFault(
                    f"{device} did not appear: another driver may be in use in IOMMU group {group}"
                )
            time.sleep(0.02)
        return device

    def _write(self, name: str, text: str) -> None:
        try:
            (self._pci / name).write_text(text, "ascii")
        except OSError as error:
            file = f"PCI function {self.address}: {name.rpartition('/')[2]}"
            raise HostFault(f"{file}: {error.strerror or error}") from error
