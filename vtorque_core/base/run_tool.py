"""Run system tools that die with the process that started them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from vtorque_core.base.errors import HostFault
from vtorque_core.base.trust import effective_root

NOBODY = 65534  # Debian base-passwd and Red Hat setup: nobody and nogroup
_TOOL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_SETPRIV = "/usr/bin/setpriv"  # util-linux
_UNLESS_ORPHAN = '[ "$PPID" = "$0" ] || exit 126; exec "$@"'


def guard_command(*argv: str, rights: Iterable[str] = ()) -> list[str]:
    """Return a command that runs ``argv``. The kernel kills ``argv`` when the calling thread ends.

    Children of the command are not killed. Set-user-ID programs do not work (PR_SET_NO_NEW_PRIVS).
    Environment variables whose names are not identifiers are dropped. ``rights`` are options of
    setpriv(1).
    """
    check = ("/bin/sh", "-c", _UNLESS_ORPHAN, str(os.getpid()))
    return [_SETPRIV, *rights, "--no-new-privs", "--pdeathsig", "KILL", "--", *check, *argv]


def isolate_command() -> tuple[str, ...]:
    """Return a command prefix that runs a tool as nobody in a new pid namespace.

    All processes of the tool end with the tool, so that none can change a validated file. The
    prefix is empty without root.
    """
    if not effective_root():
        return ()
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--")
    rights = (*rights_of(NOBODY), "--no-new-privs", "--pdeathsig", "KILL")
    return (*namespace, "setpriv", *rights, "--")


def rights_of(uid: int) -> tuple[str, ...]:
    return "--reuid", str(uid), "--regid", str(NOBODY), "--clear-groups"


def run_tool(
    *argv: str, timeout: float = 60.0, stdin: bytes | None = None, uid: int | None = None
) -> str:
    """Run a system tool without a shell, with a fixed PATH and C locale; return its stdout.

    The tool is killed when the calling thread ends. With ``uid``, it runs as this user without
    groups and privileges. Raises HostFault if the tool fails.
    """
    import shutil  # noqa: PLC0415 - 10 ms with subprocess, and vsub runs no tool
    import subprocess  # noqa: PLC0415 - as above

    env = {"PATH": _TOOL_PATH, "LC_ALL": "C", "HOME": "/root"}
    program = shutil.which(argv[0], path=_TOOL_PATH)
    if program is None:
        raise HostFault(f"{argv[0]}: not found in {_TOOL_PATH}")
    try:
        done = subprocess.run(
            guard_command(program, *argv[1:], rights=rights_of(uid) if uid is not None else ()),
            env=env,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout,
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise HostFault(f"{argv[0]}: timed out after {timeout:g} s") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-500:]
        raise HostFault(f"{' '.join(argv)}: exit {done.returncode}: {output}")
    return done.stdout.decode("utf-8", "replace")
