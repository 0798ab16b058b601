"""Run a program as root of a new user namespace, without privileges on the machine.

:mod:`vtorque_linux_guest.image.sandbox` runs this script as root: ``python -I -S _sandbox_exec.py
BASE WORK PROGRAM ARGUMENT...``. BASE is the namespace root's uid and gid on the machine. WORK, the
program's own directory, is mounted at :data:`PLACE`. The script is killed when its parent ends.
See user_namespaces(7), mount_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from pathlib import Path
from typing import NoReturn

IDS = 65536  # user and group ids of the namespace, from BASE on
PLACE = "/boot"  # exists on every system, and no program in the sandbox needs it
# linux/sched.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
# linux/mount.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 1 << 12
MS_REC, MS_SLAVE = 1 << 14, 1 << 19
PR_SET_PDEATHSIG, SIGKILL = 1, 9

_libc = ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, system_call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{system_call}: {os.strerror(number)}")


def _unshare(flags: int) -> None:
    _check_result(_libc.unshare(flags), "unshare (is user.max_user_namespaces 0?)")


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    _check_result(_libc.mount(source, target, kind, flags, None), f"mount {target.decode()}")


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def _proc() -> None:
    _mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _run_in_namespaces(argv: list[str], wanted: int, done: int, parent: int) -> NoReturn:
    _unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS)
    os.write(wanted, b"?")
    if os.read(done, 1) != b"!":
        os._exit(125)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(125)  # the parent has ended already
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        _die_with_parent()
        os.close(held)
        # getppid(2) is 0 in this PID namespace even while the parent is alive
        if select.select([alive], [], [], 0)[0]:  # noqa: TID251 - this process has few descriptors
            os._exit(125)
        _proc()
        os.chdir(PLACE)
        os.umask(0o022)
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "HOME": PLACE,
            "TMPDIR": f"{PLACE}/tmp",  # noqa: S108 - in its own directory
        }
        os.execvpe(argv[0], argv, env)  # noqa: S606
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Run the program and exit with its exit code."""
    base, work, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.chown(work, base, base)
    _unshare(CLONE_NEWNS)
    _mount(b"none", b"/", None, MS_REC | MS_SLAVE)  # hide the mounts below from the machine
    _proc()  # the new namespace may mount its own /proc only if nothing covers parts of this one
    _mount(os.fsencode(work), PLACE.encode(), None, MS_BIND)
    wanted, child_wanted = os.pipe()
    child_done, done = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _run_in_namespaces(argv, child_wanted, child_done, parent)
        except OSError as error:
            print(error.strerror or error, file=sys.stderr)  # noqa: T201
            os._exit(125)
    os.close(child_wanted)
    if os.read(wanted, 1) == b"?":
        for table in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{table}").write_text(f"0 {base} {IDS}\n")
        os.write(done, b"!")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
