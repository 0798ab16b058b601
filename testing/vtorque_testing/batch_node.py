"""Contract for the node adapter (root) and the job shell (user)."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from vtorque_admin.steps import Check
from vtorque_core.api.batch_system import (
    Detach,
    DrainingAdapter,
    JobState,
    Outcome,
    PeerGuest,
)
from vtorque_core.api.guest_context import GuestFile
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.setup_steps import Installation
from vtorque_core.base.errors import HostFault, Refused, UsageError
from vtorque_testing.batch_base import (
    VM,
    ContractBase,
    script,
    shell_started,
    submit,
    submit_and_start,
)
from vtorque_testing.harness import BatchHarness

ODD_IDS = ("", "-1", "--help", "0", "999999999", "no such", "a;id", "$(id)", "[]", "1[2].x", "é\n")
REASONS = ("", "short", "several\nlines", 'quo\'te "x" `y` $(z)', "é\x7f\x1b", "long " * 1000)


class NodeContract(ContractBase):
    """Tests of the node adapter, which runs as root."""

    def test_job_is_read_alike_each_time(self, harness: BatchHarness) -> None:
        """``job()`` must return an equal job each time, with the job's owner and this node."""
        for vm in ((), VM):
            call = harness.start(submit(harness, *vm, script(harness))).hooks[0]
            job = call.job()
            assert call.job() == job
            assert job.id
            assert job.owner
            assert job.nodes[job.node_index] == job.node
            assert job.attempt >= 0

    def test_detach_does_not_depend_on_the_request(self, harness: BatchHarness) -> None:
        """``BatchJob.detach`` must depend on the node's position in the job, not on the request."""
        got = submit(harness, *VM, script(harness))
        honest, forged = (
            harness.start(got, forged=text).hooks[0].job() for text in (None, "vt1:%")
        )
        assert honest.detach == forged.detach

    def test_call_of_another_program_gives_no_vm_job(self, harness: BatchHarness) -> None:
        """``job()`` must return no valid request for unknown arguments, and may raise HostFault."""
        call = submit_and_start(harness)
        for argv in ((), ("x",), ("", ""), ("a",) * 40):
            try:
                job = call.adapter.job(argv, {})
            except HostFault as error:
                assert str(error)
            else:
                assert job.blob is None or job.bad_request

    @pytest.mark.parametrize(
        "reasons",
        [
            pytest.param(REASONS[2::3], id="some"),
            pytest.param(REASONS, id="all", marks=pytest.mark.full),
        ],
    )
    @pytest.mark.parametrize("outcome", Outcome)
    def test_finish_returns_the_documented_exit_status(
        self, harness: BatchHarness, outcome: Outcome, reasons: Sequence[str]
    ) -> None:
        """``finish()`` must return the documented exit status, whatever the text of the reason.

        It must not raise if the batch system's server is down.
        """
        call = submit_and_start(harness)
        job = call.job()
        finish = partial(call.adapter.finish, hook_waits=job.detach is not Detach.AT_ONCE)
        try:
            for reason in reasons:
                assert finish(job, outcome, reason) == harness.dialect.exits[outcome]
            harness.serve(False)
            code = finish(job, outcome, "unreachable")
            assert 0 <= code <= 255
            if not outcome.may_run_elsewhere:
                assert code == harness.dialect.exits[outcome], "the exit code depends on the server"
        finally:
            harness.serve(True)

    def test_alive_reports_gone_only_for_ended_jobs(self, harness: BatchHarness) -> None:
        """``job_states()`` must return ``GONE`` only for jobs that the server reports as gone.

        vTorque's reaper tears down every job that is ``GONE``.
        """
        got = submit(harness, *VM, script(harness))
        call = harness.start(got).hooks[0]
        job_id = call.job().id
        try:
            assert call.adapter.job_states([job_id]) == {job_id: JobState.ALIVE}
            harness.serve(False)
            assert call.adapter.job_states([job_id])[job_id] in (JobState.ALIVE, JobState.UNKNOWN)
            harness.serve(True)
            assert call.adapter.job_states([job_id]) == {job_id: JobState.ALIVE}
            harness.end(got)
            assert call.adapter.job_states([job_id]) == {job_id: JobState.GONE}
        finally:
            harness.serve(True)

    def test_alive_answers_for_invalid_ids(self, harness: BatchHarness) -> None:
        """``job_states()`` must return a state for every id, never ``ALIVE`` for an invalid one."""
        call = submit_and_start(harness)
        job_id = call.job().id
        found = call.adapter.job_states([*ODD_IDS, job_id])
        assert set(found) == {*ODD_IDS, job_id}
        assert found[job_id] in (JobState.ALIVE, JobState.UNKNOWN)
        assert JobState.ALIVE not in {found[each] for each in ODD_IDS}
        assert call.adapter.job_states([]) == {}

    def test_mark_and_account_are_idempotent(self, harness: BatchHarness) -> None:
        """``mark()`` and ``account()`` must be idempotent.

        If the server is down, each may raise HostFault with a printable message.
        """
        call = submit_and_start(harness)
        job_id = call.job().id

        def work() -> None:
            for healthy, reason in ((False, "libvirtd does not answer: it's dead"), (True, "")):
                call.adapter.mark(healthy, reason)
                call.adapter.mark(healthy, reason)
                call.adapter.account(job_id, Usage(12.5, 2048))

        work()
        try:
            harness.serve(False)
            work()
        except HostFault as error:
            assert str(error).isprintable()
        finally:
            harness.serve(True)

    def test_drain_and_requeue_report_failures(self, harness: BatchHarness) -> None:
        """``drain()`` must be idempotent, and ``drain()`` and ``requeue()`` must report failures.

        Both may raise Refused at any time, and HostFault only if the server is down.
        """
        call = submit_and_start(harness)
        if not isinstance(call.adapter, DrainingAdapter):
            return  # the batch system supports neither
        drain = partial(call.adapter.drain, "its disk's slow")
        requeue = partial(call.adapter.requeue, call.job().id)
        up_or_not = (
            (True, drain),
            (True, drain),
            (True, requeue),
            (False, drain),
            (False, requeue),
        )
        try:
            for up, work in up_or_not:
                harness.serve(up)
                try:
                    work()
                except (HostFault, Refused) as error:
                    assert str(error).isprintable()
                    assert isinstance(error, Refused) or not up
                else:
                    assert up
        finally:
            harness.serve(True)

    def test_context_names_all_guests_in_rank_order(self, harness: BatchHarness) -> None:
        """``context()`` must name all guests in rank order, and return equal items each time.

        Paths in the items must be absolute and must not contain ``..``.
        """
        call = submit_and_start(harness)
        guests = [PeerGuest("vn1-0", 2), PeerGuest("vn1-1", 2)]
        items = list(call.adapter.context(call.job(), guests))
        assert items == list(call.adapter.context(call.job(), guests))
        for item in items:
            if isinstance(item, GuestFile):
                assert Path(item.path).is_absolute()
                assert ".." not in Path(item.path).parts
        text = repr(items)
        assert text.index("vn1-0") < text.index("vn1-1"), "the guests are not in order"

    def test_array_jobs_have_distinct_ids(self, harness: BatchHarness) -> None:
        """Each job of an array must have its own id, and therefore its own guests."""
        if not harness.dialect.array:
            pytest.skip("this batch system has no arrays")
        got = submit(harness, *harness.dialect.array, *VM, script(harness))
        jobs = [harness.start(got, element=i) for i in (0, 1)]
        read = [job.hooks[0].job() for job in jobs]
        assert read[0].id != read[1].id
        assert read[0].blob == read[1].blob is not None
        ids = [shell_started(harness, job).job_id for job in jobs]
        assert ids == [job.id for job in read]
        alive = jobs[0].hooks[0].adapter.job_states(ids)
        assert JobState.GONE not in alive.values()

    def test_all_nodes_determine_the_same_job(self, harness: BatchHarness) -> None:
        """All nodes must determine the same job without communication.

        The id, the order of nodes, the request and the guests' context must be equal.
        """
        if not harness.dialect.two_nodes:
            pytest.skip("this batch system has one node")
        got = submit(harness, *harness.dialect.two_nodes, *VM, script(harness))
        job = harness.start(got, nodes=2)
        first, second = read = [call.job() for call in job.hooks]
        assert [each.node_index for each in read] == [0, 1]
        for name in ("id", "owner", "attempt", "nodes", "blob", "name"):
            assert getattr(first, name) == getattr(second, name), name
        guests = [PeerGuest("vn1", 2), PeerGuest("vn2", 2)]
        seen = [
            list(call.adapter.context(each, guests))
            for call, each in zip(job.hooks, read, strict=True)
        ]
        assert seen[0] == seen[1]
        for call, each in zip(job.hooks, read, strict=True):
            assert 0 <= call.adapter.finish(each, Outcome.READY, "", hook_waits=False) <= 255

    def test_setup_steps_are_idempotent_and_undone_byte_for_byte(
        self, harness: BatchHarness
    ) -> None:
        """A setup step must be idempotent, and its ``undo()`` must restore every byte."""
        root = harness.setup_root()
        if root is None:
            pytest.skip("its setup steps cannot work in a directory")
        adapter = harness.system.node(harness.site)
        place = Installation(
            root / "bin/vtorque", root / "vtorque.toml", root / "libexec/vtorque-jobshell"
        )
        before = tree(root)
        for _ in range(2):
            steps = [s for s in adapter.setup_steps(place) if not isinstance(s, Check)]
            for step in (*steps, *steps):
                step.apply()
                assert step.text
                assert os.geteuid() != 0 or step.is_applied(), (
                    f"{step.text}: is_applied() is False after apply()"
                )
            for step in (*reversed(steps), *steps):
                step.undo()
            assert tree(root) == before
            assert not [s.text for s in steps if s.is_applied()]


class ShellContract(ContractBase):
    """Tests of the job shell, which runs as the job's owner."""

    def test_job_shell_gets_the_job_id_and_script(self, harness: BatchHarness) -> None:
        """The job shell must get the same job id as root's hook, and the job's script."""
        job = harness.start(submit(harness, *VM, script(harness)))
        started = shell_started(harness, job)
        assert started.job_id == job.hooks[0].job().id
        assert started.script is not None
        assert started.script.is_absolute()
        assert started.args == ()
        assert started.cwd == "" or Path(started.cwd).is_absolute()

    def test_start_outside_the_batch_system_is_refused(self, harness: BatchHarness) -> None:
        """A start outside of the batch system must raise UsageError."""
        with pytest.raises(UsageError):
            harness.system.shell().read_start((), {}, None)

    def test_host_only_contains_no_common_variables(self, harness: BatchHarness) -> None:
        """``JobShell.host_only`` must not contain variables such as HOME or PATH."""
        names = harness.system.shell().host_only
        assert all(isinstance(name, str) and name and "=" not in name for name in names)
        assert not names & {"HOME", "PATH", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "TERM"}

    def test_on_every_node_keeps_the_words(self, harness: BatchHarness) -> None:
        """``node_command()`` must return a command that ends with the given words, unchanged."""
        job = harness.start(submit(harness, *VM, script(harness)))
        words = ["/usr/libexec/vtorque-jobshell", "--await-job", "1[2].x y"]
        found = harness.system.shell().node_command(words, job.shell.environ)
        assert len(found) > len(words)
        assert found[-len(words) :] == words


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content, or link target, of every file below a directory."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = b""
        if stat.S_ISLNK(status.st_mode):
            content = os.fsencode(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (status.st_mode, content)
    return found
