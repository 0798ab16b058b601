"""The core's own ``-vm`` keys. Plugins read them with ``guest[RAM]``.

The functions that parse a value raise ValueError.
"""

from __future__ import annotations

import re

from vtorque_core.api import log_levels
from vtorque_core.api.values import FileData, Option, constant_hook
from vtorque_core.base.sizes import boolean, count, show_mib, size_mib

FS_TYPES = ("sharedfs", "ramdisk")
ARCHES = ("aarch64", "ppc64le", "riscv64", "s390x", "x86_64")
MAX_VCPUS = 1024  # more than any machine type of QEMU 7.2 takes with KVM on x86 (q35: 288 to 1024)
MAX_VMS_PER_NODE = 64  # the default of [network] per_node

JOB = 0
"""The word ``job`` as a value of RAM and VCPUS. Hooks get the granted number instead."""
UNLIMITED = {"vcpus": 1, "ram": 1024}
"""The number for ``job`` if neither batch system nor site define one; RAM in MiB."""

_ARCH_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}  # Debian's names
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", re.ASCII)
_MAX_PATH = 1024


def image_name(value: str) -> str:
    """Parse ``img``: the name of an image in the pool, or the location of the user's own image."""
    if not is_own_image(value):
        return plain_name(value)
    if not value.isprintable() or len(value.encode("utf-8", "replace")) > _MAX_PATH:
        raise ValueError(f"has a control character or more than {_MAX_PATH} bytes")
    return value


def is_own_image(value: str) -> bool:
    """Return True if a value of ``img`` names the user's own image, not an image of the pool."""
    return "/" in value or ":" in value


def plain_name(value: str) -> str:
    """Return ``value`` unchanged if it consists of 1 to 100 letters, digits and ``. _ + -``."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            "is not a name: use 1 to 100 letters, digits, dots, dashes, plus signs or underscores"
        )
    return value


def distro_name(value: str) -> str:
    """Return the name of a Linux distribution or family in lower case."""
    return plain_name(value).lower()


def arch_name(value: str) -> str:
    """Return the architecture as in ``uname -m``."""
    name = _ARCH_ALIASES.get(value.strip().lower(), value.strip().lower())
    if name not in ARCHES:
        raise ValueError(f"is not an architecture: write one of {', '.join(ARCHES)}")
    return name


def vcpu_count(value: str) -> int:
    """Parse ``vcpus``. Return a number up to MAX_VCPUS, or JOB for ``job``."""
    return JOB if _is_job(value) else _between(value, MAX_VCPUS)


def ram_mib(value: str) -> int:
    """Parse ``ram``. Return MiB, or JOB for ``job``."""
    return JOB if _is_job(value) else size_mib(value)


def guest_count(value: str) -> int:
    """Parse ``vms_per_node``. Return a number up to MAX_VMS_PER_NODE."""
    return _between(value, MAX_VMS_PER_NODE)


def fs_type(value: str) -> str:
    """Parse ``fs_type``. Return ``sharedfs`` or ``ramdisk``."""
    name = value.strip().lower()
    if name not in FS_TYPES:
        raise ValueError(f"is not a file system type: write one of {', '.join(FS_TYPES)}")
    return name


def disk_path(value: str) -> str:
    """Parse ``disk``: an absolute path without ``..``, which only the job's owner opens."""
    if not value.startswith("/"):
        raise ValueError("is not an absolute path: start it with /")
    if not value.isprintable() or len(value.encode("utf-8", "replace")) > _MAX_PATH:
        raise ValueError(f"has a control character or more than {_MAX_PATH} bytes")
    parts = value.split("/")
    if ".." in parts:
        raise ValueError("contains '..': write the path without it")
    if parts[-1] in ("", "."):
        raise ValueError("is a directory: write the path of a disk file")
    return value


def show_count(value: int) -> str:
    """Return a number of vCPUs as text, or ``job`` for JOB."""
    return "job" if value == JOB else str(value)


def show_ram(value: int) -> str:
    """Return MiB as text, such as ``2G``, or ``job`` for JOB."""
    return "job" if value == JOB else show_mib(value)


def show_boolean(value: bool) -> str:
    """Return ``true`` or ``false``."""
    return "true" if value else "false"


def no_parse(value: str) -> FileData | None:
    """Raise ValueError, because a key with ``is_file`` never gets its value from text."""
    raise ValueError("names a file that was not submitted with the job: submit the job with vsub")


def show_file(value: FileData | None) -> str:
    """Return the file's base name, or an empty string."""
    return value.name if value else ""


def _is_job(value: str) -> bool:
    return value.strip().lower() == "job"


def _between(value: str, most: int) -> int:
    number = count(value)
    if not 1 <= number <= most:
        raise ValueError(f"is not between 1 and {most}")
    return number


IMG = Option("img", image_name, "", "image of the guest (vmgr images list)", "NAME")
RAM = Option(
    "ram", ram_mib, JOB, "memory per guest; job: its share of the job's memory", "SIZE", show_ram
)
DISTRO = Option("distro", distro_name, "", "Linux distribution or family of the image", "NAME")
ARCH = Option("arch", arch_name, "", "architecture of the image", "NAME")
VCPUS = Option(
    "vcpus", vcpu_count, JOB, "virtual CPUs per guest; job: its share of the job's CPUs",
    "N", show_count,
)  # fmt: skip
VMS_PER_NODE = Option("vms_per_node", guest_count, 1, "guests on each node of the job", "N")
FS_TYPE = Option(
    "fs_type", fs_type, "sharedfs", "guest's disk: sharedfs (on the node's disk) or ramdisk",
    "TYPE",
    needs_root=lambda kind: kind == "ramdisk",
)  # fmt: skip
DISK = Option("disk", disk_path, "", "your disk, raw or .qcow2: /data in the first guest", "PATH")
VM_PROLOGUE: Option[FileData | None] = Option(
    "vm_prologue", no_parse, None, "script run in the first guest as you, before the job",
    "FILE", show_file, is_file=True,
)  # fmt: skip
VM_EPILOGUE: Option[FileData | None] = Option(
    "vm_epilogue", no_parse, None, "script run in the first guest as you, after the job",
    "FILE", show_file, is_file=True,
)  # fmt: skip
KEEP = Option(
    "keep", boolean, False, "keep the guests after the script, until walltime", "BOOL", show_boolean
)
LOG = Option(
    "log", log_levels.parse, log_levels.NOTHING,
    "log more of the job: a level, or PHASE|PLUGIN:LEVEL[+...]", "LEVEL",
)  # fmt: skip
SHOW_LOG = Option(
    "show_log", boolean, False, "show the job's log while it runs", "BOOL", show_boolean
)

vtorque_options = constant_hook(  # in the order of vsub -h
    IMG, RAM, DISTRO, ARCH, VCPUS, VMS_PER_NODE, FS_TYPE, DISK, VM_PROLOGUE, VM_EPILOGUE,
    KEEP, LOG, SHOW_LOG,
)  # fmt: skip
