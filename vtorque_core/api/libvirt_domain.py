"""Domain elements: virtual hardware that a plugin adds to a guest, as typed data.

Names are as in libvirt's domain XML (https://libvirt.org/formatdomain.html).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from vtorque_core.api.values import Act


class Element:
    """Base of all elements. Subclass :class:`ListElement` or :class:`Single`.

    Attributes:
        section: place in the domain's XML (doc/plugins.md).
        template: Jinja2 fragment with its package: ``"vtorque_acme:domain/x.xml.j2"``.
        forbids: operations that libvirt cannot do with a guest that has the element.
    """

    section: ClassVar[str] = "devices"
    template: ClassVar[str]
    forbids: ClassVar[frozenset[Act]] = frozenset()


def find_forbidding(act: Act, elements: Iterable[Element]) -> list[str]:
    """Return the class names of the elements that forbid ``act``."""
    return list(dict.fromkeys(type(e).__name__ for e in elements if act in e.forbids))


class ListElement(Element):
    """An element of which a domain can have many. Its libvirt alias is ``ua-<plugin>-<name>``.

    Attributes:
        name: consists of ``[A-Za-z0-9_-]``.
        unique: fields in which all elements of the class must differ, unless the value is None.
    """

    unique: ClassVar[tuple[str, ...]] = ()
    name: str


class Single(Element):
    """An element that a domain has once. The core merges the fields that plugins set (not None)."""


@dataclass(frozen=True)
class Disk(ListElement):
    """A virtio disk. Root creates the file, and gives QEMU's user access, unless ``user_owned``.

    Attributes:
        format: the file's format, which QEMU does not probe.
        serial: at most 20 characters; visible as ``/dev/disk/by-id/virtio-*``.
        boot: position in the boot order, from 1; None: not bootable.
        base: backing file of a qcow2 overlay, possibly shared.
        user_owned: the owner's file (raw only), which a daemon with the owner's uid serves to QEMU.
    """

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/disk.xml.j2"
    unique: ClassVar[tuple[str, ...]] = ("path", "serial", "boot")
    name: str
    path: str
    format: Literal["raw", "qcow2"]
    readonly: bool = False
    serial: str | None = None
    cache: Literal["none", "writeback", "unsafe"] = "writeback"
    boot: int | None = None
    base: str | None = None
    base_format: Literal["raw", "qcow2"] = "qcow2"
    user_owned: bool = False

    def __post_init__(self) -> None:
        if self.base is not None and self.format != "qcow2":
            raise ValueError(f"disk {self.name}: a {self.format} file cannot have a backing file")
        if self.user_owned and self.format != "raw":
            raise ValueError(
                f"disk {self.name}: a user's file must be raw, because a file in another "
                "format can make QEMU open further files"
            )


@dataclass(frozen=True)
class Interface(ListElement):
    """A virtio NIC.

    Attributes:
        kind: ``user`` is QEMU's user network, without a source.
        source: libvirt network, bridge, or host device (macvtap).
        filtered: drop frames with a forged source MAC and, if ``ip`` is set, with a forged IPv4 or
            ARP source address. Must be False if ``kind`` is ``direct``.
        ipv6: the filter passes IPv6, too; ignored if ``ip`` is set.
    """

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/interface.xml.j2"
    unique: ClassVar[tuple[str, ...]] = ("mac", "ip")
    name: str
    kind: Literal["network", "bridge", "direct", "user"]
    source: str
    mac: str
    ip: str | None = None
    filtered: bool = True
    ipv6: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mac", self.mac.lower())  # so that equal MACs compare equal


@dataclass(frozen=True)
class Filesystem(ListElement):
    """A host directory shared by virtiofs as ``tag``. The core runs virtiofsd as the job's owner.

    Attributes:
        user_owned: the job's owner must own the source.
        guest_root: host ids with which guest root accesses the source. ``"other"``: ids other than
            the job owner's. ``"user"``: the owner's; the owner's account in the guest has no
            access. ``"both"``: like ``"user"``, but the owner's account also has access if
            virtiofsd supports ``--translate-uid``.
    """

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/filesystem.xml.j2"
    forbids: ClassVar[frozenset[Act]] = frozenset({"save", "migrate"})  # the daemon's state
    unique: ClassVar[tuple[str, ...]] = ("tag",)
    name: str
    source: str
    tag: str
    readonly: bool = False
    user_owned: bool = False
    guest_root: Literal["other", "user", "both"] = "other"


@dataclass(frozen=True)
class Channel(ListElement):
    """A virtio-serial port, connected to the Unix socket ``path`` on the host.

    If ``owner`` is ``"root"``, only root may connect; if ``"job"``, root and the job's owner.
    """

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/channel.xml.j2"
    unique: ClassVar[tuple[str, ...]] = ("port", "path")
    name: str
    port: str
    path: str
    owner: Literal["root", "job"] = "root"


@dataclass(frozen=True)
class KernelBoot(Single):
    """Direct kernel boot from root-owned files; without ``kernel``, boot from disk."""

    section: ClassVar[str] = "os"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/kernel.xml.j2"
    kernel: str | None = None
    initrd: str | None = None
    cmdline: str | None = None


@dataclass(frozen=True)
class MemoryBacking(Single):
    """How the guest's RAM is backed. For virtiofs the core requests shared memfd memory."""

    section: ClassVar[str] = "domain"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/memorybacking.xml.j2"
    source: Literal["memfd", "file", "anonymous"] | None = None
    shared: bool | None = None
    locked: bool | None = None
    hugepages_kib: int | None = None
    nosharepages: bool | None = None


@dataclass(frozen=True)
class Console(Single):
    """Serial console on a Unix socket, for guests that boot with the script (``LateDriver``)."""

    template: ClassVar[str] = ""
    path: str | None = None


@dataclass(frozen=True)
class CpuModel(Single):
    """A CPU model of libvirt (``virsh cpu-models``) instead of the node's CPU model."""

    template: ClassVar[str] = ""
    name: str | None = None


@dataclass(frozen=True)
class IoThreads(Single):
    """Number of QEMU I/O threads, over which the core distributes the disks."""

    section: ClassVar[str] = "domain"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/iothreads.xml.j2"
    count: int | None = None


@dataclass(frozen=True)
class NetQueues(Single):
    """Number of queue pairs of each NIC; one if ``count`` is None."""

    template: ClassVar[str] = ""
    count: int | None = None


@dataclass(frozen=True)
class Clock(Single):
    """Timers that a guest type requires; None means libvirt's default."""

    section: ClassVar[str] = "clock"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/clock.xml.j2"
    hpet: bool | None = None


@dataclass(frozen=True)
class QemuArgs(ListElement):
    """Raw QEMU arguments, refused unless the site sets ``[node] allow_qemu_args = true``."""

    section: ClassVar[str] = "qemu"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/qemuargs.xml.j2"
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetadataEntry(ListElement):
    """One ``<vtorque:entry name=...>`` in the domain's metadata."""

    section: ClassVar[str] = "metadata"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/metadata.xml.j2"
    unique: ClassVar[tuple[str, ...]] = ("name",)
    name: str
    value: str
