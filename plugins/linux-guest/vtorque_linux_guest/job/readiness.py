"""Wait until a guest is READY. An unprivileged process parses the guest's messages.

That process reports steps, logs and the result to root, as bytes that begin with a type letter.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.unprivileged_parser import Unreadable, parse_unprivileged
from vtorque_linux_guest.guest.contract import AS_USER, DATA
from vtorque_linux_guest.guest.linux_family import boots_micro
from vtorque_linux_guest.job import guest_logs
from vtorque_linux_guest.job.frames import GuestFailed, GuestSilent, StreamError, printable_text
from vtorque_linux_guest.job.status_port import LINES_MAX, TOTAL_MAX, StatusReader

SEED = "seed"
"""Name of the setup step in which a guest waits for its seed (micro_init, vtorque-waits)."""

_STEP, _LOG, _READY, _SILENT, _FAULT = b"s", b"l", b"r", b"t", b"f"
_STEP_SHOWN = 200  # bytes of a step's name
_USERS = (f"command /bin/sh {AS_USER}: ", "packages: ")
"""Prefixes of the error messages that the user's cloud-config causes."""
_MORE = 2.0  # seconds that the reader has after the guest's deadline, to report the timeout


def await_ready(
    guest: GuestPlan, port: socket.socket, deadline: float, step: Callable[[str], None]
) -> None:
    """Return when the guest is ready. If it fails, keep its logs. Runs as root.

    ``port`` is the status port; ``deadline`` is in time.monotonic() seconds. Raises HostFault if
    the setup fails, or the guest died or timed out. Raises Refused if the user's cloud-config or
    disk caused the failure.
    """
    log, steps, verdict = b"", 0, b""
    times = guest_logs.ready_deadline(guest, deadline), deadline, not boots_micro(guest.image)
    said = parse_unprivileged(
        _watch, *times, until=deadline + _MORE, files=[port.fileno()], most=TOTAL_MAX
    )
    try:
        for word in said:
            if word[:1] == _STEP and steps < LINES_MAX:
                steps += 1
                step(printable_text(word[1:_STEP_SHOWN]))
            elif word[:1] == _LOG:
                log += word[1:]
            else:
                verdict = verdict or word
    except Unreadable as error:
        verdict = _FAULT + str(error).encode()
    if verdict[:1] == _READY:
        return
    if log:
        guest_logs.keep(guest, log)
    reason = printable_text(verdict[1:])
    if guest.request.values.get("cloud_config") and reason.startswith(_USERS):
        raise Refused(f"your cloud-config, in guest {guest.hostname}: {reason}")
    chown = f"command chown {guest.user.uid}:{guest.user.gid} {DATA}: "
    disk = guest.request.values.get("disk")
    if disk and guest.rank == 0 and reason.startswith((f"mount {DATA}: ", chown)):
        raise Refused(f"disk={disk}, in guest {guest.hostname}: {reason}")
    if verdict[:1] == _SILENT:
        reason += (
            "; [node] start_timeout is the limit, and the log of the guest's console may "
            "show the reason"
        )
    raise HostFault(reason, stage=f"guest {guest.hostname}")


def await_seed(guest: GuestPlan, port: socket.socket, deadline: float) -> None:
    """Return when a warm guest waits for its seed. Runs as root. Raises HostFault."""
    if wrong := _run_reader(_await_steps, port, deadline):
        raise HostFault(wrong, stage=f"guest {guest.hostname}")


def set_clock(port: socket.socket, deadline: float) -> None:
    """Set a guest's clock to the current time. Runs as root. Raises HostFault."""
    if wrong := _run_reader(_sets, port, deadline):
        raise HostFault(wrong)


def hold(port: socket.socket, seconds: int, deadline: float) -> None:
    """Ask a guest's agent to keep the session for ``seconds`` if the job shell disconnects.

    The agent must answer by ``deadline`` (time.monotonic() seconds). See ``StatusReader.hold``.
    Raises HostFault.
    """
    if wrong := _run_reader(_hold_status, port, deadline, seconds):
        raise HostFault(wrong)


def _run_reader(
    work: Callable[..., Iterator[bytes]], port: socket.socket, deadline: float, *more: int
) -> str:
    """Run ``work`` in an unprivileged process; return the error that ``work`` reports, or ""."""
    until = deadline + _MORE
    said = parse_unprivileged(
        work, deadline, *more, until=until, files=[port.fileno()], most=TOTAL_MAX
    )
    try:
        verdict = b"".join(said)
    except Unreadable as error:
        verdict = _FAULT + str(error).encode()
    return "" if verdict == _READY else printable_text(verdict[1:]) or "no reason given"


def _sets(deadline: float, port: int) -> Iterator[bytes]:
    with socket.socket(fileno=port) as connection:
        try:
            StatusReader(connection).set_clock(deadline)
            yield _READY
        except (GuestSilent, StreamError) as error:
            yield _FAULT + str(error).encode()


def _hold_status(deadline: float, seconds: int, port: int) -> Iterator[bytes]:
    with socket.socket(fileno=port) as connection:
        try:
            StatusReader(connection).hold(seconds, deadline)
            yield _READY
        except (GuestSilent, StreamError) as error:
            yield _FAULT + str(error).encode()


def _await_steps(deadline: float, port: int) -> Iterator[bytes]:
    with socket.socket(fileno=port) as connection:
        try:
            for step in StatusReader(connection).steps(deadline):
                if step == SEED:
                    yield _READY
                    return
            yield _FAULT + b"it says that it is ready, without a seed"
        except (GuestFailed, GuestSilent, StreamError) as error:
            yield _FAULT + str(error).encode()


def _watch(ready_by: float, deadline: float, logs: bool, port: int) -> Iterator[bytes]:
    with socket.socket(fileno=port) as connection:
        reader = StatusReader(connection)
        try:
            for step in reader.steps(ready_by):
                yield _STEP + step.encode()
        except GuestFailed as error:
            yield _FAULT + error.reason.encode()
        except GuestSilent as error:
            yield _SILENT + str(error).encode()
            logs = logs and bool(reader.step)
        except StreamError as error:
            yield _FAULT + str(error).encode()
            return
        else:
            yield _READY
            return
        if logs:
            yield from (_LOG + piece for piece in guest_logs.fetch_logs(reader, deadline) if piece)
