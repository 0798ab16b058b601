"""Compute a guest's use of its requested resources, from samples and kept facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vtorque_report.read import Attempt, Line, ReportGuest

GUEST = "vtorque_guest_"
CPU = f"{GUEST}cpu_seconds_total"
STEAL = f"{GUEST}cpu_steal_seconds_total"
OVERHEAD = tuple(f"{GUEST}{part}_cpu_seconds_total" for part in ("emulator", "iothread", "vhost"))
RESIDENT = f"{GUEST}memory_rss_bytes"
READ = f"{GUEST}disk_read_bytes_total"
WRITTEN = f"{GUEST}disk_written_bytes_total"
RECEIVED = f"{GUEST}network_receive_bytes_total"
SENT = f"{GUEST}network_transmit_bytes_total"
DROPS = tuple(f"{GUEST}network_{way}_drops_total" for way in ("receive", "transmit"))
BOOT = f"{GUEST}boot_seconds"

START = ("plan", "render domain", "pre-boot", "boot", "ready", "post-boot")
"""Names of the phases before the script."""

RUN = ("await the script", "run")
STILL = ("paused", "suspended")
"""Names of the phases in which the guests were paused."""
MOVED = ("arrives", "moves")
"""Names of the phases in which a guest migrated."""


@dataclass(frozen=True)
class Figures:
    """Requested and used resources of one or more guests, in bytes and seconds; None if unknown.

    Args:
        core_seconds: vCPUs times the period over which ``cpu`` was measured.
        cpu: CPU time of the vCPUs; without telemetry, CPU time of the QEMU process since its start.
        steal: time in which vCPUs were ready to run but had no host CPU.
        overhead: CPU time of QEMU, iothreads and vhost threads, without the vCPUs.
        memory: maximum host memory that QEMU used.
        disk: bytes read and written since the boot.
        network: bytes received and sent since the boot.
        drops: packets dropped by the guests' network cards.
        boot: time from the start of the boot to READY.
        measured: True if there are samples.
    """

    vcpus: int = 0
    ram: int = 0
    core_seconds: float = 0.0
    cpu: float | None = None
    steal: float | None = None
    overhead: float | None = None
    memory: float | None = None
    disk: tuple[float, float] | None = None
    network: tuple[float, float] | None = None
    drops: float = 0.0
    boot: float | None = None
    measured: bool = False

    @property
    def cpu_share(self) -> float | None:
        """The fraction of time in which the vCPUs ran, 0 to 1."""
        if self.cpu is None or self.core_seconds <= 0:
            return None
        return min(1.0, self.cpu / self.core_seconds)

    @property
    def cores(self) -> float | None:
        """The average number of busy vCPUs."""
        return None if self.cpu_share is None else self.cpu_share * self.vcpus

    @property
    def steal_share(self) -> float | None:
        """The fraction of the vCPUs' runnable time spent waiting for a host CPU, 0 to 1."""
        if self.steal is None or self.cpu is None:
            return None
        return self.steal / (self.cpu + self.steal) if self.cpu + self.steal > 0 else 0.0

    @property
    def overhead_share(self) -> float | None:
        """The CPU time ``overhead`` divided by the CPU time of the vCPUs."""
        if self.overhead is None or not self.cpu:
            return None
        return self.overhead / self.cpu

    @property
    def memory_share(self) -> float | None:
        """The maximum memory divided by the requested memory."""
        return None if self.memory is None or not self.ram else self.memory / self.ram


def sum_metrics(line: Line, *names: str) -> float | None:
    """Return the sum of the named metrics over all devices; None if the sample has none of them."""
    heads = tuple(f"{name}{{" for name in names)
    found = [v for k, v in line.values.items() if k in names or k.startswith(heads)]
    return sum(found) if found else None


def guest_figures(guest: ReportGuest, attempt: Attempt, now: float) -> Figures:
    """Return a guest's figures. ``now`` (Unix seconds) counts as a running job's end."""
    while_run = [line for line in guest.lines if line.time >= run_start(attempt) - 0.5]
    lines = while_run if len(while_run) > 1 else guest.lines
    resident = [line.values[RESIDENT] for line in guest.lines if RESIDENT in line.values]
    if guest.peak_mib is not None:
        resident.append(float(guest.peak_mib << 20))
    cpu, seconds = _growth(lines, CPU)
    if cpu is None and guest.cpu_seconds is not None:
        cpu, seconds = guest.cpu_seconds, (attempt.ended or now) - boot_start(attempt)
    seconds = max(0.0, seconds - phase_seconds(attempt, STILL))
    last = guest.lines[-1] if guest.lines else Line(0.0, {})
    return Figures(
        vcpus=guest.vcpus,
        ram=guest.ram_mib << 20,
        core_seconds=guest.vcpus * seconds if cpu is not None else 0.0,
        cpu=cpu,
        steal=_growth(lines, STEAL)[0],
        overhead=_growth(lines, *OVERHEAD)[0],
        memory=max(resident, default=None),
        disk=_pair(sum_metrics(last, READ), sum_metrics(last, WRITTEN)),
        network=_pair(sum_metrics(last, RECEIVED), sum_metrics(last, SENT)),
        drops=sum_metrics(last, *DROPS) or 0.0,
        boot=_boot(guest, attempt),
        measured=bool(guest.lines),
    )


def combine_figures(parts: Sequence[Figures]) -> Figures:
    """Return the combined figures of several guests."""
    boots = [f.boot for f in parts if f.boot is not None]
    return Figures(
        vcpus=sum(f.vcpus for f in parts),
        ram=sum(f.ram for f in parts),
        core_seconds=sum(f.core_seconds for f in parts),
        cpu=_sum(f.cpu for f in parts),
        steal=_sum(f.steal for f in parts),
        overhead=_sum(f.overhead for f in parts),
        memory=_sum(f.memory for f in parts),
        disk=_pairs([f.disk for f in parts]),
        network=_pairs([f.network for f in parts]),
        drops=sum(f.drops for f in parts),
        boot=max(boots, default=None),
        measured=any(f.measured for f in parts),
    )


def run_start(attempt: Attempt) -> float:
    """Return the time when the script could begin (Unix seconds); if unknown, the job's start."""
    starts = [p.start for p in attempt.phases if p.guest is None and p.name in RUN]
    return starts[0] if starts else attempt.started


def boot_start(attempt: Attempt) -> float:
    """Return the time when the guests were started (Unix seconds); if unknown, the job's start."""
    starts = [p.start for p in attempt.phases if p.guest is None and p.name == "boot"]
    return starts[0] if starts else attempt.started


def phase_seconds(attempt: Attempt, names: Iterable[str]) -> float:
    """Return the total seconds of these phases of the job."""
    wanted = set(names)
    return sum(p.end - p.start for p in attempt.phases if p.guest is None and p.name in wanted)


def _growth(lines: Sequence[Line], *names: str) -> tuple[float | None, float]:
    """Return the growth of a sum of counters, and the period in seconds; None if unknown."""
    values = ((line.time, sum_metrics(line, *names)) for line in _end_lines(lines))
    known = [(at, value) for at, value in values if value is not None]
    if len(known) < 2:
        return None, 0.0
    (start, before), (end, after) = known[0], known[-1]
    return (max(0.0, after - before), end - start) if end > start else (None, 0.0)


def _end_lines(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the first ten and the last ten samples, to find a counter's first and last value.

    One sample at each end is not enough, because a sample may lack libvirt's values.
    """
    return [*lines[:10], *lines[10:][-10:]]


def _boot(guest: ReportGuest, attempt: Attempt) -> float | None:
    told = [line.values[BOOT] for line in guest.lines[-1:] if BOOT in line.values]
    marks = (p for p in attempt.phases if p.guest == guest.index and p.name == "ready")
    ready = [p.end - boot_start(attempt) for p in marks]
    return max((*told, *ready), default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _pair(one: float | None, other: float | None) -> tuple[float, float] | None:
    return None if one is None and other is None else (one or 0.0, other or 0.0)


def _pairs(pairs: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [pair for pair in pairs if pair is not None]
    return (sum(p[0] for p in known), sum(p[1] for p in known)) if known else None
