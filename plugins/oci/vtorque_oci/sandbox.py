"""Run programs that parse an untrusted container without access to the caller's files."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable

from vtorque_core.api import HostFault, guard_command, isolate_command, run_tool
from vtorque_core.api.confined_tool import deny_calls_command

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {"PATH": _PATH, "LC_ALL": "C", "MALLOC_ARENA_MAX": "2"}
"""The environment of the programs."""
# The new root directory has /usr, for programs and libraries, and a /proc with the sandbox's own
# processes. The program has no capabilities, and cannot create a namespace to get some.
_ENTER = """set -e
mount -t tmpfs -o mode=755,size=64k none /mnt
cd /mnt
mkdir old proc usr
for link in bin sbin lib lib32 lib64; do
    [ ! -L "/$link" ] || ln -s "usr/$link" "$link"
done
mount --rbind /usr usr
mount -t proc proc proc
echo 0 >proc/sys/user/max_user_namespaces
pivot_root . old
cd /
umount -l old
exec setpriv --bounding-set=-all -- "$@"
"""
USER_SANDBOX = (
    *("unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid"),
    *("--fork", "--kill-child", "--", "sh", "-c", _ENTER, "sh"),
)
"""Command prefix of the sandbox of a user without root, see user_namespaces(7)."""

# Namespaces do not separate keyrings, and the user's session keyring can contain Kerberos tickets
# (keyrings(7)).
_WITHOUT_KEYS = deny_calls_command("add_key", "request_key", "keyctl")


def sandbox_command(*argv: str, limits: Iterable[str], package: str) -> list[str]:
    """Return a command that runs a program in a sandbox, with the environment :data:`ENV`.

    The program can use its open files and ``/usr``. If the caller is root, the program runs as
    nobody instead. It can use no keyring. The kernel kills it when the calling thread ends.

    Args:
        argv: name and arguments of the program.
        limits: options of prlimit(1).
        package: Debian package of the program.

    Raises HostFault if the program is missing, or if the host does not permit user namespaces.
    """
    if shutil.which(argv[0], path=_PATH) is None:
        raise HostFault(
            f"{argv[0]} is not installed on this host: ask the administrator to install the "
            f"package {package}"
        )
    prefix = isolate_command() or _user_sandbox()
    return guard_command(*_WITHOUT_KEYS, *prefix, "prlimit", *limits, "--core=0", "--", *argv)


@functools.cache
def _user_sandbox() -> tuple[str, ...]:
    try:
        run_tool(*USER_SANDBOX, "true")
    except HostFault as error:
        reason = str(error).rpartition("exit ")[2]
        raise HostFault(
            "programs that unpack an image run in a user namespace, which this host does not "
            f"permit (exit {reason}). vtorque doctor shows how to permit it"
        ) from None
    return USER_SANDBOX
