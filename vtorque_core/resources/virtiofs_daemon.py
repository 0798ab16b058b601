"""Serve host directories to a guest with virtiofsd, never as host root.

It runs as the job's user in a user namespace that has a subordinate id for guest root and the
user's own ids, nothing else: a file that guest root creates belongs to the subordinate id on the
host, device nodes and other owners are refused by the kernel, and the files of others are as closed
as to the user. How the process gets there: :mod:`vtorque_core.resources._user_daemon_exec`; how it
is found again and ended: :mod:`vtorque_core.resources.user_daemon`.

There are two daemons. To QEMU's, in C (up to QEMU 7.2), guest root is 0 and the user's ids are
themselves. The one in Rust (from 1.13 on) shuts itself into the directory only as 0: it has the
user's ids as 0, and translates between these and the guest's.

libvirt is given the socket: ``<filesystem><driver type='virtiofs'/><source socket=PATH/>...``
with shared memfd memory (https://libvirt.org/kbase/virtiofs.html, "Externally-launched").
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base.errors import HostFault
from vtorque_core.base.run_tool import run_tool
from vtorque_core.resources import user_daemon
from vtorque_core.resources._user_daemon_exec import MOUNTED

VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
_FILE_MAX = Path("/proc/sys/fs/file-max")
_LEAST_FILES, _MOST_FILES = 100_000, 1_000_000
_READY = b"Waiting for vhost-user socket connection"
# A file that was open when the guest was saved, and that another has taken the place of or that is
# gone, gives EIO when the guest goes on. By default the guest reads the other one, or cannot go on.
_OTHERS_ARE_ERRORS = ("--migration-verify-handles", "--migration-on-error=guest-error")
# One that comes from another node goes on there instead: it would lose the file by the move.
_OTHERS_STOP_IT = ("--migration-verify-handles", "--migration-on-error=abort")
# Only "user." attributes are passed through. Others fail with ENOTSUP, because with EPERM a guest
# that has SELinux could not mount the share.
_ATTRIBUTES = ":ok:all:user.:user.:{}:unsupported:all:::"


@dataclass(frozen=True)
class SharedDirectory(user_daemon.Service):
    """One shared directory and its daemon; ``subordinate_id`` is what guest root is mapped to.

    ``comes``: its guest comes from another node.
    """

    nofile: int = _LEAST_FILES
    program: str = VIRTIOFSD
    comes: bool = False

    @property
    def user_is_root(self) -> bool:
        """Whether the daemon is the one of :func:`_rusts`."""
        return "--translate-uid" in _help(self.program)

    @property
    def label(self) -> str:
        """What begins the messages about the directory."""
        return f"cannot share {self.source}"

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        """Return virtiofsd's arguments. No path of the user's is in here, so none needs quoting.

        Of the sandboxes chroot is one process, namespace two.
        """
        return (_rusts if self.user_is_root else _qemus)(self, socket_fd)

    def start(self, *, timeout: float = 10.0) -> None:
        """Start the daemon, detached; return when it waits for QEMU on ``socket``.

        As root; see :func:`vtorque_core.resources.user_daemon.start`. It ends by itself when QEMU
        goes. Raises HostFault.
        """
        user_daemon.start(self, lambda log: _READY in log, timeout)


def file_limit(ram_mib: int) -> int:
    """Return the limit of a daemon's descriptors: it holds one for each file that its guest caches.

    A guest needs more than 1 KiB of memory to cache a file. It therefore never reaches one
    descriptor per KiB, unless it has less memory than 100,000 files need. An eighth of the node's
    files is left to eight such daemons; by default the kernel allows one file per 10 KiB of memory.

    Args:
        ram_mib: the guest's memory in MiB, divided by its number of shares.
    """
    of_node = int(_FILE_MAX.read_text(encoding="ascii"))  # of unprivileged processes (proc(5))
    return max(_LEAST_FILES, min(_MOST_FILES, ram_mib * 1024, of_node // 8))


def _qemus(share: SharedDirectory, socket_fd: int) -> tuple[str, ...]:
    """Return the arguments of QEMU's virtiofsd (in C); ``{source}`` is the directory's descriptor.

    virtiofsd does not follow links. The final ``/.`` turns the link below /proc into a directory.
    The daemon does not start without a rule for security.capability. That rule is harmless: the
    host refuses to set the attribute, because the daemon has no CAP_SETFCAP.
    """
    options = (
        "source=/proc/self/fd/{source}/.,sandbox=chroot,modcaps=-mknod:-setfcap,announce_submounts,"
        f"no_posix_acl,xattrmap={_ATTRIBUTES.format(':ok:client:security.capability::')}"
    )
    return (share.program, "-f", f"--fd={socket_fd}", "--rlimit-nofile=0", "-o", options)


def _rusts(share: SharedDirectory, socket_fd: int) -> tuple[str, ...]:
    """Return the arguments of the one in Rust, which is given no link below /proc.

    It would go by the path where that leads. The user can change that path meanwhile, and a copy's
    mounts have none.
    """
    root = share.subordinate_id
    return (
        share.program, f"--fd={socket_fd}", "--rlimit-nofile=0",
        f"--shared-dir={MOUNTED}", "--sandbox=chroot", "--modcaps=-mknod:-setfcap",
        "--announce-submounts", f"--xattrmap={_ATTRIBUTES.format('')}",
        *_translated("uid", root, share.uid), *_translated("gid", root, share.gid),
        *((_OTHERS_STOP_IT if share.comes else _OTHERS_ARE_ERRORS) if saves(share.program) else ()),
    )  # fmt: skip


def _translated(kind: str, root: int | None, own: int) -> tuple[str, ...]:
    """Return how ids become the guest's. Without one of its own guest root is the user, too."""
    of_root = () if root is None else (f"--translate-{kind}=map:0:{root}:1",)
    return (*of_root, f"--translate-{kind}=map:{own}:0:1")


def saves(program: str = VIRTIOFSD) -> bool:
    """Return whether a guest with such a daemon can be saved: it gives its state to QEMU."""
    return _OTHERS_ARE_ERRORS[0] in _help(program)


@functools.cache  # one answer for all of a start
def _help(program: str) -> str:
    with contextlib.suppress(HostFault):  # its start will say what is wrong with it
        return run_tool(program, "--help", timeout=10)
    return ""


@dataclass(frozen=True)
class Virtiofsd(user_daemon.UserDaemon):
    """The daemon of one :class:`SharedDirectory`."""

    kind = "virtiofsd"
