"""Test if KVM works on this node, by executing guest instructions.

With some nested hypervisors, KVM works but emulates every instruction and is slower than TCG. The
probe therefore times a loop in 64-bit mode with paging (Linux, Documentation/virt/kvm/api.rst).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import grp
import json
import mmap
import os
import pwd
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import boot_id
from vtorque_core.base.run_tool import run_tool

STAGE = "accel"
PROBE_TIMEOUT = 3.0
"""Timeout in seconds. A working KVM executes the program in 0.1 s."""
_KILL_TIMEOUT = 2.0
_DEVICE = "/dev/kvm"
_CACHE = "accel.json"

# linux/kvm.h, for x86_64: _IO('E', n) is 0xAE00 + n, the others carry size and direction.
_GET_API_VERSION = 0xAE00
_CREATE_VM = 0xAE01
_GET_VCPU_MMAP_SIZE = 0xAE04
_CREATE_VCPU = 0xAE41
_SET_USER_MEMORY_REGION = 0x4020AE46
_RUN = 0xAE80
_SET_REGS = 0x4090AE82
_GET_SREGS = 0x8138AE83
_SET_SREGS = 0x4138AE84
_API_VERSION = 12
_EXIT_HLT = 5
_EXIT_REASON = 8  # offset in struct kvm_run
_SREGS_SIZE = 312
_CONTROL_REGISTERS = 224  # offset in struct kvm_sregs

# The guest: memory from 0, page tables, a program that counts down, stores a mark and halts.
# 10^8 rounds take 0.03 to 0.1 s on a processor, 0.5 s with TCG, 70 s with an emulating KVM.
_MEMORY, _PML4, _PDPT, _PD, _CODE, _RESULT = 0x10000, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000
_MAGIC = 0x76740001
_PROGRAM = (
    b"\xb9\x00\xe1\xf5\x05"  # mov ecx, 100000000
    b"\xff\xc9"  # dec ecx
    b"\x75\xfc"  # jnz to the dec
    b"\xc7\x04\x25"
    + struct.pack("=II", _RESULT, _MAGIC)  # mov dword [_RESULT], _MAGIC
    + b"\xf4"  # hlt
)


@dataclass(frozen=True)
class Accel:
    type: Literal["kvm", "tcg"]
    warning: str | None = None


@dataclass(frozen=True)
class Probe:
    failure: str = ""
    note: str = ""


def choose(accel: str, run_dir: Path, user: str | None = None) -> Accel:
    """Return whether guests use KVM or TCG, for the setting ``[node] accel``.

    Return KVM only if ``user`` (None: the caller) can use KVM. Root caches the result in
    ``run_dir`` until reboot, and gives QEMU's group access to KVM.
    """
    if accel == "tcg":
        return Accel("tcg")
    if user and os.geteuid() == 0:
        _grant_group(_group_of(user))
    found = cached_probe(run_dir, user)
    if not found.failure:
        return Accel("kvm", found.note or None)
    if accel == "kvm":
        raise HostFault(
            f"KVM does not work on this node ({found.failure}), and [node] accel = "
            '"kvm" requires it. Fix KVM, or set accel = "auto" to emulate guests',
            stage=STAGE,
        )
    return Accel("tcg", f"KVM fails ({found.failure}): guests are emulated, many times slower")


def cached_probe(run_dir: Path, user: str | None = None) -> Probe:
    path = run_dir / _CACHE
    # Without user: the caller's access, which changes when they join the device's group.
    who = _group_of(user) if user else os.access(_DEVICE, os.R_OK | os.W_OK)
    key = {"boot": boot_id(), "user": user, "group": who}
    known = _read(path, key)
    if known is not None:
        return known
    found = probe(user)
    noted = {**key, "failure": found.failure, "note": found.note}
    with contextlib.suppress(OSError, HostFault):  # not root, or no directory: probe again later
        safefs.replace(str(path), json.dumps(noted).encode(), mode=0o644)  # a dry run reads it, too
    return found


def probe(user: str | None = None, timeout: float = PROBE_TIMEOUT) -> Probe:
    command = [sys.executable, "-I", "-m", __name__, user if user and os.geteuid() == 0 else ""]
    # No "with": leaving it would wait for ever for a child that cannot be killed.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=_KILL_TIMEOUT)
        return Probe(
            f"{_DEVICE} opens, but the probe guest, which needs 0.1 s, did not finish "
            f"within {timeout:g} s"
        )
    try:
        answer = json.loads(out)
        return Probe(str(answer["failure"]), str(answer["note"]))
    except (ValueError, KeyError, TypeError):
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
        return Probe(f"the probe exited with status {child.returncode}: {last[0][:200]}")


def _group_of(user: str) -> int:
    try:
        return grp.getgrnam(user).gr_gid
    except KeyError:
        raise HostFault(
            f"QEMU's group {user!r} does not exist: create it, or set [node] qemu_user"
        ) from None


def _grant_group(gid: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        device = Path(_DEVICE).stat()
        if device.st_gid == gid or device.st_mode & stat.S_IWOTH:
            return
        with contextlib.suppress(OSError):  # no ACL, or ACLs are not supported
            entry = struct.pack("<HHI", 0x08, 6, gid)  # ACL_GROUP, rw (linux/posix_acl_xattr.h)
            if entry in os.getxattr(_DEVICE, safefs.ACL):
                return
        run_tool("setfacl", "-m", f"g:{gid}:rw", _DEVICE)


# -- the cached result ------------------------------------------------------------------------


def _read(path: Path, key: dict[str, Any]) -> Probe | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            return None
        try:
            noted = json.loads(file.read(65536))
            if any(noted[name] != value for name, value in key.items()):
                return None
            return Probe(str(noted["failure"]), str(noted["note"]))
        except (ValueError, KeyError, TypeError):
            return None


# -- in the child -----------------------------------------------------------------------------


def main(user: str) -> None:
    note = ""
    try:
        if user:
            uid = pwd.getpwnam(user).pw_uid
            os.setgroups(())  # a guest's QEMU has no other groups
            os.setgid(_group_of(user))
            os.setuid(uid)
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        machine = os.uname().machine
        if machine == "x86_64":
            failure = _execute(device)
        else:
            # Each architecture has other registers, so only test whether a VM can be created.
            os.close(fcntl.ioctl(device, _CREATE_VM, 0))
            failure, note = "", f"KVM cannot be probed on {machine}, and is assumed to work"
    except OSError as error:
        failure = f"{_DEVICE}: {error.strerror}{f' for user {user}' if user else ''}"
    print(json.dumps({"failure": failure, "note": note}))  # noqa: T201 - the parent reads it


def _execute(device: int) -> str:
    version = fcntl.ioctl(device, _GET_API_VERSION)
    if version != _API_VERSION:
        return f"KVM API version {version}, expected {_API_VERSION}"
    vm = fcntl.ioctl(device, _CREATE_VM, 0)
    memory = _guest_memory()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # struct kvm_userspace_memory_region: slot, flags, guest address, size, host address
    region = struct.pack("=IIQQQ", 0, 0, 0, _MEMORY, address)
    fcntl.ioctl(vm, _SET_USER_MEMORY_REGION, region)
    vcpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
    size = fcntl.ioctl(device, _GET_VCPU_MMAP_SIZE)
    run = mmap.mmap(vcpu, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    sregs = bytearray(_SREGS_SIZE)
    fcntl.ioctl(vcpu, _GET_SREGS, sregs)
    _long_mode(sregs)
    fcntl.ioctl(vcpu, _SET_SREGS, bytes(sregs))
    # struct kvm_regs: 16 general registers, rip, rflags (bit 1 is always set)
    fcntl.ioctl(vcpu, _SET_REGS, struct.pack("=18Q", *([0] * 16), _CODE, 2))
    fcntl.ioctl(vcpu, _RUN, 0)
    (reason,) = struct.unpack_from("=I", run, _EXIT_REASON)
    (result,) = struct.unpack_from("=I", memory, _RESULT)
    if reason != _EXIT_HLT or result != _MAGIC:
        return f"KVM ended with exit reason {reason} and result {result:#x}"
    return ""


def _guest_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, _MEMORY)
    memory[_CODE : _CODE + len(_PROGRAM)] = _PROGRAM
    present_writable, large = 0x3, 0x80  # Intel SDM vol. 3, 4.5: page-table entries
    for table, entry in (
        (_PML4, _PDPT | present_writable),
        (_PDPT, _PD | present_writable),
        (_PD, present_writable | large),
    ):
        struct.pack_into("=Q", memory, table, entry)
    return memory


def _long_mode(sregs: bytearray) -> None:
    # struct kvm_segment: base, limit, selector, type, present, dpl, db, s, l, g, avl, unusable
    code = struct.pack("=QIH10B", 0, 0xFFFFFFFF, 8, 11, 1, 0, 0, 1, 1, 1, 0, 0, 0)
    data = struct.pack("=QIH10B", 0, 0xFFFFFFFF, 16, 3, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    segments = code + data * 5
    sregs[: len(segments)] = segments
    cr0, cr4, efer = 0x80000031, 0x20, 0x500  # PG NE ET PE; PAE; LMA LME
    # cr0, cr2, cr3, cr4, cr8, efer
    struct.pack_into("=6Q", sregs, _CONTROL_REGISTERS, cr0, 0, _PML4, cr4, 0, efer)


if __name__ == "__main__":
    main(sys.argv[1])
