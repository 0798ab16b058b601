"""The metrics: names, kinds and help texts. Names and units follow Prometheus' rules."""

from __future__ import annotations

from typing import Literal

Kind = Literal["counter", "gauge"]
Own = tuple[tuple[str, str], ...]
Values = dict[tuple[str, Own], float]
"""Maps (name, labels of the series except ``job``, ``user``, ``node``, ``guest``) to the value."""

_GUEST = "vtorque_guest_"
METRICS: dict[str, str] = {
    f"{_GUEST}cpu_seconds_total": "CPU time of the guest's virtual CPUs",
    f"{_GUEST}cpu_steal_seconds_total": "time its virtual CPUs waited for a host CPU",
    f"{_GUEST}emulator_cpu_seconds_total": "CPU time of QEMU except vCPUs, iothreads and vhost",
    f"{_GUEST}iothread_cpu_seconds_total": "CPU time of QEMU's iothreads",
    f"{_GUEST}vhost_cpu_seconds_total": "CPU time of the guest's vhost threads",
    f"{_GUEST}vcpus": "virtual CPUs",
    f"{_GUEST}io_cores": "host cores reserved for its I/O",
    f"{_GUEST}memory_assigned_bytes": "memory of the guest",
    f"{_GUEST}memory_rss_bytes": "host memory of its QEMU process",
    f"{_GUEST}page_faults_total": "page faults of its QEMU process",
    f"{_GUEST}disk_read_bytes_total": "bytes read from a disk",
    f"{_GUEST}disk_written_bytes_total": "bytes written to a disk",
    f"{_GUEST}disk_reads_total": "read requests to a disk",
    f"{_GUEST}disk_writes_total": "write requests to a disk",
    f"{_GUEST}disk_read_seconds_total": "time that read requests took",
    f"{_GUEST}disk_write_seconds_total": "time that write requests took",
    **{
        f"{_GUEST}network_{way}_{what}_total": f"{what} {said} by a network interface"
        for way, said in (("receive", "received"), ("transmit", "sent"))
        for what in ("bytes", "packets", "errors", "drops")
    },
    f"{_GUEST}boot_seconds": "time from the guest's start until it was ready",
    "vtorque_job_phase_seconds": "length of a phase of the job on this node",
    "vtorque_job_phases_total": "how often the job's guests were suspended, resumed or migrated",
    "vtorque_job_app_lines_rejected_total": "invalid lines in $VTORQUE_METRICS",
}
COUNTED = ("paused", "suspended", "moves", "arrives")
"""Phases that can occur several times in a job. The number of each is a metric."""
APP = "vtorque_app_"
BLOCK = (
    ("rd.bytes", f"{_GUEST}disk_read_bytes_total", 1.0),
    ("wr.bytes", f"{_GUEST}disk_written_bytes_total", 1.0),
    ("rd.reqs", f"{_GUEST}disk_reads_total", 1.0),
    ("wr.reqs", f"{_GUEST}disk_writes_total", 1.0),
    ("rd.times", f"{_GUEST}disk_read_seconds_total", 1e-9),
    ("wr.times", f"{_GUEST}disk_write_seconds_total", 1e-9),
)
NET = tuple(
    (f"{short}.{stat}", f"{_GUEST}network_{way}_{what}_total")
    for short, way in (("rx", "receive"), ("tx", "transmit"))
    for stat, what in (
        ("bytes", "bytes"),
        ("pkts", "packets"),
        ("errs", "errors"),
        ("drop", "drops"),
    )
)


def kind_of(name: str) -> Kind:
    """Return the kind of a metric."""
    return "counter" if name.endswith("_total") else "gauge"


def help_of(name: str) -> str:
    """Return the help text of a metric."""
    return METRICS.get(name, "reported by the job")
