"""Kill the start of a job at every step, and check that everything is released.

The core and plugins acquire resources with ``job.acquire()``, which calls
:func:`vtorque_core.records.journal.step` at each step. A :class:`Rig` is a job that can be started
and released repeatedly. :func:`survive` kills the start before and after the ``create()`` of each
resource, releases the job in another process, and checks that nothing is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vtorque_core.base.errors import VtorqueError
from vtorque_core.records import journal
from vtorque_testing.watched import state as state_of

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True)
class ChildResult:
    """Result of work in a child process.

    Args:
        steps: names of the steps that the process reached, in order. Each call of
            :func:`vtorque_core.records.journal.step` is a step, such as ``before create file``. A
            killed process was killed at the last step.
        killed: True if the process was killed.
        error: message of the VtorqueError that ended the work.
        kind: class name of that error.
        noted: values other than None that the function ``note`` of :func:`run_in_child` returned.
    """

    steps: tuple[str, ...]
    killed: bool
    error: str = ""
    kind: str = ""
    noted: tuple[Any, ...] = ()


class Surroundings(Protocol):
    """The node's files, processes and devices that a job may change."""

    def observe(self) -> Mapping[str, object]:
        """Return the observable state, which must be the same before and after the job."""
        ...


class Rig(Surroundings, Protocol):
    """A job and its surroundings, real or recorded."""

    def start(self, last: int | None = None) -> ChildResult:
        """Start the job in a process that is killed at step number ``last`` (None: never).

        Each call of :func:`vtorque_core.records.journal.step` is a step; the first is number 1.

        If ``last`` is None, a rig can return a :class:`NamedObjects` in :attr:`ChildResult.noted`
        for each journal record that the start writes. :func:`survive` then also checks the state
        of these objects after each release.
        """
        ...

    def release(self) -> None:
        """Release everything that the job holds, in another process. Raises AssertionError."""
        ...


@dataclass(frozen=True)
class NamedObjects:
    """The paths, network interfaces and other objects to which a journal record refers.

    Args:
        kind: kind of the record.
        names: kind and name of each object, and its state before the resource was created; see
            :mod:`vtorque_testing.watched`.
        blind: names of the record's fields, if no field refers to an object. :func:`survive` cannot
            check such a record, and shows the names in an error. Otherwise empty.
    """

    kind: str
    names: tuple[tuple[str, str, object], ...] = ()
    blind: str = ""


@dataclass(frozen=True)
class _WatchedRig:
    """A job (:class:`Rig`) whose observed state also includes the objects in ``names``.

    For ``names``, see :class:`NamedObjects`.
    """

    rig: Surroundings
    names: tuple[tuple[str, str, object], ...]

    def before(self, seen: Mapping[str, object]) -> dict[str, object]:
        return {**seen, **{f"{what} {name}": state for what, name, state in self.names}}

    def observe(self) -> Mapping[str, object]:
        now = {f"{what} {name}": state_of(what, name) for what, name, _ in self.names}
        return {**self.rig.observe(), **now}


def around_create(step: str) -> bool:
    """Return True for the steps just before and just after the ``create()`` of a resource."""
    return step.startswith(("before create ", "after create "))


def around_all(step: str) -> bool:
    """Return True for all steps, except those that record a phase of the job."""
    return step.startswith(("before ", "after "))


def survive(
    rig: Rig,
    wanted: Callable[[str], bool] = around_create,
    *,
    part: slice = slice(None),
    patience: float = 0.0,
) -> list[str]:
    """Kill a start at each wanted step; return the names of these steps.

    The first start is not killed: it shows the steps, and the objects to which the job's journal
    refers. Then, for each wanted step, start the job, kill the start at this step, and release the
    job. After each release, the surroundings and these objects must be as before the first start. A
    journal record that refers to no object is an error.

    Args:
        rig: the job.
        wanted: selects the steps.
        part: slice of these steps, for a part of a long test.
        patience: seconds to wait until the surroundings are as before.

    Raises:
        AssertionError: something is left. The message names the step.
    """
    before = rig.observe()
    whole = rig.start()
    assert not whole.error, f"a start without a fault failed: {whole.kind}: {whole.error}"
    noted = [each for each in whole.noted if isinstance(each, NamedObjects)]
    watching = _WatchedRig(rig, tuple(name for each in noted for name in each.names))
    before = watching.before(before)
    rig.release()
    assert_unchanged(watching, before, "not killed", patience)
    blind = sorted({f"{each.kind} ({each.blind})" for each in noted if each.blind})
    assert not blind, (
        f"cannot check that these are released: {'; '.join(blind)}: name what they acquire by "
        f"a path, a network interface, a pid, or a property of their class that is one of these"
    )
    numbers = [n for n, name in enumerate(whole.steps, start=1) if wanted(name)][part]
    killed = []
    for number in numbers:
        run = rig.start(number)
        assert run.killed, f"step {number} ({whole.steps[number - 1]}) was not reached again: {run}"
        rig.release()
        assert_unchanged(watching, before, f"killed at step {number}: {run.steps[-1]}", patience)
        killed.append(run.steps[-1])
    return killed


def assert_unchanged(
    rig: Surroundings, before: Mapping[str, object], where: str, patience: float = 0.0
) -> None:
    """Raise AssertionError with ``where`` unless ``rig.observe()`` returns ``before``.

    Retries for ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while (after := rig.observe()) != before and time.monotonic() < end:
        time.sleep(0.1)
    kinds = before.keys() | after.keys()
    changed = {k: (before.get(k), after.get(k)) for k in kinds if before.get(k) != after.get(k)}
    assert not changed, f"{where}: before and after: {changed}"


# -- child processes --------------------------------------------------------------------------


def die() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_child(
    work: Callable[[], object],
    last: int | None = None,
    act: Callable[[], object] = die,
    meanwhile: Callable[[int], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> ChildResult:
    """Run ``work`` in a forked process, with a fault at step number ``last``.

    Each call of :func:`vtorque_core.records.journal.step` in the process is a step, for example
    when ``work`` acquires a resource. Only the calling thread may be running. Raises AssertionError
    with the traceback if the process raises an error other than VtorqueError, or is killed by
    anything other than the fault.

    Args:
        work: function to run.
        last: number of the step at which the fault occurs, from 1. None means no fault.
        act: the fault, a function called in the process. If it returns, the process continues.
        meanwhile: called instead of ``act``, in the parent with the child's pid, while the child
            is stopped.
        note: function that the process calls at each step, with the step's name. Values other than
            None that it returns are in :attr:`ChildResult.noted`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_child(work, last, _stop_self if meanwhile else act, writer, note)
    os.close(writer)
    if meanwhile is not None and os.WIFSTOPPED(_wait_child(pid)):
        try:
            meanwhile(pid)
        finally:
            os.kill(pid, signal.SIGCONT)
    said = b""
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    lines, _, rest = said.partition(b"\0")
    steps = tuple(lines.decode().splitlines())
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL and len(steps) == last, (status, steps)
        return ChildResult(steps, True)
    nothing: tuple[Any, ...] = ("", "", f"exit status {status}", [])
    kind, error, trace, noted = pickle.loads(rest) if rest else nothing  # noqa: S301 - our own child's
    assert not trace, f"after {steps[-1:]}: {trace}"
    return ChildResult(steps, False, error, kind, tuple(noted))


def _stop_self() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this thread continues


def _wait_child(pid: int) -> int:
    """Return the status of a child that stops or ends, without reaping it."""
    found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    return (found.si_status << 8) | 0x7F if found.si_code == os.CLD_STOPPED else 0


def _be_child(
    work: Callable[[], object],
    last: int | None,
    act: Callable[[], object],
    tell: int,
    note: Callable[[str], object] | None,
) -> None:
    gc.disable()  # a collection would copy the test run's memory, page by page
    counted = threading.Lock()
    seen = 0
    notes = []

    def count(name: str) -> None:
        nonlocal seen
        with counted:  # guests boot in threads
            seen += 1
            os.write(tell, f"{name}\n".encode())
            if note is not None and (noted := note(name)) is not None:
                notes.append(noted)
            if seen == last:
                act()

    told = ("", "", "")
    try:
        journal.on_step = count
        work()
    except VtorqueError as error:
        told = (type(error).__name__, str(error), "")
    except BaseException:
        told = ("", "", traceback.format_exc())
    finally:
        with contextlib.suppress(OSError), os.fdopen(os.dup(tell), "wb") as file:
            file.write(b"\0" + pickle.dumps((*told, notes)))
        os._exit(0)


@contextlib.contextmanager
def orphans() -> Iterator[Callable[[], Sequence[str]]]:
    """Adopt processes that a killed child leaves; yield a function that lists them.

    Orphans become children of this process (prctl(2), PR_SET_CHILD_SUBREAPER). The list contains
    the command lines of all children that started in the context, including daemons.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    known = set(children())

    def left() -> Sequence[str]:
        found = []
        for pid, state in children().items():
            if pid in known:
                continue
            if state == "Z":
                os.waitpid(pid, 0)
            else:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if not words:
                    return left()  # the process is in the middle of an execve(2), or has ended
                found.append(words.decode("utf-8", "replace").strip())
        return sorted(found)

    try:
        yield left
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> dict[int, str]:
    """Return pid and state (proc_pid_stat(5)) of each child of this process."""
    found = {}
    own = str(os.getpid()).encode()
    with os.scandir("/proc") as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:  # thousands on some hosts
        try:
            descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        except OSError:
            continue
        try:
            state, parent, *_ = os.read(descriptor, 1024).rpartition(b")")[2].split(None, 2)
        except (OSError, ValueError):
            continue
        finally:
            os.close(descriptor)
        if parent == own:
            found[int(pid)] = state.decode()
    return found
