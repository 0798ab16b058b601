"""Virtual hardware, shares and disks of a Linux guest. Privileges: root."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import HostFault, Image
from vtorque_core.api.guest_context import ContextItem, EnvVar, Mount, RootCommand
from vtorque_core.api.guest_plan import GuestPlan, Share
from vtorque_core.api.libvirt_domain import Channel, Disk, Element, Filesystem, KernelBoot
from vtorque_core.api.vm_options import DISK
from vtorque_linux_guest.boot.seed import SEED_NAME, SERIAL
from vtorque_linux_guest.guest.agent_side import ports
from vtorque_linux_guest.guest.contract import (
    CANCEL_PORT,
    CANCEL_SOCKET,
    DATA,
)
from vtorque_linux_guest.guest.linux_family import guest_root

DATA_SERIAL = "vtdata"
"""Serial number of the user's disk. The core opens the disk's file as the user."""

_CONSOLES = {"aarch64": "ttyAMA0", "ppc64le": "hvc0", "s390x": "ttysclp0"}
# UEFI would run programs in a share, and read its variables from a file NvVars there, which it
# creates with write permission for all users. It ignores shares whose tag has a character that is
# not ASCII (VirtioFsDxe of edk2).
_NO_FIRMWARE = "\u00b5"
_TAG_BYTES = 35  # virtio-fs: 36 bytes with its end (virtio specification 1.2, 5.11.4)


def elements(guest: GuestPlan) -> Iterator[Element]:
    """Yield virtio ports, seed, shares and disks, and the image's kernel if it has one."""
    yield from ports(guest)
    # Only the first guest uses this port, but all have it: a warm guest does not know its rank yet.
    yield Channel("cancel", CANCEL_PORT, str(guest.run_dir / CANCEL_SOCKET), owner="job")
    yield seed_disk(guest)
    image = guest.image
    if image.kernel is not None:
        initrd = str(image.initrd) if image.initrd is not None else None
        yield KernelBoot(kernel=str(image.kernel), initrd=initrd, cmdline=cmdline(image))
    if has_data(guest):
        yield Disk("data", guest[DISK], format="raw", serial=DATA_SERIAL, user_owned=True)
    for share in (s for s in guest.shares if s.kind == "virtiofs"):
        yield Filesystem(
            share.name,
            source=share.source,
            tag=tag(share, guest.image),
            readonly=share.readonly,
            user_owned=share.user_owned,
            guest_root=guest_root(guest.image),
        )


def context(guest: GuestPlan) -> Iterator[ContextItem]:
    """Yield the variable DISTRO, and the mounts of the shares and of the user's disk."""
    yield EnvVar("DISTRO", "SLG")
    for share in guest.shares:
        source = tag(share, guest.image) if share.kind == "virtiofs" else share.source
        yield Mount(share.kind, source, share.target, readonly=share.readonly)
    if has_data(guest):
        yield Mount("disk", DATA_SERIAL, DATA)
        owner = f"{guest.user.uid}:{guest.user.gid}"
        yield RootCommand(("chown", owner, DATA))


def has_data(guest: GuestPlan) -> bool:
    """Return whether this guest gets the user's own disk (only the job's first guest)."""
    return bool(guest[DISK]) and guest.rank == 0


def cmdline(image: Image) -> str:
    """Return the kernel command line: vTorque's parameters, then the image's.

    ``quiet`` and the skipped cipher self-tests save 0.3 s of an emulated boot. ``panic=-1`` ends a
    guest whose kernel panics (kernel-parameters.txt). ``ds=nocloud`` is omitted, because it would
    keep cloud-init from looking for a seed disk.
    """
    console = _CONSOLES.get(image.arch, "ttyS0")
    words = [f"console={console}", "quiet", "panic=-1", "cryptomgr.notests=1"]
    own = image.cmdline.split()
    return " ".join([*(w for w in words if w not in own), *own])


def tag(share: Share, image: Image) -> str:
    """Return the virtiofs tag of a share. Raises HostFault if the share's name is too long."""
    by_bios = image.arch == "x86_64" and image.labels.get("firmware") != "efi"
    mark = "" if by_bios or image.kernel is not None else _NO_FIRMWARE
    if len(share.name.encode()) > (most := _TAG_BYTES - len(mark.encode())):
        raise HostFault(f"[shares.{share.name}]: the name is longer than {most} bytes")
    return share.name + mark


def seed_disk(guest: GuestPlan) -> Disk:
    """Return the seed as a libvirt disk. Guests find it by its serial number (doc/guests.md)."""
    path = str(guest.state_dir / SEED_NAME)
    return Disk("seed", path=path, format="raw", readonly=True, serial=SERIAL)
