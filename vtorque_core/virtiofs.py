"""Serve host directories to a guest with virtiofsd, never as host root.

The daemon is Debian 12's (QEMU 7.2, C). It runs as the job's user in a user namespace that maps
guest root to a subordinate id and the user's own ids to themselves, nothing else: a file that
guest root creates belongs to the subordinate id on the host, device nodes and other owners are
refused by the kernel, and the files of others are as closed as they are to the user. How the
process gets there: :mod:`vtorque_core._userns_exec`; how it is found again and ended:
:mod:`vtorque_core.user_daemon`.

libvirt is given the socket: ``<filesystem><driver type='virtiofs'/><source socket=PATH/>...``
with shared memfd memory (https://libvirt.org/kbase/virtiofs.html, "Externally-launched").
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vtorque_core import _userns_exec, user_daemon

VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
_NOFILE = 1_000_000  # virtiofsd's own default: one descriptor per file that the guest knows
_READY = b"Waiting for vhost-user socket connection"

id_map = user_daemon.id_map
stop = user_daemon.stop


@dataclass(frozen=True)
class Share(user_daemon.Service):
    """One shared directory and its daemon; ``subordinate_id`` is what guest root is mapped to.

    ``owner_check`` demands that the source belongs to ``uid`` (a home does, a site's software tree
    does not).
    """

    subordinate_id: int
    readonly: bool
    owner_check: bool
    program: str = VIRTIOFSD


def daemon_argv(program: str, socket_fd: int) -> tuple[str, ...]:
    """Return virtiofsd's arguments; ``{source}`` stands for the directory's descriptor.

    The final ``/.`` makes a directory of the link below /proc: virtiofsd does not follow a link.
    No path is in here, so none needs quoting. sandbox=chroot is one process, namespace two.
    """
    options = ("source=/proc/self/fd/{source}/.", "sandbox=chroot", "modcaps=-mknod:-setfcap")
    arguments = [argument for option in options for argument in ("-o", option)]
    return (program, "-f", f"--fd={socket_fd}", "--rlimit-nofile=0", *arguments)


def start(share: Share, *, timeout: float = 10.0) -> None:
    """Start the daemon, detached; return when it waits for QEMU on ``share.socket``.

    As root; see :func:`vtorque_core.user_daemon.start`. It ends by itself when QEMU goes. Raises
    HostFault.
    """
    groups = share.mapped_groups
    uid_map = id_map(share.subordinate_id, [share.uid])
    gid_map = id_map(share.subordinate_id, [share.gid, *groups])

    def plan(descriptors: user_daemon.Descriptors) -> _userns_exec.Plan:
        return _userns_exec.Plan(
            uid=share.uid,
            gid=share.gid,
            groups=groups,
            uid_map=uid_map,
            gid_map=gid_map,
            source=share.source,
            disk=False,
            owner_check=share.owner_check,
            readonly=share.readonly,
            nofile=_NOFILE,
            argv=daemon_argv(share.program, descriptors.socket_fd),
            **asdict(descriptors),
        )

    user_daemon.start(
        share,
        plan,
        lambda log: _READY in log,
        label=f"cannot share {share.source}",
        timeout=timeout,
    )
