"""The job wrapper: what the batch system starts, as the user, instead of the job's shell.

It waits for root's proof that the guests are ready, hands the script to the guest type's driver
and ends with the script's exit code. Whatever else happens it says so in one line and runs
nothing: there is no way from here to the script running on the host.

Calling convention (Torque and OpenPBS, ``qsub -S``): no arguments, ``PBS_*`` in the environment,
stdin is a pipe with one line, the script's path and the ``-F`` arguments. Of an interactive job
stdin is the terminal.
"""

from __future__ import annotations

import os
import pwd
import resource
import shlex
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vtorque_core import proof as proofs
from vtorque_core.api import GuestType
from vtorque_core.api_guest import GuestDied, ReadyGuest, Script, Streams
from vtorque_core.errors import (
    EXIT_FAILED,
    EXIT_GUEST_DIED,
    EXIT_HOST_FAULT,
    EXIT_NO_PROOF,
    EXIT_REFUSED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    HostFault,
    Refused,
    UsageError,
    VtorqueError,
    printable,
)
from vtorque_core.names import Paths
from vtorque_core.proof import Proof

POLL = 0.05  # seconds between looks at the proof while the guests start
SLACK = 5.0  # seconds after the proof's deadline until root counts as dead
MAX_LINE = 1 << 20  # bytes of the line on stdin
MAX_SCRIPT = 64 << 20  # bytes of a script

HOST_ONLY = frozenset(
    {
        # paths, sockets and displays of the host, or of the login that submitted with -V
        "DBUS_SESSION_BUS_ADDRESS",
        "DISPLAY",
        "HOSTNAME",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "LISTEN_PID",
        "NOTIFY_SOCKET",
        "OLDPWD",
        "PBS_NODEFILE",  # names host nodes; the proof brings the guests'
        "SHLVL",
        "SSH_AUTH_SOCK",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
        "TMPDIR",
        "WAYLAND_DISPLAY",
        "XAUTHORITY",
        "XDG_RUNTIME_DIR",
        "XDG_SESSION_ID",
        "_",
    }
)
# Variables that hold a path of the user's and follow the home where the guest has it elsewhere.
_PATHS = ("PBS_O_WORKDIR", "PBS_O_INITDIR", "PBS_O_HOME", "PWD")
_LIMITS = ("CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK", "AS")


class GuestTypes(Protocol):
    """What the wrapper needs of ``plugins.Plugins``."""

    def guest_type(self, name: str) -> GuestType:
        """Return the guest type. Raises VtorqueError if nobody brings it."""
        ...


def load_plugin(name: str) -> GuestTypes:
    """Load one plugin's declaring module, whatever the site config says today."""
    from vtorque_core.plugins import Plugins  # noqa: PLC0415 (not before there is a proof)

    return Plugins.load(node=False, only={name})


@dataclass(frozen=True)
class Batch:
    """How the batch system has started this process."""

    job_id: str
    path: Path | None  # of the script; None: interactive
    args: Sequence[str]


def run_job(
    paths: Paths,
    *,
    environ: Mapping[str, str] | None = None,
    plugins: Callable[[str], GuestTypes] = load_plugin,
    streams: Streams = Streams(0, 1, 2),  # noqa: B008 (frozen)
    owner_uid: int = 0,
) -> int:
    """Run the job in its guest; return its exit code, or one of ``errors.EXIT_*``. As the user.

    Args:
        paths: vTorque's directories.
        environ: the batch system's environment of the job; None: this process's.
        plugins: loads the plugin that the proof names.
        streams: the job's own standard streams.
        owner_uid: who must have written the proof: root, except in tests.

    Never raises for what the user, root or the guest did wrong.
    """
    environ = dict(os.environ if environ is None else environ)
    try:
        batch = read_batch(environ, streams.stdin)
        ready = _await_proof(paths, batch.job_id, owner_uid)
        script = make_script(batch, ready, environ, streams)
        code = _run(ready, script, plugins, streams)
        if ready.keep:
            _keep(ready, code, streams)
        return code
    except _Stop as error:
        for line in (error.message, *error.detail):
            _say(streams, line)
        return error.code
    except UsageError as error:
        _say(streams, str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the driver has its own handlers
        return EXIT_SIGNAL + signal.SIGINT


class _Stop(Exception):
    """End with this code after this line, and those of ``detail``."""

    def __init__(self, code: int, message: str, detail: Sequence[str] = ()) -> None:
        self.code = code
        self.message = message
        self.detail = detail
        super().__init__(message)


def read_batch(environ: Mapping[str, str], stdin: int | None) -> Batch:
    """Return the job's id and script from what the batch system gave. Raises UsageError."""
    job_id = environ.get("PBS_JOBID", "")
    if not job_id:
        raise UsageError("PBS_JOBID is not set: this program is started by the batch system")
    if stdin is None:
        raise UsageError("no standard input, so no script")
    if os.isatty(stdin):
        return Batch(job_id, None, ())
    line = b""
    while chunk := os.read(stdin, 1 << 16):
        line += chunk
        if len(line) > MAX_LINE:
            raise UsageError(f"script path and arguments are longer than {MAX_LINE} bytes")
    try:
        words = shlex.split(os.fsdecode(line))
    except ValueError as error:
        raise UsageError(f"the script's arguments (-F) cannot be split: {error}") from None
    if not words:
        raise UsageError("the batch system gave no script on standard input")
    return Batch(job_id, Path(words[0]), tuple(words[1:]))


def _await_proof(paths: Paths, job_id: str, owner_uid: int) -> Proof:
    """Return the proof that is ``ready``; _Stop on any other end."""
    while True:
        try:
            found = proofs.read(paths, job_id, os.getuid(), owner_uid)
        except HostFault as error:
            raise _Stop(EXIT_NO_PROOF, f"{error}; nothing was run") from None
        if found is None:
            raise _Stop(
                EXIT_NO_PROOF,
                f"root has not proven on this node that the guest of job {printable(job_id)} is "
                "ready (the batch system's root prologue was skipped or killed); nothing was run",
            )
        if found.state == "ready":
            return found
        if found.state == "refused":
            raise _Stop(EXIT_REFUSED, printable(found.reason, 2000))
        if found.state == "host_fault":
            detail = [printable(line) for line in found.detail]
            raise _Stop(EXIT_HOST_FAULT, printable(found.reason, 2000), detail)
        if time.time() > found.deadline + SLACK:
            raise _Stop(
                EXIT_NO_PROOF, "the guests were not ready by the start's deadline; nothing was run"
            )
        time.sleep(POLL)


def make_script(batch: Batch, ready: Proof, environ: Mapping[str, str], streams: Streams) -> Script:
    """Return the script and its surroundings, as the guest shall have them.

    The environment is the batch system's without :data:`HOST_ONLY`, with the login shell as
    SHELL (the batch system sets this program) and with what the proof adds. Where the proof's
    HOME is not the host's, the working directory and ``PBS_O_WORKDIR`` and the like follow it.
    """
    try:
        account = pwd.getpwuid(os.getuid())
        here = environ.get("PBS_O_INITDIR") or os.getcwd()  # noqa: PTH109
    except (KeyError, OSError) as error:
        message = f"no login or working directory on this node: {error}"
        raise _Stop(EXIT_HOST_FAULT, message) from None
    home = ready.environ.get("HOME", account.pw_dir)
    found = {k: v for k, v in environ.items() if k not in HOST_ONLY}
    found["SHELL"] = account.pw_shell or "/bin/sh"
    for name in _PATHS:
        if name in found:
            found[name] = _moved(found[name], account.pw_dir, home)
    mask = os.umask(0o077)
    os.umask(mask)
    return Script(
        name="" if batch.path is None else batch.path.name,
        content=b"" if batch.path is None else _read_script(batch.path),
        environ=found | dict(ready.environ),
        cwd=_moved(here, account.pw_dir, home),
        interpreter=ready.shell,
        args=batch.args,
        umask=mask,
        limits={n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}")) for n in _LIMITS},
        merge=_same_file(streams.stdout, streams.stderr),
        grace=ready.grace,
        prologue=ready.prologue,
        epilogue=ready.epilogue,
        interactive=batch.path is None,
    )


def _run(ready: Proof, script: Script, plugins: Callable[[str], GuestTypes], s: Streams) -> int:
    first = next((guest for guest in ready.guests if guest.rank == 0), None)
    if first is None:
        raise _Stop(EXIT_NO_PROOF, "the proof names no guest of rank 0; nothing was run")
    guest = ReadyGuest(first.name, first.hostname, first.rank, Path(first.run_dir))
    interactive = script.interactive
    job = Streams(s.stdin if interactive else None, s.stdout, s.stderr, terminal=interactive)
    try:
        driver = plugins(ready.plugin).guest_type(ready.guest_type).driver()
        return driver.run(guest, script, job)
    except GuestDied as error:
        why = printable(str(error), 500) or "its stream broke"
        message = f"the guest {guest.hostname} ({guest.name}) died while the job ran: {why}"
        raise _Stop(EXIT_GUEST_DIED, message) from None
    except Refused as error:
        raise _Stop(EXIT_REFUSED, printable(str(error), 2000)) from None
    except Exception as error:  # a plugin's defect must not end in a traceback in the job's output
        what = str(error) if isinstance(error, VtorqueError) else f"{type(error).__name__}: {error}"
        message = f"the guest {guest.hostname} cannot be used: {printable(what, 2000)}"
        raise _Stop(EXIT_HOST_FAULT, message) from None


def _keep(ready: Proof, code: int, streams: Streams) -> None:
    """Leave the guests running until the batch system ends the job (walltime, qdel, Ctrl-C)."""
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    _say(
        streams,
        f"the script has ended with {code}; keep=true: its guests stay until the job is ended "
        f"(vmgr ssh {ready.job}, vmgr cancel {ready.job})",
    )
    signal.sigwait(ending)


def _read_script(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _Stop(EXIT_FAILED, f"the script {printable(str(path))} is no regular file")
            content = file.read(MAX_SCRIPT + 1)
    except OSError as error:
        raise _Stop(
            EXIT_FAILED, f"the script {printable(str(path))} cannot be read: {error.strerror}"
        ) from None
    if len(content) > MAX_SCRIPT:
        raise _Stop(EXIT_FAILED, f"the script is longer than {MAX_SCRIPT >> 20} MiB")
    return content


def _moved(path: str, host_home: str, guest_home: str) -> str:
    """Return a path below the host's home as the guest sees it; other paths unchanged."""
    if path == host_home or path.startswith(host_home.rstrip("/") + "/"):
        return guest_home + path[len(host_home.rstrip("/")) :]
    return path


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False  # one is closed


def _say(streams: Streams, message: str) -> None:
    """Write one line to the job's stderr, all of it, whatever it is."""
    data = os.fsencode(f"vtorque: {message}\n")
    try:
        while data:
            data = data[os.write(streams.stderr, data) :]
    except OSError:
        return  # a full disk or a closed terminal: the exit code still tells
