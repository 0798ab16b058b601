"""Guest context: what a plugin needs inside a guest, without knowing which OS it is.

Returned by ``vtorque_guest_context``; the guest type's driver applies it. A guest type names what
it supports (``GuestType.supports``); anything else refuses the job before anything is acquired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["boot", "ready"]


class ContextItem:
    """Base of all context items. Frozen dataclasses; the driver escapes every value."""


@dataclass(frozen=True)
class EnvVar(ContextItem):
    """An environment variable of the job and of login shells. ``name`` is a shell identifier.

    ``unless``: the script does not get it if its user has set one of these variables.
    """

    name: str
    value: str
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestFile(ContextItem):
    """A file written before any command runs. ``owner`` is root or the job's user."""

    path: str
    content: bytes
    mode: int = 0o644
    owner: Literal["root", "job"] = "root"


@dataclass(frozen=True)
class RootCommand(ContextItem):
    """A command run as root inside the guest before it counts as ready, without a shell.

    Stage ``"boot"`` is before the mounts, ``"ready"`` after them and after the site's prologue.
    """

    argv: tuple[str, ...]
    stage: Stage = "ready"


@dataclass(frozen=True)
class OnCancel(ContextItem):
    """A command run as the job's user when the job is cancelled, before its script gets SIGTERM.

    In the script's guest, with its environment, directory and outputs; of other guests it is
    ignored. All of a job's together have half of ``[node] grace``. Its exit code counts nothing.
    """

    argv: tuple[str, ...]


@dataclass(frozen=True)
class KernelModule(ContextItem):
    """A module that must be loadable (``modprobe name parameters``)."""

    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package(ContextItem):
    """A package of the guest's distribution family, installed at boot if it is missing."""

    name: str
    family: Literal["debian", "redhat"]


@dataclass(frozen=True)
class Mount(ContextItem):
    """A mount made in the guest.

    ``kind`` virtiofs: ``source`` is the tag of a ``Filesystem`` element; nfs: ``server:/export``;
    disk: ``source`` is the serial of a ``Disk`` element.
    """

    kind: Literal["virtiofs", "nfs", "disk"]
    source: str
    target: str
    readonly: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestDevice(ContextItem):
    """A stable link to the ``nth`` guest device of a kind, owned by the job's user if asked.

    ``match`` is a glob of device nodes below ``/dev``, e.g. ``"infiniband/uverbs*"``.
    """

    match: str
    link: str
    nth: int = 0
    owner: Literal["root", "job"] = "job"


@dataclass(frozen=True)
class PciMemory(ContextItem):
    """A stable link to a memory region of the ``nth`` PCI device of a kind, for mmap(2).

    ``device`` is vendor and device id, ``"1af4:1110"``; ``bar`` the region's number. ``link`` is
    below ``/dev``. Of the guest's users only the job's may open it.
    """

    device: str
    bar: int
    link: str
    nth: int = 0


@dataclass(frozen=True)
class LinePort(ContextItem):
    """A new file ``path`` of the job's user; what is appended to it leaves by a virtio-serial port.

    ``port`` is the name of a ``Channel`` element. At most one for a guest. A host that does not
    read keeps nobody waiting: the rest stays in the file. ``path`` is in a directory of root's.
    """

    path: str
    port: str
