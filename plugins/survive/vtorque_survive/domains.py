"""Save and migrate domains with libvirt. As root.

All functions raise HostFault if libvirt fails or does not answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal
from xml.etree import ElementTree

from vtorque_core.api import HostFault
from vtorque_core.live.libvirt import LOOKUP, STAGE, library, on_domain

State = Literal["runs", "still", ""]


def save_domain(uri: str, uuid: str, path: str, timeout: float) -> None:
    """Write the memory of a paused domain to a file. The domain stays paused.

    Concurrent calls for one domain fail.
    """
    forget = library().VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA

    def work(domain: Any) -> bool:
        return bool(domain.snapshotCreateXML(_memory_snapshot(domain.XMLDesc(), path), forget))

    _run_or_abort(uri, uuid, "save", "saved", work, timeout)


def _run_or_abort(
    uri: str, uuid: str, verb: str, done: str, work: Callable[[Any], bool], timeout: float
) -> None:
    try:
        found = on_domain(uri, uuid, f"{verb} domain", work, timeout)
    except HostFault:
        abort_operation(uri, uuid)
        raise
    if found is None:
        raise HostFault(f"the guest ended before it could be {done}", stage=STAGE)


def abort_operation(uri: str, uuid: str) -> None:
    """Ask libvirt to abort a domain's current operation. Ignores errors."""
    with contextlib.suppress(HostFault):
        on_domain(uri, uuid, "abort", lambda domain: domain.abortJob() == 0, LOOKUP)


def _memory_snapshot(domain: str, path: str) -> str:
    """Return the XML for a snapshot of only the memory (libvirt's formatsnapshot.html)."""
    snapshot = ElementTree.Element("domainsnapshot")
    ElementTree.SubElement(snapshot, "memory", snapshot="external", file=path)
    disks = ElementTree.SubElement(snapshot, "disks")
    for target in ElementTree.fromstring(domain).iterfind("devices/disk/target"):  # noqa: S314
        ElementTree.SubElement(disks, "disk", name=target.get("dev", ""), snapshot="no")
    return ElementTree.tostring(snapshot, encoding="unicode")


def is_busy(uri: str, uuid: str) -> bool:
    """Return True while libvirt saves or migrates the domain."""
    nothing = library().VIR_DOMAIN_JOB_NONE
    return bool(on_domain(uri, uuid, "job of domain", lambda d: d.jobInfo()[0] != nothing, LOOKUP))


def migrate_domain(
    uri: str, uuid: str, to: str, xml: str, timeout: float, *, paused: bool = False
) -> None:
    """Migrate a domain to the libvirtd at the URI ``to``, with new domain XML.

    The migration continues if the caller is killed, but not after ``timeout`` seconds. After
    HostFault, ask both nodes which one has the domain. With ``paused``, the domain's disks must
    exist on the destination before the call.
    """
    module = library()
    flags = module.VIR_MIGRATE_LIVE | module.VIR_MIGRATE_PEER2PEER | module.VIR_MIGRATE_TUNNELLED
    flags |= module.VIR_MIGRATE_AUTO_CONVERGE  # otherwise a fast writer never converges
    flags |= module.VIR_MIGRATE_PAUSED | module.VIR_MIGRATE_UNSAFE if paused else 0

    def work(domain: Any) -> bool:
        return bool(domain.migrateToURI3(to, {module.VIR_MIGRATE_PARAM_DEST_XML: xml}, flags) == 0)

    _run_or_abort(uri, uuid, "migrate", "moved", work, timeout)


def migratable_xml(uri: str, uuid: str) -> str:
    """Return the XML with which to migrate a domain, including the domain's passwords."""
    flags = library().VIR_DOMAIN_XML_MIGRATABLE | library().VIR_DOMAIN_XML_SECURE
    found = on_domain(uri, uuid, "look at domain", lambda d: str(d.XMLDesc(flags)), LOOKUP)
    if found is None:
        raise HostFault("the guest has ended", stage=STAGE)
    return found


def domain_state(uri: str, uuid: str) -> State:
    """Return "runs", "still" (paused, or an incoming migration) or "" (no such domain)."""
    module = library()
    state = on_domain(uri, uuid, "domain state", lambda d: d.state()[0], LOOKUP)
    if state in (module.VIR_DOMAIN_RUNNING, module.VIR_DOMAIN_BLOCKED):
        return "runs"
    gone = (None, module.VIR_DOMAIN_SHUTOFF, module.VIR_DOMAIN_CRASHED)
    return "" if state in gone else "still"
