"""Virtual hardware, shares and disks of a Linux guest, and its files on the node. As root."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from vtorque_core.api import HostFault, Image, run_tool
from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_context import ContextItem, EnvVar, Mount, RootCommand
from vtorque_core.api.guest_plan import GuestPlan, Share
from vtorque_core.api.job_files import File
from vtorque_core.api.libvirt_domain import Channel, Disk, Element, Filesystem, KernelBoot
from vtorque_core.api.vm_options import DISK
from vtorque_linux_guest.boot.seed import SEED_NAME, Seed, iso, seed_disk
from vtorque_linux_guest.boot.seed_contents import seed_files
from vtorque_linux_guest.boot.setup_script import cancel_commands
from vtorque_linux_guest.boot.ssh_client import client_files
from vtorque_linux_guest.guest.agent_side import ports
from vtorque_linux_guest.guest.contract import (
    CANCEL_MARKER,
    CANCEL_PORT,
    CANCEL_SOCKET,
    DATA,
    EPILOGUE_MARKER,
)
from vtorque_linux_guest.guest.linux_family import guest_root
from vtorque_linux_guest.settings import Settings, site_scripts

DATA_SERIAL = "vtdata"
"""Serial number of the user's disk. The core opens the disk's file as the user."""

_CONSOLES = {"aarch64": "ttyAMA0", "ppc64le": "hvc0", "s390x": "ttysclp0"}
_RESOLVE = 5.0  # seconds for realpath(1); if a file system hangs, the start continues
# In these directories a link to a user's directory would give that user root in the guest.
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib[^/]*|proc|root|run|sbin|sys|usr|var(?!/home/))(/|$)")
_TAG_BYTES = 35  # virtio-fs: 36 bytes with its end (virtio specification 1.2, 5.11.4)


def elements(guest: GuestPlan) -> Iterator[Element]:
    """Yield the virtual hardware: ports, seed, shares, disks, and direct boot if possible."""
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
            tag=tag(share),
            readonly=share.readonly,
            user_owned=share.user_owned,
            guest_root=guest_root(guest.image),
        )


def context(guest: GuestPlan) -> Iterator[ContextItem]:
    """Yield the environment and the mounts of the shares and of the user's disk."""
    yield EnvVar("DISTRO", "SLG")
    for share in guest.shares:
        source = tag(share) if share.kind == "virtiofs" else share.source
        yield Mount(share.kind, source, share.target, readonly=share.readonly)
    if has_data(guest):
        yield Mount("disk", DATA_SERIAL, DATA)
        owner = f"{guest.user.uid}:{guest.user.gid}"
        yield RootCommand(("chown", owner, DATA))


def resources(
    guest: GuestPlan, items: Sequence[ContextItem], settings: Settings
) -> Iterable[Resource]:
    """Return the seed and the files of ``vmgr ssh``.

    Raises Refused or HostFault for unsupported context items.
    """
    content = iso(seed_files(guest, items, settings, find_aliases(guest)))
    has_epilogue = bool(site_scripts(settings.epilogue))
    marker = str(guest.run_dir / EPILOGUE_MARKER) if has_epilogue else ""
    path = str(guest.state_dir / SEED_NAME)
    found = [Seed(path, guest.qemu_uid, marker, content), *client_files(guest)]
    if cancel_commands(guest, items):
        found.append(File(str(guest.run_dir / CANCEL_MARKER), mode=0o444))
    return found


def find_aliases(guest: GuestPlan) -> dict[str, str]:
    """Map further paths of shared directories on the node to the directories' paths in the guest.

    The guest gets links at these paths:

    - the home's path in the user database,
    - the home's path without symbolic links, as returned by getcwd(3),
    - the path without symbolic links of each share whose path is equal on node and guest.

    realpath(1) runs as the user, because an NFS server may answer only that user. If it fails, no
    links are resolved. Users can control the result by replacing a directory with a link, so paths
    in system directories are dropped.
    """
    aliases = {
        s.source: s.target for s in guest.shares if s.source == s.target and s.name != "home"
    }
    homes = [s for s in guest.shares if s.name == "home" and s.kind == "virtiofs"]
    aliases |= {path: s.target for s in homes for path in (guest.user.home, s.source)}
    uid = guest.user.uid if os.geteuid() == 0 else None
    with contextlib.suppress(HostFault):
        output = run_tool("realpath", "-mz", "--", *aliases, timeout=_RESOLVE, uid=uid)
        resolved = zip(output.split("\0"), aliases.values(), strict=False)
        aliases |= {path: target for path, target in resolved if not _SYSTEM.match(path)}
    return {path: target for path, target in aliases.items() if path != target}


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


def tag(share: Share) -> str:
    """Return the virtiofs tag of a share. Raises HostFault if its name is too long."""
    if len(share.name.encode()) > _TAG_BYTES:
        raise HostFault(f"[shares.{share.name}]: the name is longer than {_TAG_BYTES} bytes")
    return share.name
