"""The driver of Linux guests: their virtual hardware, their seed, when they are ready, their jobs.

Stateless. All but :meth:`LinuxDriver.run` act as root on the node.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vtorque_core.api_context import ContextItem, EnvVar, Mount, RootCommand
from vtorque_core.api_domain import Channel, Disk, Element, Filesystem, KernelBoot
from vtorque_core.api_guest import ReadyGuest, Script, Streams
from vtorque_core.api_node import GuestPlan, HostFault, Image, Resource, Share, Site
from vtorque_core.api_options import DISK
from vtorque_linux_guest import bundle, guest_logs, jobs, ssh
from vtorque_linux_guest.seed import SEED_NAME, SERIAL, Seed, iso
from vtorque_linux_guest.settings import Settings, site_scripts
from vtorque_linux_guest.stream import GuestFailed, GuestSilent, StatusReader, StreamError

STATUS_SOCKET = "status.sock"
DATA_SERIAL = "vtdata"
"""Serial of the user's own disk; the core opens the file as them."""

DATA = "/data"
_CONSOLES = {"aarch64": "ttyAMA0", "ppc64le": "hvc0", "s390x": "ttysclp0"}
_TAG_BYTES = 35  # virtio-fs: 36 bytes with its end (virtio specification 1.2, 5.11.4)


class LinuxDriver:
    """See :class:`vtorque_core.api_guest.GuestDriver`."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterator[Element]:
        """Yield ports, seed, shares and, for an image with a kernel, its direct boot."""
        run = guest.run_dir
        yield Channel("status", bundle.STATUS_PORT, str(run / STATUS_SOCKET), owner="root")
        yield Channel("run", bundle.RUN_PORT, str(run / jobs.RUN_SOCKET), owner="job")
        seed = str(guest.state_dir / SEED_NAME)
        yield Disk("seed", path=seed, format="raw", readonly=True, serial=SERIAL)
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
            )

    def context(self, guest: GuestPlan, site: Site) -> Iterator[ContextItem]:
        """Yield the environment, the mounts of the shares and of the user's disk."""
        yield EnvVar("DISTRO", "SLG")
        for share in guest.shares:
            source = tag(share) if share.kind == "virtiofs" else share.source
            yield Mount(share.kind, source, share.target, readonly=share.readonly)
        if has_data(guest):
            yield Mount("disk", DATA_SERIAL, DATA)
            owner = f"{guest.user.uid}:{guest.user.gid}"
            yield RootCommand(("chown", owner, DATA))

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterable[Resource]:
        """Return the seed and what vmgr ssh needs.

        Raises Refused, HostFault for items that this guest cannot have.
        """
        settings = site[Settings]
        content = iso(bundle.seed_files(guest, items, settings))
        has_epilogue = bool(site_scripts(settings.epilogue))
        marker = str(guest.run_dir / jobs.EPILOGUE_MARKER) if has_epilogue else ""
        path = str(guest.state_dir / SEED_NAME)
        return (Seed(path, guest.qemu_uid, marker, content), *ssh.client_files(guest))

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait until the guest's agent says READY; what a guest that fails has logged is kept.

        Raises HostFault: what the guest's setup said, that it died, or that it was silent.
        """
        with _connect(guest.run_dir / STATUS_SOCKET, deadline) as connection:
            reader = StatusReader(connection)
            try:
                reader.wait_ready(guest_logs.ready_by(guest, deadline), step)
            except GuestFailed as error:
                guest_logs.collect(guest, reader, deadline)
                raise HostFault(error.reason, stage=f"guest {guest.hostname}") from None
            except GuestSilent as error:
                if reader.step:
                    guest_logs.collect(guest, reader, deadline)
                raise HostFault(
                    f"{error}; [node] start_timeout is the limit, its console's log may say more",
                    stage=f"guest {guest.hostname}",
                ) from None
            except StreamError as error:
                raise HostFault(str(error), stage=f"guest {guest.hostname}") from None

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the job in the guest; see :func:`vtorque_linux_guest.jobs.run`."""
        return jobs.run(guest, script, streams)


def has_data(guest: GuestPlan) -> bool:
    """Return whether this guest gets the user's own disk: only the job's first one does."""
    return bool(guest[DISK]) and guest.rank == 0


def cmdline(image: Image) -> str:
    """Return the kernel's command line: ours, then the image's own.

    ``quiet`` and no self tests of ciphers save 0.3 s of an emulated boot, ``panic=-1`` ends a
    guest whose kernel panics (kernel-parameters.txt). No ``ds=nocloud``: cloud-init would take
    that for a seed without a disk.
    """
    console = _CONSOLES.get(image.arch, "ttyS0")
    words = [f"console={console}", "quiet", "panic=-1", "cryptomgr.notests=1"]
    own = image.cmdline.split()
    return " ".join([*(w for w in words if w not in own), *own])


def tag(share: Share) -> str:
    """Return the virtiofs tag of a share: its name. Raises HostFault if that is too long."""
    if len(share.name.encode()) > _TAG_BYTES:
        raise HostFault(f"[shares.{share.name}]: the name has more than {_TAG_BYTES} bytes")
    return share.name


def _connect(path: Path, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise HostFault(f"{path}: {error.strerror or error}: the guest has ended") from None
    return connection
