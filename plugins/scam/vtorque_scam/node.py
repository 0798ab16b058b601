"""The plugin scam on the node: whole cores, cache partitions, and no page merging for a guest.

When the guest starts, libvirt creates cache partitions for the vCPU threads with the kernel's
resctrl (arch/x86/resctrl.rst). libvirt removes the partitions when the guest ends.

Privileges: root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vtorque_core.api import Refusal, constant_hook, hookimpl, setting
from vtorque_core.api.claims import CacheClaim, CoreClaim, Notice
from vtorque_core.api.guest_plan import GuestPlan, report_missing
from vtorque_core.api.health import HealthCheck
from vtorque_core.api.host_topology import CacheBank
from vtorque_core.api.libvirt_domain import Element, MemoryBacking, Single
from vtorque_core.api.node_job import Site
from vtorque_scam import health
from vtorque_scam.plugin import SCAM

LEVEL = 3  # the last-level cache, shared by cores


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.scam]``."""

    required: bool = setting(
        True,
        doc="refuse scam=true on a node that lacks one of its protections; false: run "
        "with the others",
    )
    cache: int = setting(
        4,
        doc="part of each last-level cache under a guest's cores that is reserved for the guest",
        unit="MiB",
    )
    memory_bandwidth: int = setting(
        100, doc="memory bandwidth that a guest may use, in percent; 100: no limit"
    )


@dataclass(frozen=True)
class CacheTune(Single):
    """libvirt's ``<cachetune>`` and ``<memorytune>`` for all vCPUs of the guest.

    Attributes:
        caches: tuples of (level, bank, KiB).
        bandwidth: tuples of (bank, percent); empty for no limit.
    """

    section: ClassVar[str] = "cputune"
    template: ClassVar[str] = "vtorque_scam:cachetune.xml.j2"
    caches: tuple[tuple[int, int, int], ...] | None = None
    bandwidth: tuple[tuple[int, int], ...] | None = None


vtorque_settings = constant_hook(Settings)


@hookimpl
def vtorque_plan(
    guest: GuestPlan, site: Site
) -> Iterator[CoreClaim | CacheClaim | Notice | Refusal]:
    """Claim whole cores, and a cache partition if the caches can be divided."""
    if not guest[SCAM]:
        return
    yield CoreClaim("vcpu", guest.vcpus, whole_cores=True, key=SCAM.key)
    banks, settings = _banks(guest), site[Settings]
    if banks and all(bank.steps for bank in banks):
        yield CacheClaim(settings.cache * 1024, LEVEL, key=SCAM.key)
    if not guest.host.nodes:
        return  # on a submit host, the node is unknown
    for what in _missing_protections(banks, settings):
        yield report_missing(
            guest,
            what,
            option=SCAM,
            required=settings.required,
            where="[plugin.scam] required",
            fix="request another node, or leave out scam"
            if settings.required
            else "the guest still has its own cores and memory pages",
        )


def _banks(guest: GuestPlan) -> list[CacheBank]:
    return [bank for bank in guest.host.caches if bank.level == LEVEL]


def _missing_protections(banks: list[CacheBank], settings: Settings) -> Iterator[str]:
    """Yield each missing protection as a noun phrase for the message "node n1 has no ..."."""
    if not banks or not all(bank.granularity_kib for bank in banks):
        yield "cache allocation (resctrl, L3)"
    elif not all(bank.steps for bank in banks):
        yield "free cache (resctrl's default group has all of L3)"
    limited = banks and all(bank.steps and bank.bandwidth_step for bank in banks)
    if settings.memory_bandwidth < 100 and not limited:
        yield "memory bandwidth allocation with cache allocation (resctrl, MB)"


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Disable page merging (KSM) for the guest, and add the granted cache partition."""
    if not guest[SCAM]:
        return
    yield MemoryBacking(nosharepages=True)
    granted = {bank: kib for level, bank, kib in guest.placement.caches if level == LEVEL}
    if granted:
        percent = site[Settings].memory_bandwidth
        banks = [b for b in _banks(guest) if b.id in granted and b.bandwidth_step and percent < 100]
        yield CacheTune(
            tuple((LEVEL, bank, kib) for bank, kib in granted.items()),
            tuple((bank.id, bandwidth_limit(bank, percent)) for bank in banks),
        )


def bandwidth_limit(bank: CacheBank, percent: int) -> int:
    """Return the bank's lowest possible limit of memory bandwidth, not below ``percent``.

    The limit is in percent.
    """
    whole = -(-percent // bank.bandwidth_step) * bank.bandwidth_step
    return min(100, max(whole, bank.bandwidth_least))


vtorque_health_checks = constant_hook(
    HealthCheck("scam: caches", health.caches),
    HealthCheck("scam: core scheduling", health.core_scheduling),
)
