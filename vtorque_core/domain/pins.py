"""Where a guest's threads and memory go, from its placement, as domain.xml.j2 needs it. Pure."""

from __future__ import annotations

from typing import Any

from vtorque_core.api_domain import IoThreads, NetQueues
from vtorque_core.api_node import GuestPlan, Placement
from vtorque_core.domain.merge import MergedDomain


def count_of(merged: MergedDomain, kind: type[IoThreads] | type[NetQueues]) -> int:
    """Return the count that plugins have agreed on, 0 if none has asked."""
    found = merged.single(kind)
    return (found.count or 0) if found is not None else 0


def pin_values(guest: GuestPlan, merged: MergedDomain) -> dict[str, Any]:
    """Return what domain.xml.j2 needs for vcpupin, emulatorpin, iothreadpin, numatune and cpu."""
    place = guest.placement
    vcpu = place.cores.get("vcpu", ())
    emulator = place.cores.get("emulator", ()) or place.share or vcpu
    io = place.cores.get("io", ()) or place.cores.get("emulator", ())
    threads = count_of(merged, IoThreads)
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
    """Return (vCPU, host CPUs): one each if they are the guest's own, else all over all."""
    if own and len(cores) == vcpus:
        return [(number, str(core)) for number, core in enumerate(cores)]
    return [(number, _cpuset(cores)) for number in range(vcpus)] if cores else []


def _shape(vcpus: int, place: Placement) -> tuple[int, int, int]:
    """Return sockets, cores and threads that the guest sees: as its vCPUs lie on the host.

    A socket for each NUMA cell, where these are of one size and their vCPUs come in a row.
    """
    cells = [cell[1] for cell in place.cells]
    rows = sorted(number for cell in cells for number in cell) == list(range(vcpus)) and all(
        cell == tuple(range(cell[0], cell[0] + vcpus // len(cells))) for cell in cells
    )
    sockets = len(cells) if cells and rows else 1
    threads = place.threads if vcpus // sockets % place.threads == 0 else 1
    return sockets, vcpus // sockets // threads, threads


def _cpuset(cores: tuple[int, ...]) -> str:
    return ",".join(str(core) for core in sorted(set(cores)))
