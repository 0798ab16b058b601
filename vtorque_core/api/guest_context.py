"""Context items: settings, files and commands in a guest, independent of its operating system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["boot", "ready"]


class ContextItem:
    """Base of all context items: frozen dataclasses whose values the guest driver escapes."""


@dataclass(frozen=True)
class EnvVar(ContextItem):
    """An environment variable of the job and of login shells.

    The script does not get the variable if the job's owner has set a variable named in ``unless``.
    """

    name: str
    value: str
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestFile(ContextItem):
    """A file in the guest, written before any RootCommand runs."""

    path: str
    content: bytes
    mode: int = 0o644
    owner: Literal["root", "job"] = "root"


@dataclass(frozen=True)
class RootCommand(ContextItem):
    """A command that runs as root in the guest before the guest is ready, without a shell.

    Commands of stage ``"boot"`` run before the mounts, those of ``"ready"`` after the mounts and
    the site's prologue scripts.
    """

    argv: tuple[str, ...]
    stage: Stage = "ready"


@dataclass(frozen=True)
class CancelCommand(ContextItem):
    """A command that runs as the job's owner, before a canceled job's script gets SIGTERM.

    It runs in the script's guest, with the script's environment, directory and output. All
    CancelCommands together get half of ``[node] grace``.
    """

    argv: tuple[str, ...]


@dataclass(frozen=True)
class KernelModule(ContextItem):
    """A kernel module that the guest loads with ``modprobe name parameters``."""

    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package(ContextItem):
    """A package of the guest's distribution family, installed at boot if missing."""

    name: str
    family: Literal["debian", "redhat"]


@dataclass(frozen=True)
class Mount(ContextItem):
    """A mount in the guest.

    ``source`` is the tag of a ``Filesystem`` element, ``server:/export`` (nfs), or the serial of a
    ``Disk`` element.
    """

    kind: Literal["virtiofs", "nfs", "disk"]
    source: str
    target: str
    readonly: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestDevice(ContextItem):
    """A stable link to the ``nth`` device node below ``/dev`` that matches a glob.

    Example of ``match``: ``"infiniband/uverbs*"``.
    """

    match: str
    link: str
    nth: int = 0
    owner: Literal["root", "job"] = "job"


@dataclass(frozen=True)
class PciMemory(ContextItem):
    """A stable link below ``/dev`` to a memory region of a PCI device, for mmap(2).

    In the guest, only root and the job's owner may open it.

    Attributes:
        device: vendor and device id: ``"1af4:1110"``.
        bar: number of the region.
    """

    device: str
    bar: int
    link: str
    nth: int = 0


@dataclass(frozen=True)
class LinePort(ContextItem):
    """A new file in the guest. Appended lines are copied to the ``Channel`` with this ``port``.

    The job's owner owns the file, and root owns the directory. At most one per guest. Writers never
    block.
    """

    path: str
    port: str
