"""The measured node (from ``scripts/node up``), and an ordinary user's jobs on it."""

from __future__ import annotations

import json
import os
import pwd
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import kept_records
from vtorque_core.base.names import Paths

USER = "vtbench"
DEADLINE = 300.0  # seconds for any single operation


@dataclass(frozen=True)
class Process:
    """Result of a process; ``cpu`` includes user and system time of its children."""

    code: int
    cpu: float
    out: bytes


@dataclass(frozen=True)
class JobTimes:
    """Unix times of a job; ``phases`` maps phases of its timeline to their start.

    ``released`` is when the journal was deleted, and ``ended`` when the epilogue's process ended.
    """

    submitted: float
    prologue: float
    first_line: float
    last_byte: float
    epilogue: float
    released: float
    ended: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class BenchNode:
    """A node, by the name given to ``scripts/node``, and the owner of the measured jobs."""

    name: str
    user: str = USER

    @property
    def prefix(self) -> Path:
        """The directory in which vTorque is installed."""
        return Path("/opt", self.name)

    @property
    def config(self) -> Path:
        """The path of the site config."""
        return Path("/etc", self.name, "vtorque.toml")

    @property
    def paths(self) -> Paths:
        """The directories of vTorque."""
        return Paths(state=Path("/var/lib", self.name), run=Path("/run", self.name))

    @property
    def home(self) -> Path:
        """The user's home directory."""
        return Path("/home", self.user)

    def popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command of the prefix's ``bin`` as the user, in their home directory."""
        entry = pwd.getpwnam(self.user)
        config = ["--config", str(self.config)] if argv[0] in ("vsub", "vmgr") else []
        environ = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": entry.pw_dir,
            "LANG": "C.UTF-8",
            "USER": self.user,
            "LOGNAME": self.user,
            "SHELL": "/bin/bash",
        }
        return subprocess.Popen(
            [str(self.prefix / "bin" / argv[0]), *config, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=entry.pw_dir,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=os.getgrouplist(self.user, entry.pw_gid),
            umask=0o022,
        )

    def run(self, argv: Sequence[str]) -> Process:
        """Run a command as the user and wait for its end; standard error is inherited."""
        child = self.popen(argv)
        assert child.stdout is not None
        with child.stdout:
            out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        return Process(child.returncode, usage.ru_utime + usage.ru_stime, out)

    def script(self, text: str) -> str:
        """Write the job script; return its file name."""
        path = self.home / "job.sh"
        path.write_text(text)
        return path.name

    def submit(self, text: str, *args: str) -> str:
        """Submit a job with output to ``out`` and ``err``; return its id."""
        for old in ("out", "err"):
            (self.home / old).unlink(missing_ok=True)
        done = self.run(["vsub", "-N", "b", "-o", "out", "-e", "err", *args, self.script(text)])
        if done.code:
            raise RuntimeError(f"vsub: exit code {done.code}")
        return done.out.decode().strip()

    def cancel(self, job: str) -> None:
        """Cancel a job, and wait until the node is idle."""
        self.run(["vmgr", "cancel", job])
        wait(self.idle, f"the end of {job}")

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs that have not ended."""
        found: list[dict[str, Any]] = json.loads(self.run(["vmgr", "ps", "--json"]).out)
        return [job for job in found if job["state"] != "C"]

    def idle(self) -> bool:
        """Return True if the batch system has no jobs."""
        return not self.jobs()

    def job(self, text: str, *args: str) -> JobTimes:
        """Run a job script; return the times of its events.

        The script writes its first line to stderr, and everything else to stdout. The times are the
        mtimes of the two files (resolution: one tick, 4 ms), so no process has to watch them.
        """
        submitted = time.time()
        job = self.submit(text, *args)
        prologue, _ = self._watch_hook(b"prologue")
        epilogue, ended = self._watch_hook(b"epilogue")
        wait(self.idle, "the batch system")
        out, err = self.home / "out", self.home / "err"
        if err.read_bytes() != b"first\n":
            raise RuntimeError(f"{job}: {err.read_bytes()!r}")
        released, phases = self.timeline(job)
        first, last = err.stat().st_mtime, out.stat().st_mtime
        return JobTimes(submitted, prologue, first, last, epilogue, released, ended, phases)

    def timeline(self, job: str) -> tuple[float, dict[str, float]]:
        """Return when an ended job was released, and when each phase of its start began."""
        facts = kept_records.find(self.paths, job)[-1].facts()
        return facts["ended"], {
            m["name"]: m["start"] for m in facts["phases"] if m["guest"] is None
        }

    def waited_for(self, text: str, *args: str) -> tuple[float, float]:
        """Run a job script with ``vsub -W block=true``, as a user would.

        Returns the seconds from vsub's start to the first line, and from the last line to vsub's
        end.
        """
        begun = time.time()
        job = self.submit(text, "-W", "block=true", *args)
        ended = time.time()
        out, err = self.home / "out", self.home / "err"
        if (out.read_bytes(), err.read_bytes()) != (b"last\n", b"first\n"):
            raise RuntimeError(f"{job}: {out.read_bytes()!r} {err.read_bytes()!r}")
        return err.stat().st_mtime - begun, ended - out.stat().st_mtime

    def writing(self, text: str, *args: str) -> float:
        """Run a job script; return the seconds from its first line to its last byte.

        The times are those of :meth:`job`, but bare-metal jobs are allowed too.
        """
        job = self.submit(text, *args)
        wait(self.idle, f"the end of {job}")
        out, err = self.home / "out", self.home / "err"
        if err.read_bytes() != b"first\n":
            raise RuntimeError(f"{job}: {err.read_bytes()!r}")
        return out.stat().st_mtime - err.stat().st_mtime

    def _watch_hook(self, name: bytes) -> tuple[float, float]:
        """Return when the next hook's process started (resolution: one tick, 10 ms) and ended."""
        tasks = Path(f"/proc/{self._service()}/task")
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for children in tasks.glob("*/children"):
                for child in _words(children).decode().split():
                    words = _words(Path("/proc", child, "cmdline")).split(b"\0")
                    if b"hook" in words and name in words:
                        began = _began(child)
                        _await_end(int(child))
                        return began, time.time()
            time.sleep(0.02)  # a shorter pause takes CPU time from the guest
        raise RuntimeError(f"no {name.decode()} was started")

    def _service(self) -> int:
        """Return the pid of the batch system; its children look the same until they call exec."""
        found = {}
        for entry in Path("/proc").iterdir():
            words = _words(entry / "cmdline").split(b"\0") if entry.name.isdigit() else []
            if b"serve" in words and str(self.config).encode() in words:
                found[entry.name] = (_stat(entry.name) or ["", ""])[1]
        for pid, parent in found.items():
            if parent not in found:
                return int(pid)
        raise RuntimeError(f"no batch system: scripts/node up --name {self.name}")


def _words(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended


def _stat(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on (proc(5)); empty if it has ended."""
    return _words(Path("/proc", pid, "stat")).decode().rpartition(")")[2].split()


def _began(pid: str) -> float:
    """Return the Unix time at which a process started."""
    ticks = int(_stat(pid)[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _await_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll(DEADLINE * 1000)
    os.close(handle)


def wait(condition: Any, what: str) -> None:
    """Wait until ``condition()`` is true. Raises RuntimeError after DEADLINE seconds."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {DEADLINE:g} s")
        time.sleep(0.05)


@contextmanager
def measured(name: str, user: str = USER) -> Iterator[BenchNode]:
    """Yield the node with a new user for its jobs; delete the user at the end."""
    node = BenchNode(name, user)
    subprocess.run(["userdel", "-f", "-r", user], check=False, capture_output=True)
    subprocess.run(["useradd", "-m", "-s", "/bin/bash", user], check=True)
    try:
        node.home.chmod(0o700)
        if not node.idle():
            raise RuntimeError(f"{name} has other jobs")
        yield node
    finally:
        for job in node.jobs():
            if job["owner"] == user:
                node.cancel(job["id"])
        subprocess.run(["userdel", "-r", user], check=False, capture_output=True)
