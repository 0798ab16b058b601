"""SIGKILL at every step of a job's start: what is left can be released, and nothing stays.

The steps are those of :func:`vtorque_core.records.journal.step`, which ``job.acquire()`` itself
makes, so that nothing here knows a plugin or a resource: what is installed is covered. A
:class:`Rig` is a job that can be started and released again and again; :func:`survive` kills its
start around each record's ``create()``, releases in another process, and compares the surroundings
with before.
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
class Run:
    """How a process ended that did some work.

    Args:
        steps: the journal's steps that it came to, in order; the last is where it was killed.
        killed: whether it was.
        error: what vTorque's own error said that ended it; ``kind`` is its class.
        noted: what was noted at its steps, in order.
    """

    steps: tuple[str, ...]
    killed: bool
    error: str = ""
    kind: str = ""
    noted: tuple[Any, ...] = ()


class Looks(Protocol):
    """Surroundings."""

    def look(self) -> Mapping[str, object]:
        """Return what can be seen of the surroundings and must be the same afterwards."""
        ...


class Rig(Looks, Protocol):
    """A job and its surroundings, real or recorded."""

    def start(self, last: int | None = None) -> Run:
        """Start the job in a process that is killed at its step ``last``, from 1; None: never.

        ``noted`` may have a :class:`Noted` for each record.
        """
        ...

    def release(self) -> None:
        """Release in another process all that the job holds. Raises AssertionError."""
        ...


@dataclass(frozen=True)
class Noted:
    """What a record names beyond what its rig looks at anyway, and how that was before it.

    Args:
        kind: of the record.
        names: (what, name) as in :mod:`vtorque_testing.watched`, and its state.
        blind: it names nothing at all that can be watched: these are its fields.
    """

    kind: str
    names: tuple[tuple[str, str, object], ...] = ()
    blind: str = ""


@dataclass(frozen=True)
class _Watching:
    """A rig's surroundings, and what its records name."""

    rig: Looks
    names: tuple[tuple[str, str, object], ...]

    def before(self, seen: Mapping[str, object]) -> dict[str, object]:
        return {**seen, **{f"{what} {name}": state for what, name, state in self.names}}

    def look(self) -> Mapping[str, object]:
        now = {f"{what} {name}": state_of(what, name) for what, name, _ in self.names}
        return {**self.rig.look(), **now}


def around_create(step: str) -> bool:
    """Return whether a step is just before or just after some record's ``create()``."""
    return step.startswith(("before create ", "after create "))


def around_all(step: str) -> bool:
    """Return whether a step is one of a start: around each record's line and its ``create()``."""
    return step.startswith(("before ", "after "))


def survive(
    rig: Rig,
    wanted: Callable[[str], bool] = around_create,
    *,
    part: slice = slice(None),
    patience: float = 0.0,
) -> list[str]:
    """Kill a start at each wanted step; return their names. Raises AssertionError naming the step.

    A start that is not killed comes first, since it tells the steps, and what its records name: all
    of that is watched, wherever it is. A record that names nothing that can be watched is an error.

    Args:
        rig: the job.
        wanted: which steps.
        part: of these steps, for a share of a long run.
        patience: seconds that the surroundings may take to be as before.
    """
    before = rig.look()
    whole = rig.start()
    assert not whole.error, f"a start that nobody disturbs: {whole.kind}: {whole.error}"
    noted = [each for each in whole.noted if isinstance(each, Noted)]
    watching = _Watching(rig, tuple(name for each in noted for name in each.names))
    before = watching.before(before)
    rig.release()
    same(watching, before, "not killed", patience)
    blind = sorted({f"{each.kind} ({each.blind})" for each in noted if each.blind})
    assert not blind, (
        f"nobody can see whether these are released: {'; '.join(blind)}: name what they acquire by "
        f"a path, a network interface, a pid, or a property of their class that is one of these"
    )
    numbers = [n for n, name in enumerate(whole.steps, start=1) if wanted(name)][part]
    killed = []
    for number in numbers:
        run = rig.start(number)
        assert run.killed, f"step {number} ({whole.steps[number - 1]}) did not come again: {run}"
        rig.release()
        same(watching, before, f"killed at step {number}: {run.steps[-1]}", patience)
        killed.append(run.steps[-1])
    return killed


def same(rig: Looks, before: Mapping[str, object], where: str, patience: float = 0.0) -> None:
    """Raise AssertionError saying ``where`` unless the surroundings are as before."""
    end = time.monotonic() + patience
    while (after := rig.look()) != before and time.monotonic() < end:
        time.sleep(0.1)
    kinds = before.keys() | after.keys()
    changed = {k: (before.get(k), after.get(k)) for k in kinds if before.get(k) != after.get(k)}
    assert not changed, f"{where}: before and after: {changed}"


# -- in a process of its own ------------------------------------------------------------------


def die() -> None:
    """End this process as SIGKILL does."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(
    work: Callable[[], object],
    last: int | None = None,
    act: Callable[[], object] = die,
    meanwhile: Callable[[int], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> Run:
    """Run ``work`` in a forked process that kills itself at its step ``last``, from 1.

    Call it with no other thread running. Raises AssertionError with the traceback if the process
    ends by anything but its kill, its end or an error of vTorque's own.

    Args:
        work: what to do.
        last: at which step the fault is; None: at none.
        act: the fault, called in the process; after another than ``die`` it goes on.
        meanwhile: the fault instead, called here with the process's id while it stands still.
        note: called in the process with each step's name; what it returns but None is ``noted``.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_child(work, last, _stand_still if meanwhile else act, writer, note)
    os.close(writer)
    if meanwhile is not None and os.WIFSTOPPED(_waited(pid)):
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
        return Run(steps, True)
    nothing: tuple[Any, ...] = ("", "", f"exit status {status}", [])
    kind, error, trace, noted = pickle.loads(rest) if rest else nothing  # noqa: S301 - our own child's
    assert not trace, f"after {steps[-1:]}: {trace}"
    return Run(steps, False, error, kind, tuple(noted))


def _stand_still() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this thread goes on


def _waited(pid: int) -> int:
    """Return the status of a child that stops or ends, and leave an ended one to be reaped."""
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
    gc.disable()  # it would copy the test run's memory, page by page
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
    """Have the processes that a killed child leaves become ours; give what lists them.

    The list has the command lines of all children of this process but those that it had before
    (prctl(2), PR_SET_CHILD_SUBREAPER): whatever daemon was started, under whatever name.
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
                    return left()  # it is in the middle of an execve(2), or has ended meanwhile
                found.append(words.decode("utf-8", "replace").strip())
        return sorted(found)

    try:
        yield left
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> dict[int, str]:
    """Return pid and state (proc_pid_stat(5)) of this process's children."""
    found = {}
    own = str(os.getpid()).encode()
    with os.scandir("/proc") as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:  # by the thousand on some hosts
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
