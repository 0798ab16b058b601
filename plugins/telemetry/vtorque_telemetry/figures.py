"""Measure one guest, from counters of libvirt and the kernel and from the journal.

Privileges: root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from vtorque_core.api.vcpu_threads import process_of
from vtorque_core.live.jobs import RunningGuest
from vtorque_telemetry.metrics import BLOCK, NET, Values
from vtorque_telemetry.threads import QemuProcess

MAX_DEVICES = 32  # disks and NICs of a guest, each
_G = "vtorque_guest_"


class GuestMeter:
    """A meter of one guest. Its counters never decrease, even if libvirt's counters decrease."""

    def __init__(self, guest: RunningGuest) -> None:
        self.guest = guest
        self._process: QemuProcess | None = None
        self._before: Values = {}

    def close(self) -> None:
        """Close the open files of the guest's process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def measure(self, stats: Mapping[str, Any] | None) -> Values:
        """Return the current values. ``stats`` are from libvirt; None if libvirt did not answer."""
        guest, values = self.guest, Values()
        values[f"{_G}vcpus", ()] = guest.vcpus
        values[f"{_G}memory_assigned_bytes", ()] = guest.ram_mib << 20
        values[f"{_G}io_cores", ()] = guest.io_cores
        if guest.ready is not None:
            values[f"{_G}boot_seconds", ()] = max(0.0, guest.ready - guest.started)
        if stats is not None:
            with contextlib.suppress(TypeError, ValueError):
                _add_libvirt_values(stats, values)
        self._add_kernel_values(values)
        for key, value in values.items():
            if key[0].endswith("_total"):
                values[key] = max(value, self._before.get(key, 0.0))
        self._before = {**self._before, **values}
        return values

    def _add_kernel_values(self, values: Values) -> None:
        try:
            if self._process is None:
                directory = process_of(self.guest.name, self.guest.uuid)
                if directory is None:
                    return
                self._process = QemuProcess(directory)
            used = self._process.usage()
        except (OSError, ValueError, IndexError):
            self.close()
            return
        cpu = values.get((f"{_G}cpu_seconds_total", ()))
        if cpu is not None:
            values[f"{_G}emulator_cpu_seconds_total", ()] = max(0.0, used.process - cpu)
        values[f"{_G}iothread_cpu_seconds_total", ()] = used.iothreads
        values[f"{_G}vhost_cpu_seconds_total", ()] = used.vhost
        values[f"{_G}memory_rss_bytes", ()] = used.rss
        values[f"{_G}page_faults_total", (("kind", "minor"),)] = used.minor
        values[f"{_G}page_faults_total", (("kind", "major"),)] = used.major


def _add_libvirt_values(stats: Mapping[str, Any], values: Values) -> None:
    present = range(int(stats.get("vcpu.maximum", 0)))
    times = [stats[f"vcpu.{n}.time"] for n in present if f"vcpu.{n}.time" in stats]
    waits = [stats[f"vcpu.{n}.delay"] for n in present if f"vcpu.{n}.delay" in stats]
    if times:
        values[f"{_G}cpu_seconds_total", ()] = sum(times) / 1e9
        values[f"{_G}cpu_steal_seconds_total", ()] = sum(waits) / 1e9
    for number in range(min(int(stats.get("block.count", 0)), MAX_DEVICES)):
        own = (("device", str(stats.get(f"block.{number}.name", number))),)
        for stat, name, unit in BLOCK:
            value = stats.get(f"block.{number}.{stat}")
            if value is not None:
                values[name, own] = value * unit
    for number in range(min(int(stats.get("net.count", 0)), MAX_DEVICES)):
        own = (("device", f"nic{number}"),)  # users do not know the name of the tap device
        for stat, name in NET:
            value = stats.get(f"net.{number}.{stat}")
            if value is not None:
                # libvirt counts from the guest's view: rx has the bytes that the guest received.
                values[name, own] = value
