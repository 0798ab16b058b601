"""Live part of the batch contract: an ordinary user's jobs in real guests.

Example::

    @pytest.mark.e2e
    class TestMyJobs(LiveBatchContract):
        @pytest.fixture
        def live(self, cluster):
            return MyLiveHarness(cluster)

The subclass sets a pytest mark, and has a fixture that fails if jobs leave files or processes on
the host.
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
from vtorque_core.config.request import Request
from vtorque_testing.harness import ProgramResult

Phase = Literal["queued", "starting", "running", "gone"]

START = 120.0  # seconds until a job must run, including the boot of its guest


@dataclass(frozen=True)
class LiveDialect:
    """Properties in which batch systems differ.

    Args:
        busy: options of a bare-metal job that occupies the node, so that other jobs are queued.
        walltime: returns options that limit a job to this number of seconds.
        cancelled: possible exit statuses of a canceled job whose script does not handle SIGTERM.
        late: possible exit statuses after the time limit, if the script does not handle SIGTERM.
        environ: variables of every job inside the guest, with regular expressions for their values.
    """

    busy: tuple[str, ...]
    walltime: Callable[[int], list[str]]
    cancelled: frozenset[int]
    late: frozenset[int]
    environ: Mapping[str, str]


class LiveHarness(Protocol):
    """The batch system and ``vsub``, as an ordinary user of the site sees them."""

    @property
    def dialect(self) -> LiveDialect:
        """Properties of this batch system."""
        ...

    @property
    def home(self) -> Path:
        """The user's home directory, which the guests share."""
        ...

    def submit(self, script: bytes, *args: str) -> str:
        """Submit with ``vsub`` and these options; return the job's id immediately."""
        ...

    def submit_forged(self, script: bytes, blob: bytes) -> str:
        """Submit with these bytes as the request, without vsub's checks; return the job's id."""
        ...

    def phase(self, job_id: str) -> Phase:
        """Return a job's phase, which is ``starting`` while root's prologue boots the guests."""
        ...

    def wait(self, job_id: str) -> ProgramResult:
        """Wait until the job ends; return its exit status and its two output files.

        For a job that never ran, the status may be any nonzero value, and the output empty.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Cancel the job as its user."""
        ...


class LiveBatchContract:
    """Tests of real jobs.

    Subclass as ``Test...``, set a pytest mark, and override the fixture ``live``.
    """

    @pytest.fixture
    def live(self) -> LiveHarness:
        """Return the harness of the batch system under test."""
        raise NotImplementedError("override the fixture live() in the subclass")

    @pytest.mark.parametrize(
        ("end", "code"), [("exit 42", 42), ("kill -9 $$", 137), ("no-such", 127)]
    )
    def test_exit_code_is_that_of_the_script(self, live: LiveHarness, end: str, code: int) -> None:
        """The batch system must report the exit status of the script."""
        assert live.wait(live.submit(f"#!/bin/sh\n{end}\n".encode())).code == code

    def test_output_arrives_byte_by_byte(self, live: LiveHarness) -> None:
        """Any bytes on stdout and stderr must arrive unchanged, in separate files.

        Standard input must be at end of file.
        """
        octal = "".join(f"\\{i:03o}" for i in range(256))
        text = f"#!/bin/sh\ncat\nprintf '{octal}'\nprintf '{octal}{octal}' >&2\n"
        ended = live.wait(live.submit(text.encode()))
        assert (ended.code, ended.stdout) == (0, bytes(range(256)))
        assert ended.stderr == bytes(range(256)) * 2

    def test_job_environment_has_batch_variables(self, live: LiveHarness) -> None:
        """The batch system's variables must be set, and SHELL must not be the job shell."""
        names = live.dialect.environ
        lines = "".join(f'echo "{name}=${name}"\n' for name in sorted(names))
        ended = live.wait(live.submit(f"#!/bin/sh\n{lines}echo $SHELL\n".encode()))
        *found, shell = ended.stdout.decode().splitlines()
        for line, name in zip(found, sorted(names), strict=True):
            assert re.fullmatch(f"{name}={names[name]}", line), line
        assert "vtorque" not in shell

    def test_vm_and_bare_metal_jobs_have_equal_output(self, live: LiveHarness) -> None:
        """The same script must have the same output and status with and without guests."""
        text = b"#!/bin/sh\necho $0 $# | sed 's,.*/,,'; pwd; id -u; umask; exit 5\n"
        bare, guest = (live.wait(live.submit(text, *vm)) for vm in (("-vm", "none"), ()))
        assert (bare.code, bare.stderr) == (guest.code, guest.stderr)
        assert bare.stdout.splitlines()[1:] == guest.stdout.splitlines()[1:]

    def test_canceled_queued_job_does_not_start(self, live: LiveHarness) -> None:
        """A canceled queued job must not start."""
        first = live.submit(b"#!/bin/sh\nsleep 600\n", "-vm", "none", *live.dialect.busy)
        self.wait_for_phase(live, first, "running")
        second = live.submit(b"#!/bin/sh\necho ran\n")
        assert live.phase(second) == "queued"
        live.cancel(second)
        assert b"ran" not in live.wait(second).stdout
        live.cancel(first)
        live.wait(first)
        assert (live.phase(first), live.phase(second)) == ("gone", "gone")

    def test_job_canceled_in_its_prologue_fails(self, live: LiveHarness) -> None:
        """A job canceled during its prologue must fail, and its script must not run."""
        job = live.submit(b"#!/bin/sh\necho ran\n")
        self.wait_for_phase(live, job, "starting")
        live.cancel(job)
        ended = live.wait(job)
        assert ended.code != 0
        assert b"ran" not in ended.stdout

    def test_canceled_running_job_gets_sigterm(self, live: LiveHarness) -> None:
        """The script in the guest must receive SIGTERM and have time to end."""
        job = self.start_job(live, b"trap 'echo got TERM; exit 9' TERM\n")
        live.cancel(job)
        ended = live.wait(job)
        assert ended.code in live.dialect.cancelled | {9}
        assert ended.stdout == b"got TERM\n"

    def test_canceled_job_that_ignores_sigterm_is_killed(self, live: LiveHarness) -> None:
        """After a job is canceled, its script must be killed even if it ignores SIGTERM."""
        job = self.start_job(live, b"trap '' TERM\n")
        live.cancel(job)
        assert live.wait(job).code in live.dialect.cancelled

    def test_script_gets_sigterm_at_the_walltime(self, live: LiveHarness) -> None:
        """At the time limit, the script in the guest must receive SIGTERM."""
        text = b"#!/bin/sh\ntrap 'echo got TERM; exit 9' TERM\n" + LOOP
        ended = live.wait(live.submit(text, *live.dialect.walltime(10)))
        assert ended.code in live.dialect.late | {9}
        assert ended.stdout == b"got TERM\n"

    @pytest.mark.parametrize("blob", [b"{", Request((("nosuch", "1"),)).encode()])
    def test_refused_request_ends_the_job_with_the_reason(
        self, live: LiveHarness, blob: bytes
    ) -> None:
        """A refused request must end the job, with the reason in its output.

        The next job must run.
        """
        ended = live.wait(live.submit_forged(b"#!/bin/sh\necho ran\n", blob))
        assert ended.code == EXIT_REFUSED
        assert ended.stdout == b""
        assert re.search(rb"vtorque: .*(request|nosuch)", ended.stderr)
        assert live.wait(live.submit(b"#!/bin/sh\necho ran\n")).stdout == b"ran\n"

    def start_job(self, live: LiveHarness, trap: bytes) -> str:
        """Submit a job whose script begins with ``trap``; return its id once the script runs."""
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

    def wait_for_phase(self, live: LiveHarness, job: str, phase: Phase) -> None:
        """Wait until a job is in this phase."""
        end = time.monotonic() + START
        while (found := live.phase(job)) != phase:
            assert found != "gone", f"{job} has ended and never was {phase}"
            assert time.monotonic() < end, f"{job} is {found}, not {phase}, after {START} s"
            time.sleep(0.02)


LOOP = b"n=0\nwhile [ $n -lt 6000 ]; do sleep 0.1; n=$((n + 1)); done\n"
