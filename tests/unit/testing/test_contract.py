"""The contract of batch adapters: its example passes it, and adapters with a defect do not."""

from dataclasses import replace

import pytest

from vtorque_core.api.batch_system import JobState, Outcome
from vtorque_testing.batch import BatchContract
from vtorque_testing.commands import RecordingCommand
from vtorque_testing.example import ACME, AcmeNode, AcmeShell, AcmeSubmitter
from vtorque_testing.example_harness import AcmeHarness
from vtorque_testing.harness import ProgramResult
from vtorque_testing.submit import run_in_child

pytestmark = pytest.mark.e2e


class TestExample(BatchContract):
    test_realistic_scripts_arrive_unchanged = None  # the embedded batch system's tests have them

    @pytest.fixture
    def harness(self, tmp_path):
        return AcmeHarness(tmp_path)


class LosesTheNote(AcmeSubmitter):
    def submit(self, args, blob, needs):
        rest = list(args.rest)
        if "-k" in rest and blob is not None:
            del rest[rest.index("-k") : rest.index("-k") + 2]
        return super().submit(replace(args, rest=tuple(rest)), blob, needs)


class DropsLongRequests(AcmeSubmitter):
    def submit(self, args, blob, needs):
        return super().submit(args, None if blob and len(blob) > 2000 else blob, needs)


class MarksBareMetalJobs(AcmeSubmitter):
    def submit(self, args, blob, needs):
        rest = args.rest if blob else ("-n", "marked", *args.rest)
        return super().submit(replace(args, rest=rest), blob, needs)


class RaisesOnForged(AcmeNode):
    def job(self, argv, environ):
        job = super().job(argv, environ)
        if job.bad_request:
            raise ValueError(job.bad_request)
        return job


class TakesForgedForBare(AcmeNode):
    def job(self, argv, environ):
        job = super().job(argv, environ)
        return replace(job, blob=None, bad_request="") if job.bad_request else job


class SaysGone(AcmeNode):
    def job_states(self, ids):
        found = super().job_states(ids)
        return {k: JobState.GONE if v is JobState.UNKNOWN else v for k, v in found.items()}


class FailsTheHookOfBadRequests(AcmeNode):
    def finish(self, job, outcome, reason, *, hook_waits):
        code = super().finish(job, outcome, reason, hook_waits=hook_waits)
        return 1 if outcome is Outcome.REFUSED else code


class DiffersByNode(AcmeNode):
    def context(self, job, guests):
        return super().context(job, guests if job.node_index == 0 else guests[::-1])


class ArraysShareAnId(AcmeNode):
    def job(self, argv, environ):
        job = super().job(argv, environ)
        return replace(job, id=job.id.partition(".")[0])


class AddsANewline(AcmeShell):
    def content(self, script):
        return script + b"\n"


DEFECTS = [
    (LosesTheNote, "test_user_values_in_the_request_field_are_kept", ()),
    (DropsLongRequests, "test_request_arrives_completely_or_is_refused", (4096,)),
    (MarksBareMetalJobs, "test_bare_metal_job_is_submitted_unchanged", ((),)),
    (RaisesOnForged, "test_forged_request_is_reported_as_bad", ()),
    (TakesForgedForBare, "test_forged_request_is_reported_as_bad", ()),
    (SaysGone, "test_alive_reports_gone_only_for_ended_jobs", ()),
    (
        FailsTheHookOfBadRequests,
        "test_finish_returns_the_documented_exit_status",
        (Outcome.REFUSED, ("short",)),
    ),
    (DiffersByNode, "test_all_nodes_determine_the_same_job", ()),
    (ArraysShareAnId, "test_array_jobs_have_distinct_ids", ()),
    (AddsANewline, "test_vm_is_removed_and_other_arguments_are_kept", ("first",)),
]


@pytest.mark.parametrize(
    ("part", "test", "args"), DEFECTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_contract_finds_each_defect(tmp_path, monkeypatch, part, test, args):
    harness = AcmeHarness(tmp_path)
    getattr(BatchContract(), test)(harness, *args)
    base = part.__mro__[1]
    name = {AcmeSubmitter: "submitter", AcmeNode: "node", AcmeShell: "shell"}[base]
    harness.system = replace(ACME, **{name: part})
    monkeypatch.setattr(
        "vtorque_testing.example_harness.AcmeNode", part if name == "node" else AcmeNode
    )
    with pytest.raises((AssertionError, ValueError)):
        getattr(BatchContract(), test)(harness, *args)


def test_recording_command_records_all_calls(tmp_path):
    command = RecordingCommand(tmp_path / "bin/qsub")
    script = tmp_path / "a b.sh"
    script.write_bytes(b"\0\xff")
    argv = [tmp_path / "bin/qsub", "", "new\nline", "-N", "x y", script]

    def run():
        import subprocess

        return subprocess.run(argv, check=False).returncode

    environ = {"PATH": "/usr/bin:/bin", "ODD": "a=b\nc"}
    command.answer(ProgramResult(7, b"out\xff", b"err"))
    assert run_in_child(run, b"in\0put", environ, tmp_path) == ProgramResult(7, b"out\xff", b"err")
    assert run_in_child(run, b"", environ, tmp_path) == ProgramResult(0, b"", b"")
    first, second = command.calls()
    assert first.argv == second.argv == ("", "new\nline", "-N", "x y", str(script))
    assert (first.stdin, second.stdin) == (b"in\0put", b"")
    assert first.environ["ODD"] == "a=b\nc"
    assert first.files == {4: b"\0\xff"}
    assert command.calls() == []


def test_exception_in_a_child_is_reported(tmp_path):
    def fail():
        raise LookupError("on purpose")

    ended = run_in_child(fail, b"", {}, tmp_path)
    assert ended.code == 70
    assert b"LookupError: on purpose" in ended.stderr
