"""Helpers shared by the parts of the batch contract."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import pytest

from vtorque_core.api.batch_system import ShellStart
from vtorque_core.config.request import Request
from vtorque_testing.harness import BatchHarness, HookCall, ProgramResult, StartedJob, Submission
from vtorque_testing.submit import run_vsub

SCRIPT = b"#!/bin/sh\necho hello\n"
VM = ("-vm", "ram=1G")


class ContractBase:
    """Base class of the batch contracts. A subclass overrides :meth:`harness`."""

    @pytest.fixture
    def harness(self) -> BatchHarness:
        """Return the harness of the adapter under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")


def submit(
    harness: BatchHarness, *argv: str, stdin: bytes = b"", blob: bytes | None = None
) -> Submission:
    """Submit a job that must be accepted; return what the batch system receives."""
    ended, got = attempt(harness, *argv, stdin=stdin, blob=blob)
    assert ended.code == 0, ended
    assert got is not None, f"the submit command was not started: {ended}"
    return got


def submit_and_start(harness: BatchHarness) -> HookCall:
    """Submit and start a job with guests; return the hook call of its first node."""
    return harness.start(submit(harness, *VM, script(harness))).hooks[0]


def attempt(
    harness: BatchHarness, *argv: str, stdin: bytes = b"", blob: bytes | None = None
) -> tuple[ProgramResult, Submission | None]:
    """Submit a job; return vsub's result, and the input of the batch system's submit command.

    The input is None if vsub did not call this command.
    """
    harness.last_input()
    ended = run_vsub(harness, argv, stdin=stdin, blob=blob)
    return ended, harness.last_input()


def script(harness: BatchHarness, content: bytes = SCRIPT, name: str = "job.sh") -> str:
    """Write a script into ``harness.directory``; return its file name."""
    (harness.directory / name).write_bytes(content)
    return name


def shell_started(harness: BatchHarness, job: StartedJob) -> ShellStart:
    """Return what the adapter reads when the batch system starts the job shell."""
    call = job.shell
    shell = harness.system.shell()
    if call.stdin is None:
        return shell.read_start(call.argv, call.environ, None)
    reader, writer = os.pipe()
    try:
        os.write(writer, call.stdin)  # one line; a pipe takes 64 KiB, pipe(7)
        os.close(writer)
        return shell.read_start(call.argv, call.environ, reader)
    finally:
        os.close(reader)


def script_in_guest(harness: BatchHarness, job: Submission) -> bytes:
    """Return the script that the guest runs."""
    started = shell_started(harness, harness.start(job))
    assert started.script is not None
    return harness.system.shell().content(started.script.read_bytes())


def request_of(harness: BatchHarness, job: Submission) -> Request:
    """Return the request that arrives at the node."""
    found = harness.start(job).hooks[0].job()
    assert found.bad_request == ""
    assert found.blob is not None, "the request did not arrive"
    return Request.decode(found.blob)


def added_variables(harness: BatchHarness, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that neither the submitting environment nor a shell has set."""
    own = {"PWD", "OLDPWD", "SHLVL", "_"}
    mine = harness.environ
    return {k: v for k, v in environ.items() if k not in own and mine.get(k) != v}


def is_within(words: Sequence[str], others: Iterable[str]) -> bool:
    """Return True if ``others`` contains all ``words`` in this order, possibly with gaps."""
    rest = iter(others)
    return all(word in rest for word in words)
