"""Program that enters a user namespace, becomes the job's owner, and executes a daemon.

:mod:`vtorque_core.resources.user_daemon` executes this program as host root, because a fork without
exec is unsafe with threads. The last argument is the JSON of :class:`DaemonPlan`. The program
reports an error on ``report_fd``, with the prefix :data:`DENIED` if the user caused it.

Root owns the namespace, so the user has no power over the daemon (user_namespaces(7)). The daemon
keeps its capabilities at setresuid(2) by SECBIT_NO_SETUID_FIXUP, and at execve(2) because they are
ambient (capabilities(7)).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import stat
import struct
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from vtorque_core.base.qcow2_header import HEADER, check_header
from vtorque_core.base.seccomp import answer_calls

# linux/sched.h
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
# linux/prctl.h, linux/securebits.h
PR_SET_SECUREBITS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 28, 47, 2
SECUREBITS = 0b1111  # NOROOT and NO_SETUID_FIXUP, each with its lock bit
# linux/capability.h: virtiofsd needs these to serve files, for chroot, and to drop its bounding
# set. Not MKNOD and SETFCAP: the guest needs neither, and the option modcaps drops them.
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "SETGID": 6, "SETUID": 7,
    "SETPCAP": 8, "SYS_CHROOT": 18,
}  # fmt: skip
_CAP_VERSION_3 = 0x20080522
# System calls that the daemon of a disk may not use: for new processes, sockets, namespaces and
# mounts, and for access to other processes and the kernel. Calls that a libseccomp of 2022 may not
# know are numbers, which are equal on every architecture: open_tree to fspick, mount_setattr,
# quotactl_fd, open_tree_attr (asm-generic/unistd.h).
_NOT_FOR_A_DISK = (
    "socket", "fork", "vfork", "ptrace", "personality", "pivot_root", "chroot", "mount", "umount2",
    "swapon", "reboot", "init_module", "delete_module", "quotactl", "kexec_load", "add_key",
    "request_key", "keyctl", "unshare", "perf_event_open", "name_to_handle_at",
    "open_by_handle_at", "setns", "process_vm_readv", "process_vm_writev", "finit_module",
    "kexec_file_load", "bpf", "execveat", "userfaultfd", "io_uring_setup",
    *range(428, 434), 442, 443, 467,
)  # fmt: skip
# Same numbers on every architecture (asm-generic/unistd.h)
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_PIDFD_GETFD, SYS_MOUNT_SETATTR = 428, 429, 438, 442
_FCHMODAT2 = 452
AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 0x1000, 0x8000, 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MS_PRIVATE = 1, 2, 4, 1 << 18
# linux/mount.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 1 << 14, 1 << 19
DENIED = "!"
MOUNTED = "/mnt"  # exists on every system; only the daemon sees the mount
_NO_LINK = "name the directory that it leads to as the source in [shares]"
_MEMORY = 256 << 20  # bytes of a daemon of a directory, beside those for its files
# A qcow2 file of 1 MB can contain bitmaps (docs/interop/qcow2.txt of QEMU) of any size in memory.
_DISK_MEMORY, _DISK_STACK = 512 << 20, 1 << 20  # bytes; up to 64 threads, whose stacks count
_SECTOR = 512  # bytes; the unit of virtio-blk (virtio specification 1.2, 5.2.4)
_USERS_FAULT = {
    errno.ENOENT: "does not exist on the node", errno.EISDIR: "is a directory, not a disk file",
    errno.ELOOP: "is a symbolic link: write the path of the file itself",
    errno.ENXIO: "is not a regular file", errno.EACCES: "", errno.EPERM: "", errno.EROFS: "",
    errno.ENOTDIR: "", errno.ENAMETOOLONG: "", errno.ETXTBSY: "",
    errno.EAGAIN: "is in use by another job or program",  # a lease, fcntl(2)
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class DaemonPlan(NamedTuple):
    """Ids, namespace and program of a daemon.

    Attributes:
        uid_map, gid_map: contents of /proc/PID/uid_map and gid_map.
        disk: ``raw`` or ``qcow2`` if ``source`` is the user's disk file; the daemon then has no
            capabilities. Empty if ``source`` is a directory; the daemon then has the capabilities
            of guest root in the namespace.
        user_is_root: the user's ids are 0 in the namespace; ``source`` is mounted on
            :data:`MOUNTED`.
        nosuid: the daemon cannot set the setuid and setgid bits of files.
        launched_by_root: False if the job's owner launches the daemon.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    uid_map: str
    gid_map: str
    source: str
    disk: str
    user_is_root: bool
    owner_check: bool
    readonly: bool
    nosuid: bool
    nofile: int
    users_fault: bool
    argv: tuple[str, ...]  # every "{source}" becomes the number of the source's descriptor
    socket_fd: int
    lock_fd: int
    log_fd: int
    report_fd: int
    launched_by_root: bool


class _Step(Exception):
    """The message says which step of the daemon's start failed."""


class _Denied(_Step):
    """An error that the user caused."""


def _check(result: int, system_call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{system_call}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(*arguments: int) -> None:
    padded = (*arguments, 0, 0, 0, 0)[:5]
    _check(_libc.prctl(*(ctypes.c_ulong(a) for a in padded)), f"prctl {arguments[0]}")


def _system_call(what: str, number: int, *arguments: int | bytes | ctypes.Array[Any]) -> int:
    typed = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return _check(_libc.syscall(ctypes.c_long(number), *typed), what)


def descriptor_of(pidfd: int, number: int) -> int:
    """Duplicate a descriptor of another process (pidfd_getfd(2), Linux 5.6)."""
    return _system_call("pidfd_getfd", SYS_PIDFD_GETFD, pidfd, number, 0)


def _mount(source: str, target: str, kind: bytes | None, flags: int) -> None:
    result = _libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), None)
    _check(result, f"mount on {target}")


def ignore_setgroups() -> None:
    """Make setgroups(2) succeed without effect in this process and its children.

    Otherwise virtiofsd would drop its supplementary groups.
    """
    answer_calls([("setgroups", 0, ())])


def refuse_setuid() -> None:
    """Make chmod(2) refuse setuid and setgid bits. Writing removes a new file's bits (inode(7))."""
    number_of: dict[str | int, int] = {"chmod": 1, "fchmod": 1, "fchmodat": 2, _FCHMODAT2: 2}
    bits = (stat.S_ISUID, stat.S_ISGID)
    answer_calls(
        (call, errno.EPERM, ((at, bit, bit),)) for call, at in number_of.items() for bit in bits
    )


def restrict_disk_calls() -> None:
    """Restrict the system calls of the storage daemon, because it parses guest data."""
    no_thread = (0, CLONE_THREAD, 0)  # flags & CLONE_THREAD == 0
    refused = [(call, errno.EPERM, ()) for call in _NOT_FOR_A_DISK]
    clone = (("clone", errno.EPERM, (no_thread,)), ("clone3", errno.ENOSYS, ()))
    answer_calls([*refused, *clone])  # without clone3, glibc uses clone(2)


def _capset(numbers: Iterable[int]) -> None:
    mask = sum(1 << number for number in numbers)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)  # effective, permitted, inheritable
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def _keep_capabilities() -> None:
    _capset(CAPABILITIES.values())
    for number in CAPABILITIES.values():
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number)


def _open_disk(plan: DaemonPlan) -> int:
    """Open and lock the user's disk file with the user's ids.

    O_NONBLOCK prevents a hang at a FIFO. The lock (F_OFD_SETLK, fcntl(2)) ends with the daemon.
    """
    access = os.O_RDONLY if plan.readonly else os.O_RDWR
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        source = os.open(plan.source, access | flags)
    except OSError as error:
        if error.errno in _USERS_FAULT:
            words = f"cannot be opened by you: {error.strerror}"
            raise _Denied(_USERS_FAULT[error.errno] or words) from None
        raise _Step(f"cannot open as uid {plan.uid}: {error.strerror}") from None
    facts = os.fstat(source)
    if not stat.S_ISREG(facts.st_mode):
        raise _Denied("is not a regular file")
    if facts.st_uid != plan.uid:
        raise _Denied(f"belongs to uid {facts.st_uid}, not to you (uid {plan.uid})")
    if plan.disk == "qcow2":
        try:  # not for security: the daemon has only the user's permissions
            check_header(os.pread(source, HEADER, 0))
        except ValueError as error:
            raise _Denied(f"{error} (its name ends with .qcow2)") from None
    elif facts.st_size == 0 or facts.st_size % _SECTOR:
        raise _Denied(f"has {facts.st_size} bytes; a raw disk must have a multiple of {_SECTOR}")
    try:
        kind = fcntl.F_RDLCK if plan.readonly else fcntl.F_WRLCK
        fcntl.fcntl(source, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise _Denied(_USERS_FAULT[errno.EAGAIN]) from None
        fault = _Step if error.errno == errno.ENOLCK else _Denied  # a server's lock service
        raise fault(f"the file system cannot lock the file: {error.strerror}") from None
    return source


def _resolve(path: str) -> tuple[str, bool]:
    """Return ``path`` without symbolic links, and True if only root can change its directories.

    Refuses links that users can change, because such a link could lead to any directory.
    """
    above, _, name = path.rstrip("/").rpartition("/")
    if not name:
        return "", True
    parent, trusted = _resolve(above)
    if name in (".", ".."):
        return (parent if name == "." else parent.rpartition("/")[0]), trusted
    full = f"{parent}/{name}"
    facts = os.lstat(full)
    trusted = trusted and facts.st_uid == 0
    if not stat.S_ISLNK(facts.st_mode):
        return full, trusted and bool(facts.st_mode & stat.S_ISVTX or not facts.st_mode & 0o022)
    if not trusted:
        raise _Step(f"{full} is a symbolic link that users other than root can change: {_NO_LINK}")
    target = os.readlink(full)  # noqa: PTH115 - pathlib is an import
    return _resolve(target if target.startswith("/") else f"{parent}/{target}")


def _open_source(plan: DaemonPlan) -> int:
    try:
        os.stat(plan.source)  # noqa: PTH116 - a loop of links raises OSError
        path = _resolve(plan.source)[0] or "/"
        source = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _Step(f"cannot open as uid {plan.uid}: {error.strerror}") from None
    if os.readlink(f"/proc/self/fd/{source}") != path:  # noqa: PTH115
        raise _Step("was replaced while it was being opened")
    owner = os.fstat(source).st_uid
    if plan.owner_check and owner != plan.uid:
        raise _Step(f"belongs to uid {owner}, not to uid {plan.uid}")
    return source


def _enter_own_namespace(plan: DaemonPlan) -> None:
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", plan.uid_map), ("gid_map", plan.gid_map)):
        _write(f"/proc/self/{name}", text)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123 - pathlib is an import
        file.write(text)


def _open_source_as_user(plan: DaemonPlan) -> int:
    """Open the source on the host in a child process with all of the user's ids.

    Effective ids are not enough: NFS may squash root, and FUSE checks the real ids.
    """
    answer, child_answer = os.pipe()
    child_hold, hold = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hold)
            os.close(plan.lock_fd)  # a user's file system can make this process hang for ever
            os.setgroups(plan.groups)
            os.setresgid(plan.gid, plan.gid, plan.gid)
            os.setresuid(plan.uid, plan.uid, plan.uid)  # not dumpable: the user cannot trace it
            os.write(child_answer, b"%d" % (_open_disk if plan.disk else _open_source)(plan))
            os.read(child_hold, 1)
        except BaseException as error:  # this process must not continue
            _report(plan, _Denied(error) if plan.users_fault else error)
        os._exit(0)
    os.close(child_answer)
    os.close(child_hold)
    number = os.read(answer, 20)
    if not number:
        os.waitpid(child, 0)  # it has reported
        os._exit(1)
    source = descriptor_of(os.pidfd_open(child), int(number))
    os.close(hold)
    os.waitpid(child, 0)
    return source


def _copy_mounts(plan: DaemonPlan, host_source: int) -> int:
    """Copy the source's mounts, and return an open descriptor of the copy.

    If ``user_is_root``, mount the copy on :data:`MOUNTED`. A read-only copy does not show later
    mounts of the host, because they would be writable.
    """
    source = _open_source(plan._replace(owner_check=False))  # ids differ here, and it was checked
    if not os.path.samestat(os.fstat(source), os.fstat(host_source)):
        raise _Step("was replaced while it was being opened")
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_EMPTY_PATH | AT_RECURSIVE
    tree = _system_call("open_tree (needs Linux 5.2)", SYS_OPEN_TREE, source, b"", flags)
    wanted = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_RDONLY * plan.readonly
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, MS_PRIVATE * plan.readonly)  # struct mount_attr
    arguments = (tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    _system_call("mount_setattr (needs Linux 5.12)", SYS_MOUNT_SETATTR, *arguments)
    if plan.readonly and not os.fstatvfs(tree).f_flag & os.ST_RDONLY:
        raise _Step("could not be mounted read-only")
    if plan.user_is_root:
        target = (-1, MOUNTED.encode(), MOVE_MOUNT_F_EMPTY_PATH)  # -1: the path is absolute
        _system_call(f"mount on {MOUNTED}", SYS_MOVE_MOUNT, tree, b"", *target)
    return tree


def _mount_proc() -> None:
    """Mount a /proc for the new pid namespace.

    libcap-ng reads /proc/PID/status, which the host's /proc does not show for this pid.
    """
    unshare(CLONE_NEWNS)
    _mount("none", "/", None, MS_REC | MS_SLAVE)  # otherwise the host would see the next mount
    _mount("proc", "/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _hold_lock(plan: DaemonPlan) -> None:
    fcntl.lockf(plan.lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _become_user(plan: DaemonPlan) -> None:
    uid, gid = (0, 0) if plan.user_is_root else (plan.uid, plan.gid)
    if plan.launched_by_root:
        os.setgroups([gid if group == plan.gid else group for group in plan.groups])
    os.setresgid(gid, gid, gid)
    prctl(PR_SET_SECUREBITS, SECUREBITS)
    os.setresuid(uid, uid, uid)


def _daemon(plan: DaemonPlan, host_source: int, maps_wanted: int, maps_done: int) -> NoReturn:
    _hold_lock(plan)
    os.setsid()
    _mount_proc()
    if plan.launched_by_root:
        unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC)
        os.write(maps_wanted, b"?")
        if os.read(maps_done, 1) != b"!":
            os._exit(1)  # the launcher has died, or failed and reported it
    else:
        unshare(CLONE_NEWNET | CLONE_NEWIPC)
    _become_user(plan)
    copy = (plan.readonly or plan.user_is_root) and not plan.disk
    source = _copy_mounts(plan, host_source) if copy else host_source
    os.set_inheritable(source, True)  # like the caller's; execve closes the others
    if plan.disk:
        _capset(())
        restrict_disk_calls()
    else:
        ignore_setgroups()
        if plan.nosuid:
            refuse_setuid()
        _keep_capabilities()
    argv = [argument.replace("{source}", str(source)) for argument in plan.argv]
    try:
        os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin", "LC_ALL": "C"})  # noqa: S606
    except OSError as error:
        raise _Step(f"cannot execute {argv[0]}: {error.strerror}") from None


def _report(plan: DaemonPlan, error: BaseException) -> NoReturn:
    mark = DENIED if isinstance(error, _Denied) else ""
    os.write(plan.report_fd, f"{mark}{error}".encode(errors="replace")[:1000])
    os._exit(1)


def set_limits(plan: DaemonPlan) -> None:
    """Limit the daemon's descriptors and memory.

    Without CAP_SYS_RESOURCE the daemon gets as many descriptors as its hard limit allows.
    """
    for most in (min(plan.nofile, resource.getrlimit(resource.RLIMIT_NOFILE)[1]), plan.nofile):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the user's data
    # QEMU's virtiofsd: 32 KiB for an open directory, less than 1 KiB for a file
    memory = _DISK_MEMORY if plan.disk else _MEMORY + plan.nofile * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if plan.disk:
        resource.setrlimit(resource.RLIMIT_STACK, (_DISK_STACK, _DISK_STACK))


def _launch(plan: DaemonPlan) -> None:
    _hold_lock(plan)
    os.set_inheritable(plan.report_fd, False)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (plan.log_fd, 1), (plan.log_fd, 2)):
        os.dup2(source, target)
    os.close(plan.log_fd)
    os.chdir("/")
    os.umask(0o077)
    set_limits(plan)
    if plan.launched_by_root:
        host_source = _open_source_as_user(plan)
    else:
        host_source = (_open_disk if plan.disk else _open_source)(plan)
        _enter_own_namespace(plan)
    plan = plan._replace(source=os.readlink(f"/proc/self/fd/{host_source}"))  # noqa: PTH115
    maps_wanted, child_maps_wanted = os.pipe()
    child_maps_done, maps_done = os.pipe()
    unshare(CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        os.close(maps_wanted)
        os.close(maps_done)
        try:
            _daemon(plan, host_source, child_maps_wanted, child_maps_done)
        except BaseException as error:  # this process must not continue
            _report(plan, error)
    os.close(child_maps_wanted)
    if os.read(maps_wanted, 1) != b"?":
        return  # the child has reported, or needs no maps
    _write(f"/proc/{child}/uid_map", plan.uid_map)
    _write(f"/proc/{child}/gid_map", plan.gid_map)
    os.write(maps_done, b"!")


def main() -> None:
    plan = DaemonPlan(**json.loads(sys.argv[-1]))
    try:
        _launch(plan)
    except BaseException as error:  # report every error to the caller
        _report(plan, error)
    os._exit(0)
