"""Poll the owner's home for requests about a running job, and answer them.

If the batch system cannot run commands on nodes, the job shell (pid JOBSHELL) starts ``python -I -m
vtorque_login.companion CONFIG JOB NODE SECONDS JOBSHELL`` as the owner. The process opens no port.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from vtorque_core.api import VtorqueError
from vtorque_login import requests

MOST = 8  # answers at a time
_LAST_WORDS = 0.2  # seconds for answers to report that the script has ended


class Companion:
    """The processes that answer requests about one job.

    ``environ`` is the job's environment, which the batch system's pbsdsh needs.
    """

    def __init__(self, config: Path, job_id: str, node: str, environ: Mapping[str, str]) -> None:
        self._config, self._job_id, self._node = config, job_id, node
        self._environ = environ
        self._running: list[subprocess.Popen[bytes]] = []
        self._passed_on: dict[str, float] = {}  # expiry of each request, Unix seconds

    def poll(self) -> None:
        """Start a process for each new request file. Ignore invalid files."""
        self._running = [child for child in self._running if child.poll() is None]
        with contextlib.suppress(OSError, VtorqueError), requests.directory(self._job_id) as place:
            self._forget_expired(place)
            for name in requests.names(place, MOST, self._passed_on):
                if len(self._running) < MOST:
                    with contextlib.suppress(OSError, ValueError, VtorqueError):
                        self._answer(place, name)

    def _forget_expired(self, place: int) -> None:
        now = time.time()
        for name in [name for name, expires in self._passed_on.items() if expires < now]:
            del self._passed_on[name]
            with contextlib.suppress(OSError):
                requests.withdraw(place, name)

    def _answer(self, place: int, name: str) -> None:
        try:
            request = requests.parse_request(requests.read(place, name), self._job_id)
        except VtorqueError:
            requests.withdraw(place, name)
            raise
        program = [sys.executable, "-I", "-m", "vtorque_login.answer"]
        argv = [*program, str(self._config), self._job_id, name]
        if request.node in ("", self._node):
            self._start(argv, answer_environ())
            return
        self._passed_on[name] = request.expires
        self._start(self._on_all_nodes([*argv, request.node]), self._job_environ())

    def _start(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._running.append(
            subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=environ, cwd="/",
            )
        )  # fmt: skip

    def _on_all_nodes(self, argv: Sequence[str]) -> list[str]:
        from vtorque_core.live import service  # noqa: PLC0415 - few requests need it

        _, batch = service.batch_system(self._config)
        return batch.shell().node_command(argv, self._job_environ())

    def _job_environ(self) -> dict[str, str]:
        """Return the job's variables that the batch system's commands need.

        PBS_O_PATH is reduced to directories that only root can change.
        """
        kept = {k: v for k, v in self._environ.items() if k.startswith(("PBS_", "SLURM_"))}
        places = kept.get("PBS_O_PATH", "").split(":")
        return kept | answer_environ() | {"PBS_O_PATH": ":".join(filter(_is_root_only, places))}


def answer_environ() -> dict[str, str]:
    """Return the environment of a process that answers a request, without the job's variables."""
    account = pwd.getpwuid(os.getuid())
    return {
        "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": account.pw_dir,
        "USER": account.pw_name, "LOGNAME": account.pw_name,
    }  # fmt: skip


def _is_root_only(place: str) -> bool:
    """Return whether ``place`` is absolute, contains no link, and can be changed only by root."""
    path = Path(place)
    if not path.is_absolute() or os.path.realpath(place) != place:
        return False
    with contextlib.suppress(OSError):
        found = [each.lstat() for each in (path, *path.parents)]
        return all(each.st_uid == 0 and not each.st_mode & 0o022 for each in found)
    return False


def _end(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # the job shell gave this process its own session
    with contextlib.suppress(OSError, VtorqueError):
        requests.remove(sys.argv[2])
    time.sleep(_LAST_WORDS)
    os.killpg(0, signal.SIGKILL)  # processes that ignore SIGTERM, and this one
    os._exit(0)


def main() -> NoReturn:
    """Poll for request files until the job ends or the job shell is killed."""
    _, config, job_id, node, seconds, jobshell = sys.argv
    signal.signal(signal.SIGTERM, _end)
    companion = Companion(Path(config), job_id, node, dict(os.environ))
    while os.getppid() == int(jobshell):
        companion.poll()
        time.sleep(float(seconds))
    _end()


if __name__ == "__main__":
    main()
