"""Hints for the user's next job, with all thresholds and their reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vtorque_core.api import EXIT_GUEST_DIED, EXIT_HOST_FAULT, EXIT_REFUSED
from vtorque_report.figures import START, Figures, phase_seconds
from vtorque_report.read import Attempt
from vtorque_report.units import duration, percent, size

MARGIN = 1.25  # suggested amount divided by the used amount: the next input may be larger
MEMORY_UNUSED = 0.5  # used fraction below which a node could run two such jobs
MEMORY_WORTH = 512 << 20  # minimum saving per guest in bytes that helps a node
MEMORY_STEP = 256 << 20  # suggestions are multiples of this number of bytes
CPU_UNUSED = 0.5  # half of the vCPUs idle: other jobs could use them
CPU_IDLE = 0.25  # below it, the script mostly waits, even if it has only one vCPU
CPU_SECONDS = 10.0  # per vCPU; a shorter measurement says little about the script
STEAL = 0.1  # other load slows the job by a tenth; a few percent are the host's own work
STEAL_SECONDS = 1.0  # less is noise of the boot
BESIDE = 0.3  # CPU time for devices; a disk or network at full speed needs some
BOOT = 0.25  # fraction of the job's time above which starting guests is a large cost
DROPS = 1000  # packets; a few are normal when an interface comes up


def hints(attempt: Attempt, guests: Sequence[Figures], total: Figures) -> Iterator[str]:
    """Yield the hints, one sentence each, the most important first."""
    failures = list(_failures(attempt))
    if failures:  # the usage until the failure says little about the need
        yield from failures
        return
    long_enough = total.core_seconds >= CPU_SECONDS * max(1, total.vcpus)
    over = attempt.ended is not None or attempt.status is not None
    waited = [*_wait(total)]
    yield from waited
    # A running script may need more CPU later. A script that waited for CPUs would use more.
    if over and total.measured and long_enough and not waited:
        yield from _cpu(guests, total)
    yield from _memory(guests, over)
    if over:
        yield from _start(attempt)
    if total.drops >= DROPS:
        yield f"{total.drops:.0f} network packets were dropped: the network was overloaded"


def _failures(attempt: Attempt) -> Iterator[str]:
    logs = f"vmgr logs {attempt.job}"
    if attempt.status == EXIT_GUEST_DIED:
        yield (
            "a guest died while the script ran: out of memory, or its kernel crashed; for the "
            f"end of its console use {logs} --console"
        )
    elif attempt.status == EXIT_HOST_FAULT:
        yield (
            f"the node could not start the guests; submit the job again, and see {logs} for "
            "the reason"
        )
    elif attempt.status == EXIT_REFUSED:
        yield f"the node rejected the request: see {logs} for the reason"


def _wait(total: Figures) -> Iterator[str]:
    if (total.steal_share or 0) >= STEAL and (total.steal or 0) >= STEAL_SECONDS:
        yield (
            f"steal {percent(total.steal_share or 0)}: the guests had to wait for CPUs, because "
            "the node is overcommitted; tell the admin, or request exclusive cores"
        )


def _cpu(guests: Sequence[Figures], total: Figures) -> Iterator[str]:
    busy = total.cpu_share
    most = max((f.cores for f in guests if f.cores is not None), default=0.0)
    vcpus = max((f.vcpus for f in guests), default=0)
    fewer = max(1, math.ceil(most * MARGIN))
    if busy is not None and busy < CPU_UNUSED and fewer < vcpus:
        yield f"CPU {percent(busy)} busy: request vcpus={fewer} instead of {vcpus}"
    elif busy is not None and busy < CPU_IDLE:
        yield (
            f"CPU {percent(busy)} busy: the script mostly waits for disk, network or other "
            "processes"
        )
    if total.overhead_share is not None and total.overhead_share >= BESIDE:
        yield (
            f"QEMU's own CPU time for disk and network was {percent(total.overhead_share)} of "
            "the guests' CPU time: use larger reads and writes"
        )


def _memory(guests: Sequence[Figures], over: bool) -> Iterator[str]:
    known = [f for f in guests if f.memory is not None]
    if not known:
        return
    most = max(f.memory or 0.0 for f in known)
    ram = max(f.ram for f in known)
    enough = math.ceil(most * MARGIN / MEMORY_STEP) * MEMORY_STEP
    each = "each guest " if len(guests) > 1 else ""
    if over and most < MEMORY_UNUSED * ram and ram - enough >= MEMORY_WORTH:
        yield f"{each}requested {size(ram)}, used {size(most)}: request ram={_key(enough)}"


def _key(amount: int) -> str:
    return f"{amount >> 30}G" if amount % (1 << 30) == 0 else f"{amount >> 20}M"


def _start(attempt: Attempt) -> Iterator[str]:
    start = phase_seconds(attempt, START)
    phases = [p for p in attempt.phases if p.guest is None]
    whole = sum(p.end - p.start for p in phases)
    ran = any(p.name == "run" for p in phases)
    if ran and whole > 0 and start / whole >= BOOT:
        yield (
            f"starting the guests took {percent(start / whole)} of the job ({duration(start)}): "
            "combine several short steps in one job, or use a smaller image"
        )
