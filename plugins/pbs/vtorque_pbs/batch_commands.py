"""Run the batch system's commands: as the user on the user's terminal, or as root."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import HostFault, UsageError
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf

RERUN_TIME = 3.0  # seconds to wait for the server's refusal of a requeue
REQUEUE_TIME = 120.0  # seconds to wait for it if the job shell has to report the refusal
# sh(1): qrerun JOB, then retry qalter -l WHAT JOB for 300 s, until the job has ended.
_RERUN = """
"$1" "$2" || exit
for _ in $(seq 300); do "$3" -l "$4" "$2" && exit; sleep 1; done
logger -p daemon.err -t vtorque "job $2: no qalter -l $4: it may restart on another node"
"""
_SSH_CONFIG = Path("/etc/ssh/ssh_config")  # ssh_config(5): the site's
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}


def user_command(settings: Settings, program: str, programs: Sequence[str]) -> str:
    """Return the path of a command that this process runs as the user.

    ``programs`` are directories to search besides PATH, because processes on a job's node lack the
    user's PATH.
    """
    places = [os.environ.get("PATH", os.defpath), *programs]
    found = shutil.which(program, path=settings.bindir or ":".join(places))
    if found is None:
        where = settings.bindir or "PATH"
        raise UsageError(f"{program}: not found in {where}; set [plugin.pbs] bindir")
    return found


def run_with_streams(argv: Sequence[str], stdin: int | None = None) -> int:
    """Run a command with this process's streams; return its exit status as a shell would.

    ``stdin`` is passed to :func:`subprocess.run`.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself receives Ctrl-C
    try:
        done = subprocess.run(argv, stdin=stdin, check=False, preexec_fn=_hear_ctrl_c)
    except OSError as error:
        raise UsageError(f"{argv[0]}: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def ssh_command(job_id: str, node: str, command: Sequence[str], terminal: bool) -> list[str]:
    """Return an ssh command for a node, quoted for the login shell on that node.

    ``~/.ssh/config`` is ignored. Root may run this command for the job's owner, and the owner's
    ``ProxyCommand`` would then run as root on this host.
    """
    config = str(_SSH_CONFIG) if _SSH_CONFIG.is_file() else "none"
    tty = "-t" if terminal else "-T"
    return ["ssh", "-F", config, tty, "--", node, shlex.join(command)]


def step(site: Site) -> StepOf | None:
    """Return :func:`ssh_command`, which ``vmgr`` uses to run a command on a job's node.

    Return None if ``[plugin.pbs] ssh`` is off.
    """
    return ssh_command if site[Settings].ssh else None


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def login_name() -> str:
    """Return the calling user's login name, or the uid of a user without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Standard error as one short line, or standard output if standard error is empty."""
        return " ".join((self.err.strip() or self.out.strip()).split())[:500]


class Commands:
    """The batch system's commands for root on a node."""

    def __init__(self, settings: Settings, directories: Iterable[str]) -> None:
        self._path = settings.bindir or ":".join(directories)

    def ask(self, program: str, *args: str, timeout: float = 30.0) -> CommandResult:
        """Run a command. Raise HostFault if it is missing or times out."""
        found = self._find_program(program)
        try:
            done = subprocess.run(
                [found, *args], stdin=subprocess.DEVNULL, capture_output=True, env=_ENVIRON,
                timeout=timeout, check=False, cwd="/",
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostFault(f"{program}: {error}") from None
        out, err = (data.decode("utf-8", "surrogateescape") for data in (done.stdout, done.stderr))
        return CommandResult(done.returncode, out, err)

    def run_checked(self, program: str, *args: str, timeout: float = 30.0) -> str:
        """Run a command and return its output. Raise HostFault if it fails."""
        answer = self.ask(program, *args, timeout=timeout)
        if answer.code:
            what = f"{program} ended with exit code {answer.code}"
            raise HostFault(f"{what}: {answer.words}" if answer.words else what)
        return answer.out

    def rerun(self, job_id: str, then: str = "", wait: float = RERUN_TIME) -> None:
        """Requeue a running job with qrerun, then change its resources with ``qalter -l``.

        OpenPBS's qrerun returns after the job has ended and this node has released it. Torque's
        qrerun returns earlier, and the server refuses qalter until the job has ended.

        Args:
            job_id: The job.
            then: Value of ``qalter -l`` for the next start; empty for no change.
            wait: Seconds to wait for the commands. After that time, the requeue counts as
                accepted, and the commands continue in the background.

        Raises:
            HostFault: The server refuses, or qrerun is missing.
        """
        argv = [self._find_program("qrerun"), job_id]
        if then:
            argv = ["/bin/sh", "-c", _RERUN, "sh", *argv, self._find_program("qalter"), then]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=_ENVIRON, cwd="/", start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(wait)
        except subprocess.TimeoutExpired:
            process.returncode = 0  # qrerun continues in the background
            return
        if code:
            raise HostFault(f"qrerun {job_id} ended with exit code {code}")

    def _find_program(self, program: str) -> str:
        found = shutil.which(program, path=self._path)
        if found is None:
            raise HostFault(f"{program}: not found in {self._path}; set [plugin.pbs] bindir")
        return found
