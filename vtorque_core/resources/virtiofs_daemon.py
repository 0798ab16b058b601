"""Serve host directories to a guest with virtiofsd, never as host root.

The daemon is Debian 12's (QEMU 7.2, C). It runs as the job's user in a user namespace that maps
guest root to a subordinate id and the user's own ids to themselves, nothing else: a file that
guest root creates belongs to the subordinate id on the host, device nodes and other owners are
refused by the kernel, and the files of others are as closed as they are to the user. How the
process gets there: :mod:`vtorque_core.resources._user_daemon_exec`; how it is found again and
ended: :mod:`vtorque_core.resources.user_daemon`.

libvirt is given the socket: ``<filesystem><driver type='virtiofs'/><source socket=PATH/>...``
with shared memfd memory (https://libvirt.org/kbase/virtiofs.html, "Externally-launched").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtorque_core.resources import user_daemon

VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
_READY = b"Waiting for vhost-user socket connection"


@dataclass(frozen=True)
class Share(user_daemon.Service):
    """One shared directory and its daemon; ``subordinate_id`` is what guest root is mapped to."""

    is_disk: ClassVar[bool] = False
    nofile: ClassVar[int] = 1_000_000  # virtiofsd's own: one descriptor per file of the guest's
    program: str = VIRTIOFSD

    @property
    def label(self) -> str:
        """What begins the messages about the directory."""
        return f"cannot share {self.source}"

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        """Return virtiofsd's arguments; ``{source}`` stands for the directory's descriptor.

        The final ``/.`` makes a directory of the link below /proc: virtiofsd does not follow a
        link. No path is in here, so none needs quoting. sandbox=chroot is one process, namespace
        two.
        """
        options = ("source=/proc/self/fd/{source}/.", "sandbox=chroot", "modcaps=-mknod:-setfcap")
        arguments = [argument for option in options for argument in ("-o", option)]
        return (self.program, "-f", f"--fd={socket_fd}", "--rlimit-nofile=0", *arguments)

    def start(self, *, timeout: float = 10.0) -> None:
        """Start the daemon, detached; return when it waits for QEMU on ``socket``.

        As root; see :func:`vtorque_core.resources.user_daemon.start`. It ends by itself when QEMU
        goes. Raises HostFault.
        """
        user_daemon.start(self, lambda log: _READY in log, timeout)


@dataclass(frozen=True)
class Virtiofsd(user_daemon.UserDaemon):
    """The daemon of one :class:`Share`."""

    kind = "virtiofsd"
