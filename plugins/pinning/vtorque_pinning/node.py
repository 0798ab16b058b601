"""Pinning on the node: claim CPUs, and memory with huge pages or on certain NUMA nodes.

For these claims, vtorque_core chooses CPUs and memory, and writes libvirt's vcpupin, emulatorpin,
numatune, huge pages and CPU topology.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import (
    FileData,
    HostFault,
    Refusal,
    constant_hook,
    hookimpl,
    run_tool,
    show_mib,
)
from vtorque_core.api.claims import Claim, CoreClaim, Notice, RamClaim
from vtorque_core.api.guest_plan import GuestPlan, report_missing
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import Site
from vtorque_pinning.mapping import numbers, read
from vtorque_pinning.plugin import HUGEPAGES, NUMA, VCPU_PINNING, Settings

SYSFS = Path("/sys/kernel/mm/hugepages")  # Documentation/admin-guide/mm/hugetlbpage.rst
NUMAD_SECONDS = 10.0  # numad(8) -w watches the CPUs for 2 s before it answers


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Claim | Refusal | Notice]:
    """Claim the requested CPUs, and memory with the requested huge pages and NUMA mode."""
    settings = site[Settings]
    if guest[VCPU_PINNING]:
        yield from _cores(guest, settings)
    if guest[HUGEPAGES]:
        yield from _pages(guest, settings)
    if numa := guest[NUMA]:
        yield RamClaim(numa=numa, key=NUMA.key)


def _cores(guest: GuestPlan, settings: Settings) -> Iterator[Claim | Notice]:
    wanted, key = guest[VCPU_PINNING], VCPU_PINNING.key
    if isinstance(wanted, FileData):
        cpus = read(wanted.content, guest.guests_per_node, guest.vcpus)[guest.index]
        yield CoreClaim("vcpu", guest.vcpus, cpus=cpus, key=key)
    else:
        yield CoreClaim("vcpu", guest.vcpus, exclusive=True, key=key)
        # First guest only: numad does not know this job's guests yet, and would repeat its advice.
        if settings.advisor == "numad" and len(guest.host.nodes) > 1 and guest.index == 0:
            yield _advice(guest)
    if settings.emulator_cpu:
        yield CoreClaim("emulator", 1, key=key)


def _advice(guest: GuestPlan) -> Claim | Notice:
    """Return a claim for the NUMA nodes that numad advises, or a notice if numad fails."""
    try:
        said = run_tool(
            "numad", "-w", f"{guest.vcpus}:{guest.ram_mib}", timeout=NUMAD_SECONDS
        ).strip()
        nodes = numbers(said, len(guest.host.nodes))
    except (HostFault, ValueError) as error:
        return Notice(f"numad failed ({error}): the NUMA node was chosen by vTorque's ledger")
    return RamClaim(near=nodes, advisor="numad", key=VCPU_PINNING.key)


def _pages(guest: GuestPlan, settings: Settings) -> Iterator[Claim | Refusal | Notice]:
    """Claim huge pages of the requested size, or of the largest size with enough free pages.

    If no size has enough free pages now, claim the largest size with enough pages in total, because
    other jobs will free pages when they end.
    """
    wanted = guest[HUGEPAGES]
    if not guest.host.nodes:  # on a submit host
        return
    there: Counter[int] = Counter()
    for node in guest.host.nodes:
        for kib, number in node.pages.items():
            there[kib] += kib * number // 1024
    need = guest.ram_mib * guest.guests_per_node
    sizes = there if isinstance(wanted, bool) else (wanted,)
    fitting = [kib for kib in sizes if there[kib] >= need and guest.ram_mib * 1024 % kib == 0]
    if fitting:
        best = max(fitting, key=lambda kib: (_free_memory(kib) >= need, kib))
        yield RamClaim(page_kib=best, key=HUGEPAGES.key)
        return
    has = ", ".join(f"{show_mib(mib)} of {HUGEPAGES.show(kib)}" for kib, mib in there.items())
    yield report_missing(
        guest,
        f"free huge pages for {show_mib(need)} (it has {has or 'none'})",
        option=HUGEPAGES,
        required=settings.required,
        where="[plugin.pinning] required",
        fix="set vm.nr_hugepages on the node, or request less ram or hugepages=false",
    )


def _free_memory(kib: int) -> int:
    file = SYSFS / f"hugepages-{kib}kB/free_hugepages"
    return kib * int(file.read_text("ascii")) // 1024 if file.exists() else 0


def _check(site: Site) -> Iterator[HealthResult]:
    advisor = site[Settings].advisor
    if advisor == "numad" and not shutil.which("numad", path="/usr/sbin:/usr/bin:/sbin:/bin"):
        fix = 'apt-get install numad, or set [plugin.pinning] advisor = "ledger"'
        yield HealthResult("failed", "numad, the advisor of NUMA nodes, is not installed", fix)
    else:
        yield HealthResult("ok", f"NUMA nodes: advisor is {advisor}")


vtorque_health_checks = constant_hook(HealthCheck("pinning", _check))
