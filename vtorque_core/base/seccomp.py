"""Filters of system calls, by libseccomp (seccomp_rule_add(3)). Any privileges."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Sequence

# seccomp.h of libseccomp: actions, the answer to other architectures' calls, a masked comparison
_SCMP_ALLOW, _SCMP_ERRNO, _SCMP_KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_SCMP_FLTATR_ACT_BADARCH, _SCMP_CMP_MASKED_EQ = 2, 7


def deny_calls_command(*calls: str) -> tuple[str, ...]:
    """Return a command prefix that runs a program for which these system calls fail."""
    return sys.executable, "-I", "-S", __file__, ",".join(calls)


def answer_calls(answers: Iterable[tuple[str | int, int, Sequence[tuple[int, ...]]]]) -> None:
    """Install a seccomp filter that answers system calls with an errno (0: success).

    Each of ``answers`` has a call, its errno, and conditions: (argument, mask, value). Executed
    programs inherit the filter. Calls of other architectures kill the process.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    made = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_SCMP_ALLOW)))
    kill = ctypes.c_uint32(_SCMP_KILL_PROCESS)
    failed = library.seccomp_attr_set(made, _SCMP_FLTATR_ACT_BADARCH, kill)
    for call, answer, wanted in answers:
        number = call if isinstance(call, int) else _number(library, call)
        # struct scmp_arg_cmp
        array = b"".join(struct.pack("@IiQQ", n, _SCMP_CMP_MASKED_EQ, *rest) for n, *rest in wanted)
        arguments = (made, ctypes.c_uint32(_SCMP_ERRNO | answer), number, len(wanted), array)
        failed = failed or library.seccomp_rule_add_array(*arguments)
    failed = failed or library.seccomp_load(made)
    if failed:
        raise OSError(-failed, f"seccomp filter: {os.strerror(-failed)}")


def _number(library: ctypes.CDLL, call: str) -> int:
    number = int(library.seccomp_syscall_resolve_name(call.encode()))
    if number == -1:
        raise OSError(errno.ENOSYS, f"seccomp filter: libseccomp does not know {call}")
    return number


if __name__ == "__main__":
    answer_calls((call, errno.EPERM, ()) for call in sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - as is
