"""The faults of the matrix (:mod:`fault_matrix`), each with its expected result.

The first line of a fault's docstring describes the fault.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from fault_matrix import Fault, FaultBench, Point, Strike, exclusive
from vtorque_core.api import children, hooks
from vtorque_core.api.batch_system import JobState
from vtorque_core.node.end import teardown
from vtorque_core.node.end.reap import reap
from vtorque_core.records import journal, reading
from vtorque_core.records.reading import journals
from vtorque_core.resources.kinds import CORE_KINDS

_HANGS = 0.5  # seconds of a hanging release
_DAY = 86400.0


def every(_point: Point) -> bool:
    """Return True: the fault is tried at every step."""
    return True


def once(point: Point) -> bool:
    """Return whether the ``create()`` or ``release()`` of a record is the next step.

    Faults other than a kill happen only at this step of each record.
    """
    return point.step.startswith({"start": "after record ", "end": "before release "}[point.side])


def written(point: Point) -> bool:
    """Return whether a line of the journal is the next step."""
    words = {"start": ("before record ", "after create "), "end": ("after release ",)}
    return point.step.startswith(words[point.side])


def at_end(point: Point) -> bool:
    """Return whether the release of a record is the next step."""
    return point.side == "end" and once(point)


def of_plugin(point: Point) -> bool:
    """Return whether the release of a plugin's record is the next step."""
    return at_end(point) and point.kind not in CORE_KINDS


def _clean(bench: FaultBench, **how: Any) -> None:
    run = bench.release(**how)
    assert not run.error, run.error


def killed(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """SIGKILL, followed by the epilogue."""
    assert strike().killed
    _clean(bench)


def journal_fails(code: int, bench: FaultBench, point: Point, strike: Strike) -> None:
    """All later writes to the journal fail, also in the epilogue."""
    fail = functools.partial(_write_fails, code, bench.paths.journal)
    run = strike(act=fail)
    if point.side == "start" and point.step.startswith("before record "):
        assert run.kind == "HostFault", run
    else:
        assert not run.error or point.side == "start", run
    _clean(bench, first=fail)


def _write_fails(code: int, directory: Path) -> None:
    for name in ("write", "fsync"):
        real = getattr(os, name)

        def fake(fd: int, *args: Any, real: Callable[..., Any] = real) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/"):  # noqa: PTH115
                raise OSError(code, os.strerror(code))
            return real(fd, *args)

        mock.patch.object(os, name, fake).start()


def clock_jumps(seconds: float, bench: FaultBench, _point: Point, strike: Strike) -> None:
    """The clock is set while a hook runs, and is not set back."""
    jump = functools.partial(_set_clock, seconds)
    run = strike(act=jump)
    assert not run.error, run
    _clean(bench, first=jump)


def killed_and_clock(seconds: float, bench: FaultBench, _point: Point, strike: Strike) -> None:
    """SIGKILL, and the clock is set before the epilogue."""
    assert strike().killed
    _clean(bench, first=functools.partial(_set_clock, seconds))


def _set_clock(seconds: float) -> None:
    real = time.time
    mock.patch.object(time, "time", lambda: real() + seconds).start()


def libvirtd_dies(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """libvirtd dies until after a first epilogue, which reports the unreleased guests."""
    strike(meanwhile=lambda _: bench.libvirtd(up=False))
    run = bench.release()
    guests = [record for record in bench.records() if record.kind == "domain"]
    assert bool(guests) == ("libvirtd does not answer" in run.error), run
    bench.libvirtd(up=True)
    _clean(bench)


def qemu_dies(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """All QEMU processes of the job die."""
    run = strike(meanwhile=lambda _: bench.guests_die())
    assert not run.error, run
    _clean(bench)


def concurrent_epilogue(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """An epilogue starts while the hook runs, and waits for it; another epilogue follows."""

    def act(_pid: int) -> None:
        bench.behind(lambda: bench.node.release_in_process(bench.job.id))

    run = strike(meanwhile=act)
    assert not run.error, run
    _clean(bench)


def concurrent_prologue(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """A second prologue waits for the hook and starts the job again."""

    def act(_pid: int) -> None:
        bench.behind(lambda: bench.node.start_in_process(bench.job, again=True))

    run = strike(meanwhile=act)
    assert not run.error, run
    bench.joined()
    assert bench.records(), "the second prologue has not started the job"
    _clean(bench)


def concurrent_reaper(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """The reaper learns that the job has ended, and leaves the job to the running hook."""
    done = []

    def act(_pid: int) -> None:
        lives = {bench.job.id: JobState.GONE}
        done.extend(reap(bench.node.site, lambda _: lives, only=bench.job.id))

    strike(meanwhile=act)
    assert {result.action for result in done} <= {"busy"}, done
    _clean(bench)


def reboots(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """The node reboots: only files on disks remain; the other job ends, too."""

    def act(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its children are this process's now
        bench.reboot()

    assert strike(meanwhile=act).killed
    _clean(bench, first=_other_boot)
    bench.end_others()
    bench.start_others()


def _other_boot() -> None:
    for module in (teardown, journal, reading):
        mock.patch.object(module, "boot_id", lambda: "another").start()


def release_fails(bench: FaultBench, _point: Point, strike: Strike) -> None:
    """A release hangs or fails: the job keeps the resources that the record needs."""
    run = strike(act=_next_hangs, how={"release_timeout": _HANGS})
    assert "timed out after" in run.error or "busy" in run.error, run
    left = bench.records()
    needed = {seq for record in left for seq in record.needs}
    assert left, "a resource was released although its release hung"
    held = exclusive(record for record in left if record.seq in needed)
    assert not (both := held & bench.others_leases()), f"given to another job: {both}"
    _clean(bench)


def _next_hangs() -> None:
    """Let the next release hang, or fail if it cannot hang."""
    patches: list[Any] = []

    def hangs(real: Callable[..., Any], _work: Any, seconds: float) -> Any:
        for patch in patches:
            patch.stop()
        return real(lambda: time.sleep(60), seconds)

    def busy(_work: Any) -> str:
        for patch in patches:
            patch.stop()
        return "busy"

    fakes: Mapping[str, Any] = {
        "Child": functools.partial(hangs, children.Child),
        "run_in_child": functools.partial(hangs, children.run_in_child),
        "_error_of": busy,
    }
    patches += [mock.patch.object(teardown, name, fake) for name, fake in fakes.items()]
    for patch in patches:
        patch.start()


def plugin_gone(bench: FaultBench, point: Point, _strike: Strike) -> None:
    """The plugin was uninstalled: its records are orphans, and the job keeps what they need."""
    plugins = bench.node.plugins
    known = plugins.collect(hooks.vtorque_resources)
    owners = [one.plugin for one in known if one.item.kind == point.kind]

    def uninstalled() -> None:
        for owner in owners:
            plugins.unregister(owner)

    _orphaned(bench, point, uninstalled)
    _clean(bench)


def plugin_upgraded(bench: FaultBench, point: Point, _strike: Strike) -> None:
    """A new version of the plugin does not know a field of the record; the old version does."""
    (path,) = [p for p in journals(bench.paths) if p.name.startswith(f"{bench.job.id}.")]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("kind") == point.kind:
            line["args"]["field_of_another_version"] = 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _orphaned(bench, point, lambda: None)
    path.write_text(path.read_text().replace(', "field_of_another_version": 1', ""))
    _clean(bench)


def _orphaned(bench: FaultBench, point: Point, first: Callable[[], object]) -> None:
    run = bench.release(first=first)
    assert " orphaned: " in run.error, run.error
    left = bench.records()
    assert any(record.kind == point.kind for record in left), left
    assert not exclusive(left) & bench.others_leases()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("killed", every, killed),
        Fault("EIO", written, functools.partial(journal_fails, errno.EIO)),
        Fault("disk full", written, functools.partial(journal_fails, errno.ENOSPC)),
        Fault("libvirtd dies", once, libvirtd_dies),
        Fault("QEMU dies", once, qemu_dies),
        Fault("clock +1 d", once, functools.partial(clock_jumps, _DAY)),
        Fault("clock -1 d", once, functools.partial(killed_and_clock, -_DAY)),
        Fault("2 epilogues", once, concurrent_epilogue),
        Fault("2 prologues", once, concurrent_prologue),
        Fault("reaper", once, concurrent_reaper),
        Fault("reboot", once, reboots),
        Fault("release hangs", at_end, release_fails),
        Fault("plugin gone", of_plugin, plugin_gone),
        Fault("plugin changed", of_plugin, plugin_upgraded),
    )
}
"""All faults by their names in the matrix."""
