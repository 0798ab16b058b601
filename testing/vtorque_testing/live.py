"""Live part of the batch contract: real jobs in real guests, as an ordinary user.

Example::

    @pytest.mark.e2e
    class TestMyJobs(LiveBatchContract):
        @pytest.fixture
        def live(self, cluster):
            return MyLiveHarness(cluster)

The subclass sets the mark, and the fixture that detects leftovers on the host.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import pytest

from vtorque_core.base.errors import EXIT_REFUSED
from vtorque_core.site.request import Request
from vtorque_testing.harness import Ended

Phase = Literal["queued", "starting", "running", "gone"]

START = 120.0  # seconds until a job that can run must do so: a guest boots meanwhile


@dataclass(frozen=True)
class LiveDialect:
    """What differs between batch systems.

    Args:
        busy: options of a bare-metal job beside which no other can run.
        walltime: options that limit a job to that many seconds.
        cancelled, late: exit codes of a job that its user has cancelled while it ran, and of one
            that has run out of time. A script that handles TERM may end with its own.
        environ: variables that every job has inside the guest, and what matches their values.
    """

    busy: tuple[str, ...]
    walltime: Callable[[int], list[str]]
    cancelled: frozenset[int]
    late: frozenset[int]
    environ: Mapping[str, str]


class LiveHarness(Protocol):
    """The batch system, from a user's side; ``vsub`` and what the site's users have."""

    @property
    def dialect(self) -> LiveDialect:
        """What is particular to it."""
        ...

    @property
    def home(self) -> Path:
        """The user's home, which the guests have too."""
        ...

    def submit(self, script: bytes, *args: str) -> str:
        """Submit with ``vsub`` and these options; return the job's id at once."""
        ...

    def submit_forged(self, script: bytes, blob: bytes) -> str:
        """Submit with these bytes as the request, past vsub's own check; return the id."""
        ...

    def phase(self, job_id: str) -> Phase:
        """Return where the job is; ``starting`` while root's prologue boots its guests."""
        ...

    def wait(self, job_id: str) -> Ended:
        """Wait for the job's end; return its exit code and its two output files.

        Of a job that never ran the code may be anything but 0, and the output empty.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Cancel the job as its user."""
        ...


class LiveBatchContract:
    """Subclass it, name it ``Test...``, mark it, override the fixture ``live``."""

    @pytest.fixture
    def live(self) -> LiveHarness:
        """Return the harness of the batch system under test."""
        raise NotImplementedError("override the fixture live() in the subclass")

    @pytest.mark.parametrize(
        ("end", "code"), [("exit 42", 42), ("kill -9 $$", 137), ("no-such", 127)]
    )
    def test_the_exit_code_is_the_scripts(self, live: LiveHarness, end: str, code: int) -> None:
        """As the batch system's user sees it."""
        assert live.wait(live.submit(f"#!/bin/sh\n{end}\n".encode())).code == code

    def test_output_arrives_byte_by_byte(self, live: LiveHarness) -> None:
        """Both streams, apart, whatever bytes; standard input is at its end."""
        octal = "".join(f"\\{i:03o}" for i in range(256))
        text = f"#!/bin/sh\ncat\nprintf '{octal}'\nprintf '{octal}{octal}' >&2\n"
        ended = live.wait(live.submit(text.encode()))
        assert (ended.code, ended.stdout) == (0, bytes(range(256)))
        assert ended.stderr == bytes(range(256)) * 2

    def test_the_environment_of_a_job(self, live: LiveHarness) -> None:
        """The batch system's variables are there, and none that names the host's programs."""
        names = live.dialect.environ
        lines = "".join(f'echo "{name}=${name}"\n' for name in sorted(names))
        ended = live.wait(live.submit(f"#!/bin/sh\n{lines}echo $SHELL\n".encode()))
        *found, shell = ended.stdout.decode().splitlines()
        for line, name in zip(found, sorted(names), strict=True):
            assert re.fullmatch(f"{name}={names[name]}", line), line
        assert "vtorque" not in shell

    def test_vm_and_bare_metal_jobs_look_alike(self, live: LiveHarness) -> None:
        """Same script, same output and code, but another kernel."""
        text = b"#!/bin/sh\necho $0 $# | sed 's,.*/,,'; pwd; id -u; umask; exit 5\n"
        bare, guest = (live.wait(live.submit(text, *vm)) for vm in (("-vm", "none"), ()))
        assert (bare.code, bare.stderr) == (guest.code, guest.stderr)
        assert bare.stdout.splitlines()[1:] == guest.stdout.splitlines()[1:]

    def test_a_queued_job_is_cancelled(self, live: LiveHarness) -> None:
        """Nothing of it is started."""
        first = live.submit(b"#!/bin/sh\nsleep 600\n", "-vm", "none", *live.dialect.busy)
        self.until(live, first, "running")
        second = live.submit(b"#!/bin/sh\necho ran\n")
        assert live.phase(second) == "queued"
        live.cancel(second)
        assert b"ran" not in live.wait(second).stdout
        live.cancel(first)
        live.wait(first)
        assert (live.phase(first), live.phase(second)) == ("gone", "gone")

    def test_a_starting_job_is_cancelled(self, live: LiveHarness) -> None:
        """In the prologue: its guests go, its script never runs."""
        job = live.submit(b"#!/bin/sh\necho ran\n")
        self.until(live, job, "starting")
        live.cancel(job)
        ended = live.wait(job)
        assert ended.code != 0
        assert b"ran" not in ended.stdout

    def test_a_running_job_is_cancelled(self, live: LiveHarness) -> None:
        """The script in the guest gets TERM and has time to end."""
        job = self.running(live, b"trap 'echo got TERM; exit 9' TERM\n")
        live.cancel(job)
        ended = live.wait(job)
        assert ended.code in live.dialect.cancelled | {9}
        assert ended.stdout == b"got TERM\n"

    def test_a_job_that_ignores_its_cancellation_is_killed(self, live: LiveHarness) -> None:
        """KILL follows."""
        job = self.running(live, b"trap '' TERM\n")
        live.cancel(job)
        assert live.wait(job).code in live.dialect.cancelled

    def test_walltime(self, live: LiveHarness) -> None:
        """As a cancellation, with its own exit code."""
        text = b"#!/bin/sh\ntrap 'echo got TERM; exit 9' TERM\n" + LOOP
        ended = live.wait(live.submit(text, *live.dialect.walltime(10)))
        assert ended.code in live.dialect.late | {9}
        assert ended.stdout == b"got TERM\n"

    @pytest.mark.parametrize("blob", [b"{", Request((("nosuch", "1"),)).encode()])
    def test_a_refused_request_ends_the_job_with_the_reason(
        self, live: LiveHarness, blob: bytes
    ) -> None:
        """In its own output, at once; the next job runs."""
        ended = live.wait(live.submit_forged(b"#!/bin/sh\necho ran\n", blob))
        assert ended.code == EXIT_REFUSED
        assert ended.stdout == b""
        assert re.search(rb"vtorque: .*(request|nosuch)", ended.stderr)
        assert live.wait(live.submit(b"#!/bin/sh\necho ran\n")).stdout == b"ran\n"

    def running(self, live: LiveHarness, trap: bytes) -> str:
        """Return the id of a job that has set its trap and goes on for long."""
        mark = live.home / f"running{time.monotonic_ns()}"
        begun = f': > "$HOME/{mark.name}"\n'.encode()
        job = live.submit(b"#!/bin/sh\n" + trap + begun + LOOP)
        end = time.monotonic() + START
        while not mark.exists():
            assert time.monotonic() < end, f"{job} is {live.phase(job)}, not running"
            time.sleep(0.02)
        mark.unlink()
        assert live.phase(job) == "running"
        return job

    def until(self, live: LiveHarness, job: str, phase: Phase) -> None:
        """Wait for a phase of a job."""
        end = time.monotonic() + START
        while (found := live.phase(job)) != phase:
            assert found != "gone", f"{job} has ended and never was {phase}"
            assert time.monotonic() < end, f"{job} is {found}, not {phase}, after {START} s"
            time.sleep(0.02)


LOOP = b"n=0\nwhile [ $n -lt 6000 ]; do sleep 0.1; n=$((n + 1)); done\n"
