"""Job shell: the batch system starts it as the user, instead of the user's shell.

It waits for root's proof, passes the script to the guest type's driver, and returns the script's
exit status. It never runs the script on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import kept_records
from vtorque_core.api.batch_system import JobShell, ShellStart
from vtorque_core.api.guest_driver import GuestDied, Script, Streams
from vtorque_core.base import errors
from vtorque_core.base.errors import HostFault, Refused, UsageError, VtorqueError, printable
from vtorque_core.base.names import Paths
from vtorque_core.node.shell import proof as proofs
from vtorque_core.node.shell.proof import Proof

if TYPE_CHECKING:
    from vtorque_core.config.plugins import Plugins

AWAIT = "--await-job"  # the job shell's own option

SLACK = 5.0  # seconds after the proof's deadline; then the prologue is assumed dead
MAX_SCRIPT = 64 << 20  # bytes of a script

# Paths, sockets and displays of the host, or of the login that submitted with -V.
HOST_ONLY = frozenset((
    "DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "HOSTNAME", "INVOCATION_ID", "JOURNAL_STREAM",
    "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "NOTIFY_SOCKET", "OLDPWD", "SHLVL",
    "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TMPDIR", "WAYLAND_DISPLAY",
    "XAUTHORITY", "XDG_RUNTIME_DIR", "XDG_SESSION_ID", "_",
))  # fmt: skip
# Variables with paths in which the host's home is replaced by the guest's.
_PATHS = ("PBS_O_WORKDIR", "PBS_O_INITDIR", "PBS_O_HOME", "PWD")
# Limits (getrlimit(2)) that the script gets in the guest. Not DATA, which pbs_mom sets from
# -l mem: the guest's RAM is the limit.
_LIMITS = ("CORE", "CPU", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK", "AS")


def import_drivers(plugins: Plugins) -> None:
    with contextlib.suppress(Exception):
        for guest_type in plugins.guest_types().values():
            guest_type.driver()


@dataclass(frozen=True)
class PluginCalls:
    """Functions through which the job shell calls plugins.

    Attributes:
        load: loads the plugin that the proof names.
        beside: context manager that runs plugins' commands beside the script.
        after: called with the exit status of a started script.
        meanwhile: called once to import modules, if the guests are not ready yet.
    """

    load: Callable[[str], Plugins]
    beside: Callable[[Proof], contextlib.AbstractContextManager[None]] = lambda _: (
        contextlib.nullcontext()
    )
    after: Callable[[Proof, int], None] = lambda _proof, _code: None
    meanwhile: Callable[[], None] | None = None


def run_job(
    paths: Paths,
    shell: JobShell,
    argv: Sequence[str] = (),
    *,
    calls: PluginCalls,
    environ: Mapping[str, str] | None = None,
    streams: Streams = Streams(0, 1, 2),  # noqa: B008 (frozen)
    owner_uid: int = 0,
) -> int:
    """Run the job in its guest; return its exit status, or an ``errors.EXIT_*`` code.

    Prints errors instead of raising them. The proof must belong to ``owner_uid``.
    """
    environ = dict(os.environ if environ is None else environ)
    shown = ShownLog(paths, functools.partial(_say, streams))
    begun: list[Proof] = []
    around = contextlib.ExitStack()
    waiting = [calls.beside]

    def note_proof(found: Proof) -> None:
        if job.script is not None:  # nothing is printed into the terminal of an interactive job
            shown.start(found)
        if waiting and found.state in ("starting", "ready"):
            around.enter_context(waiting.pop()(found))

    try:
        job = shell.read_start(argv, environ, streams.stdin)
        ready = _await_proof(paths, job.job_id, owner_uid, note_proof, calls.meanwhile)
        _lock_job_shell(paths.job_shell(ready.job.key))
        for line in ready.detail:
            _say(streams, f"warning: {printable(line, 2000)}")
        if len(ready.nodes) > 1:
            _await_other_nodes(paths, shell, job, ready, environ, streams)
        script = make_script(shell, job, ready, environ, streams)
        script = _add_user_files(script, paths, ready)
        begun += [ready] if job.script is not None else []
        stdin = streams.stdin if job.script is None else None
        code = _run(ready, script, calls.load, replace(streams, stdin=stdin))
        if ready.keep:
            _keep(ready, code, streams)
    except _Stop as error:
        for line in (error.message, *error.detail):
            _say(streams, line)
        code = error.code
    except UsageError as error:
        _say(streams, str(error))
        code = errors.EXIT_USAGE
    except KeyboardInterrupt:  # before the driver installs its handlers
        code = errors.EXIT_SIGNAL + signal.SIGINT
    finally:
        around.close()
        shown.stop()
    if begun:
        calls.after(begun[0], code)
    return code


def _lock_job_shell(lock: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


class _Stop(Exception):
    def __init__(self, code: int, message: str, detail: Sequence[str] = ()) -> None:
        self.code = code
        self.message = message
        self.detail = detail
        super().__init__(message)


def _await_proof(
    paths: Paths,
    job_id: str,
    owner_uid: int,
    seen: Callable[[Proof], None] = lambda _: None,
    meanwhile: Callable[[], None] | None = None,
) -> Proof:
    ended = locked = False
    while True:
        try:
            found = proofs.read(paths, job_id, os.getuid(), owner_uid)
        except HostFault as error:
            raise _Stop(errors.EXIT_NO_PROOF, f"{error}; nothing was run") from None
        if found is None:
            raise _Stop(
                errors.EXIT_NO_PROOF,
                f"root has not proven on this node that the guest of job {printable(job_id)} is "
                "ready (the batch system's root prologue was skipped or killed); nothing was run",
            )
        seen(found)
        if found.state == "ready":
            return found
        detail = [printable(line) for line in found.detail]
        if found.state == "refused":
            raise _Stop(errors.EXIT_REFUSED, printable(found.reason, 2000), detail)
        if found.state == "host_fault":
            raise _Stop(errors.EXIT_HOST_FAULT, printable(found.reason, 2000), detail)
        if ended:  # the starter had ended before this proof was read
            reason = "root's prologue ended while it was starting the guests (was it killed?)"
            raise _Stop(errors.EXIT_HOST_FAULT, f"{reason}; nothing was run")
        if found.state == "requeued" and not locked:
            locked = proofs.lock(paths, job_id)  # root waits for this lock, then requeues the job
        ended = found.starter_has_ended()
        if time.monotonic() > found.deadline + SLACK:
            if found.state == "requeued":
                reason = f"{printable(found.reason, 2000)}; the job could not be requeued"
                raise _Stop(errors.EXIT_HOST_FAULT, f"{reason}; nothing was run")
            reason = "the guests were not ready before [node] start_timeout; nothing was run"
            raise _Stop(errors.EXIT_NO_PROOF, reason)
        if meanwhile is not None:
            meanwhile()
            meanwhile = None
        if not ended:
            time.sleep(proofs.POLL)


def _await_other_nodes(
    paths: Paths,
    shell: JobShell,
    job: ShellStart,
    ready: Proof,
    environ: Mapping[str, str],
    streams: Streams,
) -> None:
    """Wait until the guests of all nodes are ready, or fail the whole job.

    The batch system runs the job shell with :data:`AWAIT` on each node, to check the node's proof.
    """
    import subprocess  # noqa: PLC0415 - most jobs have one node

    words = [str(paths.jobshell), AWAIT, job.job_id]
    command = shell.node_command(words, environ, ready.nodes)
    left = max(ready.deadline + 2 * SLACK - time.monotonic(), SLACK)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=streams.stderr, stderr=streams.stderr,
            timeout=left, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return
        reason = (
            f"not all of the job's {len(ready.nodes)} nodes have their guests ready "
            f"({Path(command[0]).name} ended with {done.returncode})"
        )
    except FileNotFoundError:
        reason = f"{command[0]}: not found on this node"
    except subprocess.TimeoutExpired:
        reason = (
            f"the guests of the job's {len(ready.nodes)} nodes were not all ready "
            f"{left:.0f} s after those of this node"
        )
    raise _Stop(errors.EXIT_HOST_FAULT, f"{reason}; nothing was run")


def await_local_proof(paths: Paths, job_id: str, *, stderr: int = 2, owner_uid: int = 0) -> int:
    """Wait until this node's guests are ready, and return 0.

    If a guest cannot become ready, prints the reason and returns an ``errors.EXIT_*`` code.
    """
    try:
        ready = _await_proof(paths, job_id, owner_uid)
        code, lines = errors.EXIT_OK, [f"warning: {printable(line, 2000)}" for line in ready.detail]
    except _Stop as error:
        code, lines = error.code, [error.message, *error.detail]
    for line in lines:
        _say(Streams(None, stderr, stderr), f"{socket.gethostname()}: {line}")
    return code


def make_script(
    shell: JobShell, job: ShellStart, ready: Proof, environ: Mapping[str, str], streams: Streams
) -> Script:
    """Return the script with its environment and working directory in the guest.

    The environment is that of the batch system, with these changes:

    - :data:`HOST_ONLY`, and ``host_only`` of the batch system, are removed.
    - SHELL is the login shell instead of the job shell.
    - Variables that plugins define (``EnvVar``) are added.
    - In paths (``PBS_O_WORKDIR``), the guest's home replaces the host's home.
    """
    try:
        account = pwd.getpwuid(os.getuid())
        here = job.cwd or os.getcwd()  # noqa: PTH109
    except (KeyError, OSError) as error:
        message = f"the login name or the working directory is missing on this node: {error}"
        raise _Stop(errors.EXIT_HOST_FAULT, message) from None
    home = ready.environ.get("HOME", account.pw_dir)
    homes = (account.pw_dir, os.path.realpath(account.pw_dir))
    found = {k: v for k, v in environ.items() if k not in HOST_ONLY | shell.host_only}
    found["SHELL"] = account.pw_shell or "/bin/sh"
    for name in _PATHS:
        if name in found:
            found[name] = _translate_path(found[name], homes, home)
    found |= ready.command_environ(found)
    mask = os.umask(0o077)
    os.umask(mask)
    return Script(
        name="command" if job.script is None else job.script.name,
        content=(
            os.fsencode(job.command)
            if job.script is None
            else shell.content(_read_script(job.script))
        ),
        environ={**found, **shell.guest_env(found, ready.environ)},
        cwd=_translate_path(here, homes, home),
        interpreter=ready.shell,
        login=shell.login,
        args=job.args,
        umask=mask,
        limits={n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}")) for n in _LIMITS},
        merge=_same_file(streams.stdout, streams.stderr),
        grace=ready.grace,
        interactive=job.script is None and not job.command,
    )


def _add_user_files(script: Script, paths: Paths, ready: Proof) -> Script:
    try:
        prologue, epilogue = (proofs.user_file(paths, ready, name) for name in proofs.USER_FILES)
    except HostFault as error:
        raise _Stop(errors.EXIT_HOST_FAULT, f"{error}; nothing was run") from None
    return replace(script, prologue=prologue, epilogue=epilogue)


def _run(ready: Proof, script: Script, plugins: Callable[[str], Plugins], streams: Streams) -> int:
    guest = min(ready.guests, key=lambda guest: guest.rank, default=None)
    if guest is None or (guest.rank != 0 and streams.stdin is None):  # other nodes only run steps
        raise _Stop(errors.EXIT_NO_PROOF, "root's proof does not list guest 0; nothing was run")
    job = replace(streams, terminal=streams.stdin is not None and os.isatty(streams.stdin))
    try:
        driver = plugins(ready.plugin).guest_type(ready.guest_type).driver()
        return driver.run(guest, script, job)
    except GuestDied as error:
        why = printable(str(error), 500) or "the stream failed"
        message = f"the guest {guest.hostname} ({guest.name}) died while the job ran: {why}"
        raise _Stop(errors.EXIT_GUEST_DIED, message) from None
    except Refused as error:
        raise _Stop(errors.EXIT_REFUSED, printable(str(error), 2000)) from None
    except Exception as error:  # a plugin's defect must not end in a traceback in the job's output
        what = str(error) if isinstance(error, VtorqueError) else f"{type(error).__name__}: {error}"
        message = f"the guest {guest.hostname} cannot be used: {printable(what, 2000)}"
        raise _Stop(errors.EXIT_HOST_FAULT, message) from None


def _keep(ready: Proof, code: int, streams: Streams) -> None:
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    _say(
        streams,
        f"the script has exited with status {code}; keep=true: its guests run until "
        f"the job ends (vmgr ssh {ready.job.id}, vmgr cancel {ready.job.id})",
    )
    signal.sigwait(ending)


def _read_script(path: Path) -> bytes:
    name = f"the script {printable(str(path))}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _Stop(errors.EXIT_FAILED, f"{name} is not a regular file")
            content = file.read(MAX_SCRIPT + 1)
    except OSError as error:
        why = f"{name} cannot be read: {error.strerror}"
        raise _Stop(errors.EXIT_FAILED, why) from None
    if len(content) > MAX_SCRIPT:
        raise _Stop(errors.EXIT_FAILED, f"the script is longer than {MAX_SCRIPT >> 20} MiB")
    return content


def _translate_path(path: str, host_homes: Sequence[str], guest_home: str) -> str:
    for home in host_homes:
        if path == home or path.startswith(home.rstrip("/") + "/"):
            return guest_home + path[len(home.rstrip("/")) :]
    return path


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False  # one is closed


def _say(streams: Streams, message: str) -> None:
    data = os.fsencode(f"vtorque: {message}\n")
    try:
        while data:
            data = data[os.write(streams.stderr, data) :]
    except OSError:
        return  # a full disk or a closed terminal: the exit status still reports it


_LAST_LINES = 2.0  # seconds to print the last lines; a stderr that nobody reads would block


class ShownLog:
    """A thread that prints the job's log to the user, if ``-vm show_log=true``."""

    def __init__(self, paths: Paths, say: Callable[[str], None]) -> None:
        self._paths = paths
        self._say = say
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, proof: Proof) -> None:
        if not proof.show_log or self._thread is not None:
            return
        place = kept_records.place(self._paths, proof.job)
        self._thread = threading.Thread(target=self._copy, args=(place,), daemon=True)
        # The thread inherits the mask: signals are for the main thread, which may block and await
        # them (pthread_sigmask(3)).
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join(_LAST_LINES)

    def _copy(self, place: kept_records.Place) -> None:
        from vtorque_core.api import job_log  # noqa: PLC0415 - few jobs need it

        for entry in job_log.entries(place, self._over.is_set):
            self._say(job_log.text(entry))
