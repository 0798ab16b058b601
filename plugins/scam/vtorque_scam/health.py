"""Health checks of the plugin scam for ``vtorque doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api.health import HealthResult
from vtorque_core.api.node_job import Site

RESCTRL = Path("/sys/fs/resctrl")
QEMU_CONF = Path("/etc/libvirt/qemu.conf")
SMT = Path("/sys/devices/system/cpu/smt/active")
_SCHED_CORE = re.compile(r'^\s*sched_core\s*=\s*"(\w+)"', re.MULTILINE)


def caches(site: Site) -> Iterator[HealthResult]:
    """Check whether libvirt can partition the last-level caches (arch/x86/resctrl.rst)."""
    try:
        full = int((RESCTRL / "info/L3/cbm_mask").read_text(), 16)
        schemata = (RESCTRL / "schemata").read_text()
    except OSError:
        yield HealthResult(
            "warning",
            f"{RESCTRL}/info/L3 is missing: guests with scam=true get no exclusive cache",
            fix="with Intel RDT or AMD QoS: mount -t resctrl resctrl /sys/fs/resctrl, without "
            "its option cdp, and restart libvirtd",
        )
        return
    masks = re.findall(r"^\s*L3:(.*)$", schemata, re.MULTILINE)
    kept = [int(mask, 16) for mask in re.findall(r"=([0-9a-f]+)", masks[0])] if masks else [full]
    ways = full.bit_count()
    if any(mask == full for mask in kept):
        yield HealthResult(
            "warning",
            "resctrl's default group has a whole L3 cache, so libvirt cannot allocate cache to "
            "guests",
            fix=f"shrink the group at each boot, for each cache, such as: echo "
            f"'L3:0={full >> ways // 2:x}' > {RESCTRL}/schemata",
        )
        return
    most = max(mask.bit_count() for mask in kept)
    yield HealthResult("ok", f"{ways - most} of {ways} ways of each L3 cache are for guests")


def core_scheduling(site: Site) -> Iterator[HealthResult]:
    """Check whether host processes may run on SMT siblings of a guest's threads."""
    try:
        if SMT.read_text().strip() == "0":
            yield HealthResult("ok", "no core runs two threads (SMT is off)")
            return
        found = _SCHED_CORE.search(QEMU_CONF.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        yield HealthResult(
            "warning", f"{error.filename}: {error.strerror}", fix="run vtorque doctor as root"
        )
        return
    chosen = found[1] if found else "none"
    if chosen != "none":
        yield HealthResult("ok", f"core scheduling: {chosen}")
        return
    yield HealthResult(
        "warning",
        "with whole cores, other guests cannot use a guest's SMT siblings, but the host's "
        "processes can",
        fix=f'set sched_core = "vcpus" in {QEMU_CONF} (libvirt 8.9, Linux 5.14) and restart '
        "libvirtd",
    )
