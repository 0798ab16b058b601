"""Adapt the domain XML of a saved or migrating guest to its new node.

This module checks that the job requests the same virtual hardware; libvirt refuses other changes
that the guest would see (virDomainDefCheckABIStability).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import tap_name
from vtorque_core.plan.domain.render import NAMESPACE

_PLACED = ("cputune", "numatune", "metadata", "seclabel")  # taken from the new job's XML


def adapt_xml(was: str, wanted: str, places: tuple[Path, Path], guest: GuestPlan) -> str:
    """Return the XML with which libvirt restores an earlier domain on this node.

    Raises Refused if the job requests other virtual hardware. ``was`` is libvirt's XML of the
    earlier domain, which only root can write. ``wanted`` is the XML that was rendered for this job.
    ``places`` are the earlier guest's state and run directories.
    """
    old, new = (ElementTree.fromstring(text) for text in (was, wanted))  # noqa: S314 - root's
    _require_same(old, new)
    ElementTree.register_namespace("vtorque", NAMESPACE)
    now_at = (guest.state_dir, guest.run_dir)
    moves = [(f"{old}/", f"{new}/") for old, new in zip(places, now_at, strict=True)]
    for element in old.iter():
        for name, value in element.attrib.items():
            for before, now in moves:
                if value.startswith(before):
                    element.set(name, now + value.removeprefix(before))
    for tag in _PLACED:
        for element in old.findall(tag):
            old.remove(element)
        old.extend(new.findall(tag))
    vcpu, cpus = old.find("vcpu"), new.find("vcpu")
    if vcpu is not None and cpus is not None:
        vcpu.attrib.clear()
        vcpu.attrib.update(cpus.attrib)
    return ElementTree.tostring(old, encoding="unicode")


def _require_same(old: Element, new: Element) -> None:
    was, wanted = dict(_shape(old)), dict(_shape(new))
    other = [key for key in (*wanted, *was) if was.get(key) != wanted.get(key)]
    if other:
        setting, before, now = other[0], was.get(other[0], "none"), wanted.get(other[0], "none")
        raise Refused(
            f"the checkpoint does not match this job: the saved {setting} is {before}, not {now}",
            fix="request what the saved job requested",
        )


def _shape(domain: Element) -> Iterator[tuple[str, str]]:
    """Yield name and value of each property that the guest can see."""
    yield "hypervisor", domain.get("type", "")
    memory = domain.find("memory")
    if memory is not None:
        kib = int(memory.text or 0) * {"KiB": 1, "MiB": 1024}[memory.get("unit", "KiB")]
        yield "memory in KiB", str(kib)
    pages = domain.iterfind("memoryBacking/hugepages/page")
    yield "huge pages in KiB", " ".join(page.get("size", "") for page in pages) or "none"
    for name in ("vcpu", "os/kernel", "os/initrd", "os/cmdline"):
        yield name.rpartition("/")[2], domain.findtext(name, "none")
    for device in domain.iterfind("devices/*"):
        alias = device.find("alias")
        name = alias.get("name", "") if alias is not None else ""
        if name.startswith("ua-"):
            yield f"{device.tag} {name.removeprefix('ua-')}", _visible_part(device)


def _visible_part(device: Element) -> str:
    parts = (("mac", "address"), ("target", "dir"), ("target", "name"), ("target", "bus"))
    found = [each.get(key) for tag, key in parts for each in device.findall(tag)]
    if device.tag == "interface":
        found += _nic_parts(device)
    return " ".join(value for value in (*found, device.findtext("serial")) if value) or "there"


def _nic_parts(nic: Element) -> Iterator[str]:
    for source in nic.findall("source"):
        kinds = [key for key in ("network", "bridge", "dev") if key in source.attrib]
        yield from (f"{key} {source.get(key)}" for key in kinds[:1])  # not the bridge of a network
    mac = nic.find("mac")
    tap = tap_name(mac.get("address", "")) if mac is not None else ""
    yield "filtered" if any(each.get("dev") == tap for each in nic.findall("target")) else "open"
