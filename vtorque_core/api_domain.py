"""Domain elements: what a plugin adds to a guest's virtual hardware, as typed data.

Returned by ``vtorque_render_domain`` and by guest drivers; merged and rendered by the core. Names
follow libvirt's domain XML (https://libvirt.org/formatdomain.html).

List elements append; their ``name`` becomes the device alias ``ua-<plugin>-<name>`` and must be
unique. Single elements merge field by field: None is no opinion, equal is fine, different is a
conflict that names both distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


class Element:
    """Base of all elements. A third party subclasses :class:`ListElement` or :class:`Single`.

    ``section`` is where the fragment goes (``devices``, ``domain``, ``features``, ``cpu``, ...);
    ``template`` is the package-qualified Jinja2 fragment (``"vtorque_acme:domain/x.xml.j2"``),
    autoescaped, which sees the element as ``e`` and its alias as ``alias``.
    """

    section: ClassVar[str] = "devices"
    template: ClassVar[str]


class ListElement(Element):
    """An element of which a domain can have many. Subclasses have a field ``name``."""

    name: str


class Single(Element):
    """An element of which a domain has one; merged field by field."""


@dataclass(frozen=True)
class Disk(ListElement):
    """A virtio disk. ``bus`` is always virtio; ``serial`` shows as /dev/disk/by-id/virtio-*.

    ``format`` is what the file is declared to be: never probed. ``shareable_base`` files are
    never relabelled. ``boot``: its place in the boot order, from 1; None: not booted from.
    """

    template: ClassVar[str] = "vtorque_core:templates/disk.xml.j2"
    name: str
    path: str
    format: Literal["raw", "qcow2"]
    readonly: bool = False
    serial: str | None = None
    cache: Literal["none", "writeback", "unsafe"] = "writeback"
    boot: int | None = None


@dataclass(frozen=True)
class Interface(ListElement):
    """A virtio NIC. ``source`` is a libvirt network, a bridge or (macvtap) a host device.

    ``ip``: when set, the core's filter drops frames with another MAC or source address.
    """

    template: ClassVar[str] = "vtorque_core:templates/interface.xml.j2"
    name: str
    kind: Literal["network", "bridge", "direct"]
    source: str
    mac: str
    ip: str | None = None
    filtered: bool = True


@dataclass(frozen=True)
class Filesystem(ListElement):
    """A host directory shared by virtiofs under ``tag``; the core runs its daemon.

    The daemon never runs as host root: as the job's user, guest root mapped to a subordinate id.
    ``source`` may be a path the user controls if ``user_owned`` (it must then belong to them).
    """

    template: ClassVar[str] = "vtorque_core:templates/filesystem.xml.j2"
    name: str
    source: str
    tag: str
    readonly: bool = False
    user_owned: bool = False


@dataclass(frozen=True)
class Channel(ListElement):
    """A virtio-serial port named ``port``, on the host a unix socket ``path``.

    ``owner`` says who may connect on the host: root only, or the job's user.
    """

    template: ClassVar[str] = "vtorque_core:templates/channel.xml.j2"
    name: str
    port: str
    path: str
    owner: Literal["root", "job"] = "root"


@dataclass(frozen=True)
class KernelBoot(Single):
    """Direct kernel boot. All three are root-owned files of the pool; None: disk boot."""

    section: ClassVar[str] = "os"
    template: ClassVar[str] = "vtorque_core:templates/kernel.xml.j2"
    kernel: str | None = None
    initrd: str | None = None
    cmdline: str | None = None


@dataclass(frozen=True)
class MemoryBacking(Single):
    """How the guest's RAM is backed. virtiofs needs memfd and shared."""

    section: ClassVar[str] = "domain"
    template: ClassVar[str] = "vtorque_core:templates/memorybacking.xml.j2"
    source: Literal["memfd", "file", "anonymous"] | None = None
    shared: bool | None = None
    locked: bool | None = None
    hugepages_kib: int | None = None
    nosharepages: bool | None = None


@dataclass(frozen=True)
class Clock(Single):
    """Timers that a guest type insists on; None leaves libvirt's default."""

    section: ClassVar[str] = "clock"
    template: ClassVar[str] = "vtorque_core:templates/clock.xml.j2"
    hpet: bool | None = None


@dataclass(frozen=True)
class MetadataEntry(ListElement):
    """One ``<vtorque:entry name=...>`` in the domain's metadata."""

    section: ClassVar[str] = "metadata"
    template: ClassVar[str] = "vtorque_core:templates/metadata.xml.j2"
    name: str
    value: str


@dataclass(frozen=True)
class QemuArgs(ListElement):
    """Raw QEMU arguments, for hardware that libvirt does not know. Refused unless the site allows.

    The site allows it with ``[node] allow_qemu_args = true``.
    """

    section: ClassVar[str] = "qemu"
    template: ClassVar[str] = "vtorque_core:templates/qemuargs.xml.j2"
    name: str
    args: tuple[str, ...] = field(default_factory=tuple)
