"""Run a job's scripts in its ready guest, and forward signals to them.

The scripts are the user's prologue, the job script, the user's epilogue and the site's epilogue.
Runs as the job's user, in the job shell's main thread, because signal handlers are set there.
:mod:`vtorque_linux_guest.job.stream` validates everything from the guest.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from vtorque_core.api.guest_driver import GuestDied, ReadyGuest, Script, Streams
from vtorque_linux_guest.guest.contract import (
    BREAK_MARKER,
    CANCEL_MARKER,
    ENVIRONMENT,
    EPILOGUE_CLIENT,
    EPILOGUE_MARKER,
    ON_CANCEL,
    RUN_SOCKET,
)
from vtorque_linux_guest.guest.environment import job_environment_text
from vtorque_linux_guest.job import default_acl, handover, on_cancel
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import BadStart, RunAbandoned, StartFailed, StreamError
from vtorque_linux_guest.job.session_state import SessionState
from vtorque_linux_guest.job.start_request import (
    FileArg,
    GuestFileData,
    Pty,
    StartMode,
    StartRequest,
)
from vtorque_linux_guest.job.stream import Session

EXIT_CANNOT_RUN = 126  # found, but cannot be run (POSIX sh, 2.8.2)
EXIT_NOT_FOUND = 127
MISSING_INTERPRETER = re.compile(
    r"cannot run (.*): its interpreter (.*) \(#! line\) does not exist here", re.DOTALL
)
"""Pattern of one of the agent's error messages (``start.c``)."""

ENV_LINE = re.compile(rb"#![ \t]*/\S*/env[ \t]+(?:-\S+[ \t]+|\w+=\S*[ \t]+)*([^\s-]\S*)")
OTHER_IMAGES = "Choose an image that has it (-vm img=); vmgr images list shows the images"
HELLO_SECONDS = 60.0
RETRY = 0.05  # seconds between two attempts to reconnect
BUSY_SECONDS = 1.0  # before the message: QEMU closes a program's connection some time after its end
BUSY_MESSAGE = (
    "vtorque: waiting until another program of this job in {} has ended. vmgr ssh enters the "
    "virtual machine beside that program\n"
)
KILL_SECONDS = 10.0
"""Time limit for a killed job to end, before its guest is abandoned."""

BURST = 1.0
"""Seconds in which a repeated signal is forwarded only once. Torque's pbs_mom sends each qsig
signal four times to each process (kill_task of 6.1.3). A process on the node sees one or two."""

FORWARDED = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGTSTP,
)
# A shell prints nothing for these: the user has pressed Ctrl-C, or a reader has gone; bash(1).
_SILENT = (signal.SIGINT, signal.SIGPIPE)


def run(guest: ReadyGuest, script: Script, streams: Streams) -> int:
    """Run the user's prologue, the script, the user's epilogue and the site's epilogue.

    ``script.grace`` seconds after TERM, the whole job is killed, including both epilogues.

    Returns:
        The script's exit code (128+n for signal n), or 126 or 127 if it cannot be run. If the
        user's prologue fails, the script does not run and the prologue's code is returned. If the
        script succeeds but an epilogue fails, the epilogue's code is returned.

    Raises:
        GuestDied: the guest is gone or violated the protocol.
    """
    try:
        with contextlib.ExitStack() as around:
            ending = around.enter_context(_SignalForwarder(script.grace))
            if number := _await_turn(guest, ending, streams):
                return 128 + number
            session = around.enter_context(contextlib.closing(_session(guest, ending)))
            job = _JobRun(guest, script, streams, session, ending)
            state = handover.received_state(guest)
            if state is None:
                session.hello(time.monotonic() + HELLO_SECONDS)
                return job.run()
            session.resume(state, time.monotonic() + HELLO_SECONDS)
            return job.continue_script(state)
    except RunAbandoned as error:
        if error.state is None or not ending.leaves:
            raise GuestDied(f"{guest.hostname}: {error}") from None
        job._print_message("the job was saved and ends now; restore it with vsub -vm resume=ID")
        handover.send_state(guest, error.state)  # then the batch system may end this process
        return 128 + signal.SIGTERM
    except StreamError as error:
        raise GuestDied(f"{guest.hostname}: {error}") from None


def _home_and_cwd() -> list[str]:
    with contextlib.suppress(OSError, KeyError):
        return [os.getcwd(), pwd.getpwuid(os.getuid()).pw_dir]  # noqa: PTH109
    return []


class _SignalForwarder:
    """Forwards signals to the guest. TERM also starts a timer, after which the job is killed."""

    def __init__(self, grace: float) -> None:
        self.events = Events()
        self.in_script = self.leaves = False
        self.terminated = False
        self.on_cancel: Callable[[float], None] | None = None
        self._cancelling: threading.Thread | None = None
        self._grace = grace
        self.killed = False
        self._before: dict[int, object] = {}
        self._last: dict[int, float] = {}

    def __enter__(self) -> _SignalForwarder:
        self.events.wake_by_signals()
        for number in FORWARDED:
            self._before[number] = signal.signal(number, self._forward)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.events.close()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._last.get(number, -BURST) + BURST:
            self._last[number] = now
            self.events.signal(number)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        first, self.terminated = not self.terminated, True
        if first:
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, 0.001))
        if self.on_cancel is None:
            self.events.signal(number)
        elif first:
            self._cancelling = threading.Thread(target=self._cancel, args=(number,))
            self._cancelling.start()

    def _cancel(self, number: int) -> None:
        """Run the commands for a canceled job, then forward TERM. Runs in a thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if self.on_cancel is not None:
            self.on_cancel(self._grace / 2)
        if self.on_cancel is not None:
            self.events.signal(number)

    def end_signal(self) -> int:
        """Return the number of a received signal that ends the wait for the guest, or 0."""
        if self.terminated:
            return signal.SIGTERM
        return next((n for n in (signal.SIGINT, signal.SIGHUP) if n in self._last), 0)

    def main_ended(self) -> None:
        """Record that the script has ended: from now on, :meth:`_cancel` forwards no TERM.

        If :meth:`_cancel` is running, wait for its end.
        """
        self.on_cancel = None
        if self._cancelling is not None:
            self._cancelling.join()

    def _alarm(self, _number: int, _frame: FrameType | None) -> None:
        if self.killed:
            self.events.stop("the job was killed but did not end")
            return
        self.killed = True
        self.events.signal(signal.SIGKILL)
        signal.setitimer(signal.ITIMER_REAL, KILL_SECONDS)


@dataclass(frozen=True)
class _JobRun:
    """One job in its guest. All scripts of the job run in one session."""

    guest: ReadyGuest
    script: Script
    streams: Streams
    session: Session
    ending: _SignalForwarder

    def run(self) -> int:
        script = self.script
        for line in default_acl.warnings(_home_and_cwd(), script.umask):
            self._print_message(line)
        if script.prologue is not None:
            code = self._start(self._user_script("vm_prologue", script.prologue), None)
            if code != 0:
                self._print_message(
                    f"vm_prologue failed with exit code {code}; the job script was not run"
                )
                return code
        if self.ending.terminated:
            return 128 + signal.SIGTERM
        return self._rest(self._main())

    def continue_script(self, state: SessionState) -> int:
        """Continue a script that a saved job's shell started, then run the epilogues in the guest.

        These are the user's and the site's epilogue, not root's epilogue on the node.
        """
        return self._rest(self._main(state))

    def _rest(self, code: int) -> int:
        script = self.script
        if self.ending.killed:
            return code  # no time is left for an epilogue
        if script.epilogue is not None:
            code = self._run_epilogue(
                "vm_epilogue", self._user_script("vm_epilogue", script.epilogue), code
            )
        if (self.guest.run_dir / EPILOGUE_MARKER).exists():
            code = self._run_epilogue(
                "the site's epilogue", self._part((EPILOGUE_CLIENT,), cwd="/"), code
            )
        return code

    def _main(self, state: SessionState | None = None) -> int:
        script, streams = self.script, self.streams
        pty = None
        if streams.terminal and streams.stdin is not None:
            from vtorque_linux_guest.job.terminal import terminal_size  # noqa: PLC0415 - few have one

            rows, columns = terminal_size(streams.stdin)
            pty = Pty(script.environ.get("TERM", "dumb"), rows, columns)
        if script.interactive:
            start = self._part((), mode=StartMode.LOGIN, pty=pty)
        else:
            start = self._script_start(pty)
        if (self.guest.run_dir / CANCEL_MARKER).exists():
            cancel = replace(self._part((ON_CANCEL,)), files=())
            self.ending.on_cancel = partial(
                on_cancel.run, self.guest, cancel, streams, self._print_message
            )
        try:
            with contextlib.ExitStack() as around:
                if pty is not None and os.environ.get("DISPLAY"):  # the script's has none
                    start = self._add_display(start, around)
                around.enter_context(self._terminal(pty))
                self.ending.in_script = True
                return self._start(state or start, streams.stdin)
        finally:
            self.ending.in_script = False
            self.ending.main_ended()

    def _add_display(self, start: StartRequest, around: contextlib.ExitStack) -> StartRequest:
        from vtorque_linux_guest.job import display  # noqa: PLC0415 - few have one

        try:
            found = around.enter_context(display.forward_display(self.guest, os.environ))
        except display.NoDisplay as error:
            self._print_message(f"X11 forwarding does not work: {error}")
            return start
        return replace(start, env={**start.env, **found.environ}, files=(*start.files, found.file))

    def _script_start(self, pty: Pty | None) -> StartRequest:
        """Return the request that runs the script.

        If the job sets no shell, a script with a ``#!`` line runs directly, and the user's shell
        runs any other script.
        """
        script = self.script
        file = GuestFileData(script.name, script.content)
        words: tuple[str | FileArg, ...] = (FileArg(script.name), *script.args)
        if script.login:
            words = (script.interpreter or "", *words)
            return self._part(words, files=(file,), mode=StartMode.LOGIN, pty=pty)
        if script.interpreter is not None:
            return self._part((script.interpreter, *words), files=(file,), pty=pty)
        mode = StartMode.DIRECT if script.content.startswith(b"#!") else StartMode.SHELL
        return self._part(words, files=(file,), mode=mode, pty=pty)

    def _user_script(self, name: str, content: bytes) -> StartRequest:
        mode = StartMode.DIRECT if content.startswith(b"#!") else StartMode.SHELL
        return self._part((FileArg(name),), files=(GuestFileData(name, content),), mode=mode)

    def _part(
        self,
        argv: tuple[str | FileArg, ...],
        *,
        files: tuple[GuestFileData, ...] = (),
        mode: StartMode = StartMode.DIRECT,
        pty: Pty | None = None,
        cwd: str | None = None,
    ) -> StartRequest:
        script = self.script
        text = job_environment_text(script.environ).encode("utf-8", "surrogateescape")
        return StartRequest(
            argv=argv,
            env=script.environ,
            cwd=script.cwd if cwd is None else cwd,
            umask=script.umask,
            limits=_limits(script),
            pty=pty,
            merge=script.merge,
            files=(*files, GuestFileData(ENVIRONMENT, text)),
            mode=mode,
        )

    def _run_epilogue(self, what: str, start: StartRequest, code: int) -> int:
        own = self._start(start, None)
        if own != 0:
            self._print_message(f"{what} failed with exit code {own}")
        return code or own

    def _start(self, start: StartRequest | SessionState, stdin: int | None) -> int:
        """Run the user's prologue, the script or an epilogue in the guest; return its exit code.

        If ``start`` is a SessionState, continue the script that a saved job's shell has started.
        Print start errors and output errors.
        """
        streams = self.streams
        try:
            status = self.session.run(
                start, stdin, streams.stdout, streams.stderr, self.ending.events
            )
        except StartFailed as error:
            self._print_message(self._explain_failure(error.reason))
            missing = ("No such file or directory", "does not exist here")
            found = not (error.reason.startswith("cannot run") and error.reason.endswith(missing))
            return EXIT_CANNOT_RUN if found else EXIT_NOT_FOUND
        except BadStart as error:
            self._print_message(f"cannot run: {error}")
            return EXIT_CANNOT_RUN
        for lost in status.lost:
            self._print_message(f"output was lost: {lost}")
        self._explain_signal(status.signal)
        if status.code == EXIT_NOT_FOUND and (program := _program_of_env(start)):
            self._print_message(
                f"exit status 127: if env did not find {program} (#! line), the reason is that "
                f"{self._image()} does not have it. {OTHER_IMAGES}"
            )
        return status.code

    def _explain_signal(self, number: int | None) -> None:
        """Print which signal killed the script, as the login shell of a bare-metal job does."""
        ending, script = self.ending, self.script
        if number is None or number in _SILENT or script.interactive or not script.login:
            return
        if ending.in_script and not ending.terminated and not ending.killed:
            name = signal.strsignal(number) or "unknown"
            self._print_message(f"the script was killed by signal {number} ({name})")

    def _image(self) -> str:
        return f"image {self.guest.image}" if self.guest.image else "the image"

    def _explain_failure(self, reason: str) -> str:
        if found := MISSING_INTERPRETER.fullmatch(reason):
            script, interpreter = found.groups()
            return (
                f"cannot run {script}: its interpreter {interpreter} (#! line) is missing in "
                f"{self._image()}. {OTHER_IMAGES}"
            )
        shell, missing = self.script.interpreter, "No such file or directory"
        if reason not in (
            f"cannot run {shell}: {missing}",
            f"cannot run the shell {shell}: {missing}",
        ):
            return reason
        image = self._image()
        return (
            f"cannot run the shell {shell} (-S): it is missing in {image}. Use -S with a shell "
            "of the image, or choose an image that has this one (-vm img=)"
        )

    def _print_message(self, text: str) -> None:
        line = f"vtorque: {text}\n".encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
            os.write(self.streams.stderr, line)

    @contextlib.contextmanager
    def _terminal(self, pty: Pty | None) -> Iterator[None]:
        if pty is None or self.streams.stdin is None:
            yield
            return
        from vtorque_linux_guest.job.terminal import raw_terminal  # noqa: PLC0415 - few have one

        with raw_terminal(self.streams.stdin, self.ending.events):
            yield


def _program_of_env(start: StartRequest | SessionState) -> str:
    """Return the program that a script's ``#!`` line starts through env(1), or ""."""
    if isinstance(start, SessionState) or not start.files:
        return ""
    found = ENV_LINE.match(start.files[0].data)
    return os.fsdecode(found[1]) if found else ""


def _limits(script: Script) -> dict[int, tuple[int, int]]:
    """Return the resource limits by number; host and guest use the same numbers (setrlimit(2))."""
    return {
        int(getattr(resource, f"RLIMIT_{name}")): limit
        for name, limit in script.limits.items()
        if hasattr(resource, f"RLIMIT_{name}")
    }


def _await_turn(guest: ReadyGuest, ending: _SignalForwarder, streams: Streams) -> int:
    """Wait while another program of the job, such as a Slurm step, is connected to the guest.

    Returns the number of the signal that ended the wait, otherwise 0.
    """
    message = BUSY_MESSAGE.format(guest.hostname).encode()
    begun = time.monotonic()
    while _is_busy(guest):
        if number := ending.end_signal():
            return number
        if message and time.monotonic() >= begun + BUSY_SECONDS:
            with contextlib.suppress(OSError):
                os.write(streams.stderr, message)
            message = b""
        time.sleep(RETRY)
    return 0


def _is_busy(guest: ReadyGuest) -> bool:
    """Return whether QEMU has accepted a connection to the guest's socket (proc_net_unix(5)).

    QEMU accepts one connection at a time. Other connections stay in the state "connecting".
    """
    path = f" {guest.run_dir / RUN_SOCKET}"
    try:
        with Path("/proc/net/unix").open(encoding="utf-8", errors="replace") as file:
            return any(line.rstrip("\n").endswith(path) and " 03 " in line for line in file)
    except OSError:
        return False


def _session(guest: ReadyGuest, ending: _SignalForwarder) -> Session:
    telling = handover.StateSender(guest, lambda: ending.in_script)
    return Session(_connect(guest), partial(_reconnect, guest, ending), telling)


def _reconnect(
    guest: ReadyGuest, ending: _SignalForwarder, stopped: Callable[[], str]
) -> tuple[socket.socket, float] | None:
    """Return a new connection to the guest and its deadline, or None if the guest is gone.

    Retries until the time that root has announced in the file BREAK_MARKER. This time is also the
    deadline for the guest's answer. Without this file, a lost connection means that the guest has
    ended. If root requests that this job shell exits, this function sets ``ending.leaves`` and
    returns None.
    """
    while (left := _break_until(guest) - time.time()) > 0 and not stopped():
        time.sleep(RETRY)
        with contextlib.suppress(GuestDied):
            return _connect(guest), time.monotonic() + left
        if ending.in_script and handover.is_detach_requested(guest):
            ending.leaves = True
            ending.events.stop("the guest was saved")
    return None


def _break_until(guest: ReadyGuest) -> float:
    try:
        return float((guest.run_dir / BREAK_MARKER).read_text())
    except (OSError, ValueError):
        return 0.0


def _connect(guest: ReadyGuest) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = guest.run_dir / RUN_SOCKET
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise GuestDied(f"{guest.hostname}: {path}: {error.strerror or error}") from None
    return connection
