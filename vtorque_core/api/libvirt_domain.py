"""Domain elements: what a plugin adds to a guest's virtual hardware, as typed data.

Returned by ``vtorque_render_domain`` and by guest drivers; merged and rendered by the core. Names
follow libvirt's domain XML (https://libvirt.org/formatdomain.html).

List elements append; their ``name`` becomes the device alias ``ua-<plugin>-<name>`` and must be
unique. Single elements merge field by field: None is no opinion, equal is fine, different is a
conflict that names both distributions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from vtorque_core.api.values import Act


class Element:
    """Base of all elements. A third party subclasses :class:`ListElement` or :class:`Single`.

    ``section`` is where the fragment goes: ``devices``, ``metadata``, ``os``, ``features``,
    ``cpu``, ``clock``, ``cputune`` and ``qemu`` (``qemu:commandline``) are inside the element of
    that name, ``domain`` is directly below the root. ``template`` is the package-qualified Jinja2
    fragment (``"vtorque_acme:domain/x.xml.j2"``), autoescaped; empty: the element has no XML of its
    own, the core reads it where it writes other elements. It sees the element as ``e``, its
    alias as ``alias`` ("" for a :class:`Single`), its number among the list elements of its class
    as ``number`` (from 0), the guest's plan as ``guest``, and as ``spec`` what the core decided
    (``spec.accel``); undefined names are errors. ``forbids`` is what libvirt cannot do to a guest
    that has the element; whoever wants to do it asks :func:`forbidden`. Of one that a key
    alone brings it is that option's: ``forbids = FPGA.forbids``.
    """

    section: ClassVar[str] = "devices"
    template: ClassVar[str]
    forbids: ClassVar[frozenset[Act]] = frozenset()


def forbidden(act: Act, elements: Iterable[Element]) -> list[str]:
    """Return the classes of the elements because of which ``act`` is impossible, each once."""
    return list(dict.fromkeys(type(e).__name__ for e in elements if act in e.forbids))


class ListElement(Element):
    """An element of which a domain can have many. Subclasses have a field ``name``.

    ``name`` is of ``[A-Za-z0-9_-]``. ``unique`` are the fields that no two elements of the class
    may share in one domain, whoever brings them; None is never shared.
    """

    unique: ClassVar[tuple[str, ...]] = ()
    name: str


class Single(Element):
    """An element of which a domain has one; merged field by field."""


@dataclass(frozen=True)
class Disk(ListElement):
    """A virtio disk; ``serial`` (at most 20 characters) shows as ``/dev/disk/by-id/virtio-*``.

    ``format`` is what the file is declared to be: never probed. ``base`` is the image that a
    qcow2 overlay lies on, with its own format; it may be shared and is only read. libvirt changes
    the owner of none of these files: whoever creates them lets QEMU's user in. ``user_owned``:
    the file is the job's user's, so the core serves it to QEMU from a daemon that runs as them;
    raw only. ``boot``: its place in the boot order, from 1; None: not booted from.
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
            raise ValueError(f"disk {self.name}: only a qcow2 file has a base, not {self.format}")
        if self.user_owned and self.format != "raw":
            raise ValueError(
                f"disk {self.name}: a user's file must be raw: any other format can name "
                "further files for QEMU to open"
            )


@dataclass(frozen=True)
class Interface(ListElement):
    """A virtio NIC. ``source`` is a libvirt network, a bridge or (macvtap) a host device.

    ``user``: QEMU's own network, which has no source.

    ``filtered``: the core drops frames from the guest with another MAC, and with another source
    address (IPv4, ARP) if ``ip`` is set. IPv6 passes only with ``ipv6`` and without ``ip``. Linux
    cannot filter ``direct``: refused.
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
    """A host directory shared by virtiofs under ``tag``; the core runs its daemon.

    The daemon never runs as host root: as the job's user, guest root mapped to a subordinate id.
    ``source`` may be a path the user controls if ``user_owned`` (it must then belong to them).
    """

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/filesystem.xml.j2"
    forbids: ClassVar[frozenset[Act]] = frozenset({"save", "migrate"})  # the daemon's state
    unique: ClassVar[tuple[str, ...]] = ("tag",)
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

    template: ClassVar[str] = "vtorque_core.plan.domain:templates/channel.xml.j2"
    unique: ClassVar[tuple[str, ...]] = ("port", "path")
    name: str
    port: str
    path: str
    owner: Literal["root", "job"] = "root"


@dataclass(frozen=True)
class KernelBoot(Single):
    """Direct kernel boot. All three are root-owned files of the pool; None: disk boot."""

    section: ClassVar[str] = "os"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/kernel.xml.j2"
    kernel: str | None = None
    initrd: str | None = None
    cmdline: str | None = None


@dataclass(frozen=True)
class MemoryBacking(Single):
    """How the guest's RAM is backed. The core itself asks for memfd, shared, for virtiofs."""

    section: ClassVar[str] = "domain"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/memorybacking.xml.j2"
    source: Literal["memfd", "file", "anonymous"] | None = None
    shared: bool | None = None
    locked: bool | None = None
    hugepages_kib: int | None = None
    nosharepages: bool | None = None


@dataclass(frozen=True)
class Console(Single):
    """The serial console as a Unix socket ``path`` on the host, instead of a pseudoterminal.

    The guest then starts paused, until root has connected: not a byte of it is lost. For guests
    of an :class:`vtorque_core.api.guest_driver.LateDriver`, whose console is the job's output.
    """

    template: ClassVar[str] = ""
    path: str | None = None


@dataclass(frozen=True)
class CpuModel(Single):
    """A processor of libvirt's (``virsh cpu-models``) in place of the node's own.

    With KVM a guest starts only where the node has all of it.
    """

    template: ClassVar[str] = ""
    name: str | None = None


@dataclass(frozen=True)
class IoThreads(Single):
    """How many threads of its own QEMU has for disks; the core spreads the disks over them.

    They run on the guest's ``io`` cores if it has claimed any, else where its emulator runs.
    """

    section: ClassVar[str] = "domain"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/iothreads.xml.j2"
    count: int | None = None


@dataclass(frozen=True)
class NetQueues(Single):
    """How many queue pairs each network interface has (``<driver queues=>``); None: one."""

    template: ClassVar[str] = ""
    count: int | None = None


@dataclass(frozen=True)
class Clock(Single):
    """Timers that a guest type insists on; None leaves libvirt's default."""

    section: ClassVar[str] = "clock"
    template: ClassVar[str] = "vtorque_core.plan.domain:templates/clock.xml.j2"
    hpet: bool | None = None


@dataclass(frozen=True)
class QemuArgs(ListElement):
    """Raw QEMU arguments, for hardware that libvirt does not know. Refused unless the site allows.

    The site allows it with ``[node] allow_qemu_args = true``.
    """

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
