"""Run a program that cannot use the kernel's keyrings: ``python _without_keys.py PROGRAM ...``.

Namespaces do not separate keyrings, and the user's session keyring can contain Kerberos tickets
(keyrings(7)). Imports only the standard library, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# AUDIT_ARCH_* of linux/audit.h, and the number of add_key. request_key and keyctl follow it
# (unistd.h of each architecture).
_CALLS = {
    "x86_64": (0xC000003E, 248), "aarch64": (0xC00000B7, 217), "ppc64le": (0xC0000015, 269),
    "s390x": (0x80000016, 278),
}  # fmt: skip
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD, _EQUAL, _GREATER, _AT_LEAST, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # linux/seccomp.h, with EPERM
_X32 = 0x40000000  # bit of the numbers of other system calls of x86_64


def deny_keyrings() -> None:
    """Make the system calls for keyrings fail, and kill the process at calls of other ABIs."""
    arch, first = _CALLS[os.uname().machine]
    # Code, steps to skip if true and if false, value. Offsets 4 and 0 of struct seccomp_data are
    # the architecture and the number of the call.
    steps = (
        (_LOAD, 0, 0, 4), (_EQUAL, 0, 5, arch), (_LOAD, 0, 0, 0), (_AT_LEAST, 3, 0, _X32),
        (_AT_LEAST, 0, 3, first), (_GREATER, 2, 0, first + 2),
        (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _KILL), (_RETURN, 0, 0, _ALLOW),
    )  # fmt: skip
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(steps), ctypes.addressof(buffer))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, program)):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "seccomp filter")


if __name__ == "__main__":
    deny_keyrings()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - as is
