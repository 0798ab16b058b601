"""Serve host directories to a guest with virtiofsd, never as host root (doc/security.md).

virtiofsd runs as the job's owner in a user namespace that maps only the owner's ids and a
subordinate id for guest root.

With QEMU's C daemon (up to QEMU 7.2), guest root has id 0 in the namespace. With the Rust daemon
(1.13 and later), the owner has id 0, because this daemon can confine itself only as id 0.

libvirt gets the daemon's socket (https://libvirt.org/kbase/virtiofs.html, "Externally-launched").
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
# If a file that was open in a saved guest was replaced or removed, the restored guest gets EIO. By
# default, the guest would read the new file, or could not be restored.
_OTHERS_ARE_ERRORS = ("--migration-verify-handles", "--migration-on-error=guest-error")
# A migration fails instead, and the guest keeps the file on the source node.
_OTHERS_STOP_IT = ("--migration-verify-handles", "--migration-on-error=abort")
# Only "user." attributes are passed through. Others fail with ENOTSUP, because with EPERM a guest
# that has SELinux could not mount the share.
_ATTRIBUTES = ":ok:all:user.:user.:{}:unsupported:all:::"


@dataclass(frozen=True)
class ServedDirectory(user_daemon.ServedData):
    """One shared directory and its daemon.

    Attributes:
        comes: the guest migrates to this node.
        guest_root: ids of guest root, as in :class:`~vtorque_core.api.libvirt_domain.Filesystem`.
    """

    nofile: int = _LEAST_FILES
    program: str = VIRTIOFSD
    comes: bool = False
    guest_root: str = "other"

    @property
    def translates_ids(self) -> bool:
        """True if virtiofsd can map guests' ids (``--translate-uid``): only the Rust daemon."""
        return "--translate-uid" in _help(self.program)

    @property
    def user_is_root(self) -> bool:
        return self.guest_root != "other" or self.translates_ids

    @property
    def label(self) -> str:
        return f"cannot share {self.source}"

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        return (_rust_arguments if self.translates_ids else _c_arguments)(self, socket_fd)

    def start(self, *, timeout: float = 10.0) -> None:
        """Start the daemon, which ends with QEMU. As root."""
        user_daemon.start(self, lambda log: _READY in log, timeout)


def file_limit(ram_mib: int) -> int:
    """Return the limit of a daemon's descriptors, one for each file that its guest caches.

    Each cached file uses at least 1 KiB of guest memory, so one descriptor per KiB suffices.
    ``ram_mib`` is the guest's memory per share.
    """
    of_node = int(_FILE_MAX.read_text(encoding="ascii"))  # of unprivileged processes (proc(5))
    return max(_LEAST_FILES, min(_MOST_FILES, ram_mib * 1024, of_node // 8))


def _c_arguments(share: ServedDirectory, socket_fd: int) -> tuple[str, ...]:
    """Return the arguments of QEMU's virtiofsd (in C).

    The caller replaces ``{source}`` by the directory's descriptor N. The daemon follows the link
    ``/proc/self/fd/N`` only with ``/.`` at the end.
    """
    options = (
        "source=/proc/self/fd/{source}/.,sandbox=chroot,modcaps=-mknod:-setfcap,announce_submounts,"
        f"no_posix_acl,xattrmap={_ATTRIBUTES.format(':ok:client:security.capability::')}"
    )
    return (share.program, "-f", f"--fd={socket_fd}", "--rlimit-nofile=0", "-o", options)


def _rust_arguments(share: ServedDirectory, socket_fd: int) -> tuple[str, ...]:
    """Return the arguments of the Rust virtiofsd, which serves :data:`MOUNTED`.

    This daemon would resolve ``/proc/self/fd/N`` to a path, which the user can change.
    """
    uid, gid = (0, 0) if share.guest_root == "user" else (share.uid, share.gid)
    return (
        share.program, f"--fd={socket_fd}", "--rlimit-nofile=0",
        f"--shared-dir={MOUNTED}", "--sandbox=chroot", "--modcaps=-mknod:-setfcap",
        "--announce-submounts", f"--xattrmap={_ATTRIBUTES.format('')}",
        *_id_maps("uid", share, uid), *_id_maps("gid", share, gid),
        *((_OTHERS_STOP_IT if share.comes else _OTHERS_ARE_ERRORS)
          if can_save(share.program) else ()),
    )  # fmt: skip


def _id_maps(kind: str, share: ServedDirectory, own: int) -> tuple[str, ...]:
    root, both = share.subordinate_id, share.guest_root == "both"
    of_root = ["guest:0:0:1"] * both + [f"map:0:{root}:1"] * (root is not None)
    return tuple(f"--translate-{kind}={each}" for each in (*of_root, f"map:{own}:0:1"))


def can_save(program: str = VIRTIOFSD) -> bool:
    """Return True if this virtiofsd can pass its state to QEMU, so that guests can be saved."""
    return _OTHERS_ARE_ERRORS[0] in _help(program)


@functools.cache  # a start needs it several times
def _help(program: str) -> str:
    with contextlib.suppress(HostFault):  # its start reports the problem
        return run_tool(program, "--help", timeout=10)
    return ""


@dataclass(frozen=True)
class Virtiofsd(user_daemon.UserDaemon):
    kind = "virtiofsd"
