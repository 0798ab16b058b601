"""Render a guest's merged domain as libvirt XML (https://libvirt.org/formatdomain.html).

Templates escape all values, and characters that XML 1.0 cannot represent are refused.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from markupsafe import Markup

from vtorque_core.api.claims import Placement
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import (
    Console,
    CpuModel,
    Disk,
    Element,
    Filesystem,
    Interface,
    IoThreads,
    KernelBoot,
    MemoryBacking,
    NetQueues,
    QemuArgs,
)
from vtorque_core.base.errors import ConfigError, HostFault, Refused, printable
from vtorque_core.base.trust import require_root_owned
from vtorque_core.images.sidecar import boots_by_uefi
from vtorque_core.plan.domain.merge import Merged, MergedDomain

if TYPE_CHECKING:
    import jinja2

STAGE = "render domain"
_CORE = "vtorque_core.plan.domain"
NAMESPACE = "https://vtorque.org/xmlns/domain/1"
_QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
_SECTIONS = {  # with the indentation of their content
    "domain": 2, "metadata": 6, "os": 4, "features": 4, "cpu": 4, "clock": 4, "cputune": 4,
    "devices": 4, "qemu": 4,
}  # fmt: skip
_MACHINES = {"x86_64": "q35", "aarch64": "virt"}
# Devices get slots on q35's root bus. libvirt would give each one its own root port for
# hotplugging: with 7 of them, an emulated guest boots 0.14 s longer. Slots 0x02 and 0x03 are in
# domain.xml.j2, 0x1f is the chipset's. Further devices get root ports.
_SLOTS = range(0x04, 0x1F)
# Characters that XML 1.0 (section 2.2) forbids, even escaped. The complement of the allowed set
# would take 8 ms to compile.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
# Markup, and white space that a parser would normalize (XML 1.0, 2.11 and 3.3.3).
_ESCAPES = {
    "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;",
    "\t": "&#9;", "\n": "&#10;", "\r": "&#13;",
}  # fmt: skip
_ESCAPED = re.compile("[&<>\"'\t\n\r]")


@dataclass(frozen=True)
class DomainSpec:
    """The core's decisions about a guest's domain.

    Attributes:
        qemu_user: user and group of the QEMU process; a nonzero ``guest.qemu_uid`` replaces the
            user. Empty: libvirt's defaults.
        uefi: firmware of x86 guests whose image requires UEFI.
        ports: free device slots of a warm guest.
        templates: directory of site templates. ``disk.xml.j2`` in it replaces the core's template,
            and ``vtorque_acme/x.xml.j2`` replaces ``x.xml.j2`` of the package vtorque_acme.
    """

    guest: GuestPlan
    accel: Literal["kvm", "tcg"]
    qemu_user: str = "libvirt-qemu"
    uefi: str = ""
    allow_qemu_args: bool = False
    ports: int = 0
    templates: Path | None = None


def console_socket(guest: GuestPlan, merged: MergedDomain) -> str:
    asked = merged.single(Console)
    return asked.path if asked and asked.path else str(guest.run_dir / "console.sock")


def render(
    spec: DomainSpec,
    merged: MergedDomain,
    *,
    sockets: Mapping[str, str] | None = None,
    taps: Mapping[str, str] | None = None,
) -> str:
    """Return the domain XML of one guest.

    ``sockets`` has the Unix sockets of Filesystems and ``user_owned`` Disks by alias, ``taps`` the
    tap devices of filtered Interfaces.
    """
    environment = _environment(spec.templates)
    sections: dict[str, list[str]] = {name: [] for name in _SECTIONS}
    slots = iter(_SLOTS if spec.guest.image.arch == "x86_64" else ())
    for item in merged.items:
        if item.element.section not in sections:
            raise Refused(
                f"plugin {item.plugins[0]}: {type(item.element).__name__} goes to the unknown "
                f"section {item.element.section!r}; known are {', '.join(_SECTIONS)}"
            )
        fragment = _fragment(environment, item, spec, sockets or {}, taps or {}, slots, merged)
        if fragment:
            sections[item.element.section].append(fragment)
    values = {**_core_values(spec, merged), "sections": _join_sections(sections)}
    text = _render_template(environment, f"{_CORE}:templates/domain.xml.j2", "the core", values)
    xml = "\n".join(line for line in text.splitlines() if line.strip()) + "\n"
    _parse(xml, "domain.xml.j2")
    return xml


def is_pluggable(element: Element) -> bool:
    disk = isinstance(element, Disk) and element.name != "root"
    return disk or isinstance(element, Filesystem | Interface)


def drop_pluggable(merged: MergedDomain) -> MergedDomain:
    """Return the domain without pluggable devices, and with memory that virtiofs can share."""
    kept = [item for item in merged.items if not is_pluggable(item.element)]
    asked = merged.single(MemoryBacking) or MemoryBacking()
    if asked.source in (None, "memfd") and asked.shared is not False:
        kept = [item for item in kept if not isinstance(item.element, MemoryBacking)]
        shared = replace(asked, source="memfd", shared=True)
        kept.append(Merged(shared, "", 0, ("core",)))
    return MergedDomain(tuple(kept))


def render_base(spec: DomainSpec, merged: MergedDomain) -> str:
    """Return the domain XML without pluggable devices and without anything specific to a job.

    A warm guest fits a job with the same base XML.
    """
    guest = spec.guest
    at = replace(guest.placement, cores={}, share=())
    plain = replace(guest, name="-", uuid="-", qemu_uid=1, placement=at)
    xml = render(replace(spec, guest=plain, ports=0), drop_pluggable(merged))
    for place, name in ((guest.run_dir, "RUN"), (guest.state_dir, "STATE")):
        xml = xml.replace(f"{place}/", f"{name}/")
    return re.sub("<metadata>.*</metadata>", "", xml, flags=re.DOTALL)


def metadata(xml: str) -> str:
    ours = xml[xml.index("<vtorque:job") : xml.index("</metadata>")].strip()
    return re.sub("(</?)vtorque:", r"\1", ours).replace(f' xmlns:vtorque="{NAMESPACE}"', "", 1)


def render_devices(
    spec: DomainSpec, merged: MergedDomain, sockets: Mapping[str, str], taps: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the XML of each device to plug in: shares and NICs, the user's disks, other disks."""
    environment = _environment(spec.templates)
    items = [item for item in merged.items if is_pluggable(item.element)]
    items.sort(key=lambda item: _turn(item.element))
    return tuple(
        _fragment(environment, item, spec, sockets, taps, iter(()), merged) for item in items
    )


def _turn(element: Element) -> int:
    return (1 if element.user_owned else 2) if isinstance(element, Disk) else 0


def _environment(overrides: Path | None) -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 - while the guests' helpers start

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_loader(overrides)),
        autoescape=True,
        finalize=_escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _loader(overrides: Path | None) -> Callable[[str], str | None]:
    def load(name: str) -> str | None:
        package, _, path = name.partition(":")
        if overrides is not None:
            base = Path(path).name
            own = overrides / base if package == _CORE else overrides / package / base
            if own.exists():
                require_root_owned(own, uid=os.geteuid())
                return own.read_text(encoding="utf-8")
        resource = importlib.resources.files(package).joinpath(path)
        return resource.read_text(encoding="utf-8") if resource.is_file() else None

    return load


def _escape(value: Any) -> Markup:
    if isinstance(value, Markup):
        return value
    if value is None:
        raise ValueError("a value is None")
    text = str(value)
    illegal = _ILLEGAL.search(text)
    if illegal:
        raise Refused(
            f"'{printable(text)}' has the character U+{ord(illegal[0]):04X}, which libvirt's XML "
            "cannot contain"
        )
    return Markup(_ESCAPED.sub(lambda m: _ESCAPES[m[0]], text))  # noqa: S704 - just escaped


def _fragment(
    environment: jinja2.Environment,
    item: Merged,
    spec: DomainSpec,
    sockets: Mapping[str, str],
    taps: Mapping[str, str],
    slots: Iterator[int],
    merged: MergedDomain,
) -> str:
    element = item.element
    if not element.template:
        return ""
    values: dict[str, Any] = {
        "e": element, "alias": item.alias, "number": item.number, "spec": spec,
        "guest": spec.guest,
    }  # fmt: skip
    if isinstance(element, QemuArgs) and not spec.allow_qemu_args:
        raise Refused(
            f"plugin {item.plugins[0]} needs raw QEMU arguments, which this site does not allow "
            "([node] allow_qemu_args)"
        )
    if isinstance(element, Disk | Filesystem | Interface):
        slot = next(slots, None)
        values["slot"] = None if slot is None else f"0x{slot:02x}"
    if isinstance(element, Disk):
        values["target"] = disk_target(item.number)
        threads = _count_of(merged, IoThreads)
        values["iothread"] = item.number % threads + 1 if threads else 0
    if isinstance(element, Filesystem) or (isinstance(element, Disk) and element.user_owned):
        if item.alias not in sockets:
            raise HostFault(f"no daemon serves {item.alias} of the guest", stage=STAGE)
        values["socket"] = sockets[item.alias]
    if isinstance(element, Interface):
        values["tap"] = _tap(element, item.alias, taps)
        values["queues"] = _count_of(merged, NetQueues)
    text = _render_template(environment, element.template, ", ".join(item.plugins), values)
    wrapped = f'<x xmlns:vtorque="{NAMESPACE}" xmlns:qemu="{_QEMU_NAMESPACE}">{text}</x>'
    _parse(wrapped, element.template)
    return text.rstrip()


def _tap(nic: Interface, alias: str, taps: Mapping[str, str]) -> str | None:
    if nic.filtered and nic.kind == "direct":
        raise ConfigError(
            f"{alias}: macvtap on {nic.source} cannot be filtered; set [network] filter = false "
            "if guests may use any MAC and IP address"
        )
    if nic.filtered and alias not in taps:
        raise HostFault(f"the packet filter of the guest's NIC {alias} is missing", stage=STAGE)
    return taps.get(alias)


def disk_target(number: int) -> str:
    """Return vda, vdb, ... vdz, vdaa for a disk number from 0."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return "vd" + letters


def _render_template(
    environment: jinja2.Environment, template: str, plugins: str, values: Mapping[str, Any]
) -> str:
    import jinja2  # noqa: PLC0415 - as above

    try:
        return environment.get_template(template).render(values)
    except (jinja2.TemplateError, ModuleNotFoundError, AttributeError, TypeError, ValueError) as e:
        raise HostFault(
            f"template {template} of {plugins}: {type(e).__name__}: {e}", stage=STAGE
        ) from e


def _parse(xml: str, template: str) -> None:
    try:
        ElementTree.fromstring(xml)  # noqa: S314 - our own text, with no DTD
    except ElementTree.ParseError as error:
        raise HostFault(f"template {template} gives malformed XML: {error}", stage=STAGE) from None


def _join_sections(sections: Mapping[str, list[str]]) -> dict[str, Markup]:
    # Fragments are escaped. Indenting is safe: line breaks in values are character references now.
    return {
        name: Markup(textwrap.indent("\n".join(parts), " " * _SECTIONS[name]))  # noqa: S704
        for name, parts in sections.items()
    }


def _core_values(spec: DomainSpec, merged: MergedDomain) -> dict[str, Any]:
    guest = spec.guest
    arch = guest.image.arch
    if arch not in _MACHINES:
        raise Refused(
            f"image {guest.image.name} is for {arch!r}; supported are {', '.join(_MACHINES)}"
        )
    kernel = merged.single(KernelBoot)
    x86 = arch == "x86_64"
    direct = kernel is not None and kernel.kernel is not None
    cpu = merged.single(CpuModel)
    return {
        "spec": spec, "guest": guest, "console_socket": console_socket(guest, merged),
        "machine": _MACHINES[arch], "x86": x86, "cpu_model": cpu.name if cpu is not None else None,
        # The virt machine boots a disk through UEFI, and has ACPI only with it.
        "firmware": not x86 and not direct, "acpi": x86 or not direct,
        "uefi": spec.uefi if not direct and boots_by_uefi(guest.image) else "",
        **_pin_values(guest, merged),
    }  # fmt: skip


def _count_of(merged: MergedDomain, kind: type[IoThreads] | type[NetQueues]) -> int:
    found = merged.single(kind)
    return (found.count or 0) if found is not None else 0


def _pin_values(guest: GuestPlan, merged: MergedDomain) -> dict[str, Any]:
    place = guest.placement
    vcpu = place.cores.get("vcpu", ())
    emulator = place.cores.get("emulator", ()) or place.share or vcpu
    io = place.cores.get("io", ()) or place.cores.get("emulator", ())
    threads = _count_of(merged, IoThreads)
    return {
        "share": _cpuset(place.share or tuple(sorted({*vcpu, *emulator}))),
        "vcpupin": _vcpupin(guest.vcpus, vcpu or place.share, own="vcpu" in place.own),
        "emulatorpin": _cpuset(emulator),
        "iothreadpin": (range(1, threads + 1), _cpuset(io)) if threads and io else None,
        "numatune": place.numa if place.nodes and (place.cells or len(place.nodes) == 1) else None,
        "cells": place.cells,
        "shape": _shape(guest.vcpus, place),
    }


def _vcpupin(vcpus: int, cores: tuple[int, ...], *, own: bool) -> list[tuple[int, str]]:
    if own and len(cores) == vcpus:
        return [(number, str(core)) for number, core in enumerate(cores)]
    return [(number, _cpuset(cores)) for number in range(vcpus)] if cores else []


def _shape(vcpus: int, place: Placement) -> tuple[int, int, int]:
    cells = [cell[1] for cell in place.cells]
    rows = sorted(number for cell in cells for number in cell) == list(range(vcpus)) and all(
        cell == tuple(range(cell[0], cell[0] + vcpus // len(cells))) for cell in cells
    )
    sockets = len(cells) if cells and rows else 1
    threads = place.threads if vcpus // sockets % place.threads == 0 else 1
    return sockets, vcpus // sockets // threads, threads


def _cpuset(cores: tuple[int, ...]) -> str:
    return ",".join(str(core) for core in sorted(set(cores)))
