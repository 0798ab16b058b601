"""What the Linux guest plugin declares: its guest type and image builders. ``vsub`` imports this.

Nothing of the acting side is imported before it is called for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtorque_core.api import GuestType, ImageBuilder, hookimpl

if TYPE_CHECKING:
    from vtorque_core.api_guest import GuestDriver
    from vtorque_core.api_image import Builder

SUPPORTS = frozenset(
    {
        "EnvVar",
        "GuestFile",
        "RootCommand",
        "KernelModule",
        "Package",
        "Mount",
        "GuestDevice",
        "PciMemory",
        "LinePort",
    }
)


def _driver() -> GuestDriver:
    from vtorque_linux_guest.driver import LinuxDriver  # noqa: PLC0415

    return LinuxDriver()


def _micro() -> Builder:
    from vtorque_linux_guest.micro import MicroBuilder  # noqa: PLC0415

    return MicroBuilder()


def _debian() -> Builder:
    from vtorque_linux_guest.debian import DebianBuilder  # noqa: PLC0415

    return DebianBuilder()


def _linux() -> Builder:
    from vtorque_linux_guest.linux import LinuxBuilder  # noqa: PLC0415

    return LinuxBuilder()


@hookimpl
def vtorque_guest_types() -> Iterator[GuestType]:
    """Yield the guest type ``linux``."""
    yield GuestType("linux", supports=SUPPORTS, driver=_driver)


@hookimpl
def vtorque_image_builders() -> Iterator[ImageBuilder]:
    """Yield the builders."""
    yield ImageBuilder(
        "micro", "kernel and a few MB of initramfs: ready in under 2 s, no packages", builder=_micro
    )
    yield ImageBuilder("debian", "Debian with systemd, cloud-init and sshd", builder=_debian)
    yield ImageBuilder(
        "linux", "Debian or RedHat family with systemd, from a recipe", builder=_linux
    )
