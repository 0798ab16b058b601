"""Tools of the system in the hands of root: started so that they end with who has started them.

What parses a stranger's file runs as nobody instead, or as another user without rights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from vtorque_core.base.errors import HostFault
from vtorque_core.base.trust import effective_root

NOBODY = 65534  # Debian base-passwd and Red Hat setup: nobody and nogroup
_TOOL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_SETPRIV = "/usr/bin/setpriv"  # util-linux
_UNLESS_ORPHAN = '[ "$PPID" = "$0" ] || exit 126; exec "$@"'


def guarded(*argv: str, rights: Iterable[str] = ()) -> list[str]:
    """Return the command that runs ``argv`` so that the kernel kills it when its starter ends.

    The starter is the thread that calls this and then starts the command (PR_SET_PDEATHSIG of
    prctl(2)). One that has ended before prctl(2) is noticed too: the command then does nothing
    and exits with 126. It does not hold for what ``argv`` itself starts, nor after execve(2) of a
    set-user-ID program, which gets no rights by that (PR_SET_NO_NEW_PRIVS). ``rights`` are options
    of setpriv(1) and take effect first. A shell stands between (it becomes ``argv``): the
    environment must be a plain one; names that are no identifiers are lost, PWD is added.
    """
    check = ("/bin/sh", "-c", _UNLESS_ORPHAN, str(os.getpid()))
    return [_SETPRIV, *rights, "--no-new-privs", "--pdeathsig", "KILL", "--", *check, *argv]


def alone() -> tuple[str, ...]:
    """Return the command that runs another as nobody, and leaves none of its processes behind.

    For a tool that parses what a stranger wrote, which may make anything of it: it could go on in
    a process of its own, and write to a file that it was handed after that has been checked. In a
    pid namespace (pid_namespaces(7)) all end with the first. Nothing, unless as root (tests).
    """
    if not effective_root():
        return ()
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--")
    rights = (*rights_of(NOBODY), "--no-new-privs", "--pdeathsig", "KILL")
    return (*namespace, "setpriv", *rights, "--")


def rights_of(uid: int) -> tuple[str, ...]:
    """Return setpriv(1)'s options for a user with no group and none of root's rights."""
    return "--reuid", str(uid), "--regid", str(NOBODY), "--clear-groups"


def run_tool(
    *argv: str, timeout: float = 60.0, stdin: bytes | None = None, uid: int | None = None
) -> str:
    """Run a system tool as root with a fixed PATH and C locale, no shell; return its stdout.

    ``uid``: as that user instead, in no group, with no rights; None: as root.

    The tool is killed when the calling thread dies, so that nothing goes on creating what
    teardown has removed (see :func:`guarded`). Raises HostFault with the tool's last
    words if it is missing, fails or takes longer than ``timeout`` seconds.
    """
    import shutil  # noqa: PLC0415 - 10 ms with subprocess, and vsub runs no tool
    import subprocess  # noqa: PLC0415

    env = {"PATH": _TOOL_PATH, "LC_ALL": "C", "HOME": "/root"}
    program = shutil.which(argv[0], path=_TOOL_PATH)
    if program is None:
        raise HostFault(f"{argv[0]}: not found in {_TOOL_PATH}")
    try:
        done = subprocess.run(
            guarded(program, *argv[1:], rights=rights_of(uid) if uid is not None else ()),
            env=env,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise HostFault(f"{argv[0]}: no end after {timeout:g} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-500:]
        raise HostFault(f"{' '.join(argv)}: exit {done.returncode}: {words}")
    return done.stdout.decode("utf-8", "replace")
