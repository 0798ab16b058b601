"""Contract for the submitter: user input reaches the batch system unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from vtorque_core.api.batch_system import SubmitArgs
from vtorque_core.api.directives import strip_pbs_vm
from vtorque_testing.batch_base import (
    SCRIPT,
    VM,
    ContractBase,
    added_variables,
    attempt,
    is_within,
    request_of,
    script,
    script_in_guest,
    shell_started,
    submit,
)
from vtorque_testing.harness import BatchHarness, ProgramResult
from vtorque_testing.wild_scripts import SCRIPTS, WildScript

ODD_WORDS = ("plain", "two words", "quo'te", 'double"quote', "back\\slash", "$HOME", "a=b,c", "é")


class SubmissionContract(ContractBase):
    """Tests of job submission."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Scripts with directives that the submit command refuses, and a part of its error message."""
    wild: ClassVar[Sequence[WildScript]] = SCRIPTS
    """The realistic scripts that every test run submits.

    :meta hide-value:
    """
    rarely: ClassVar[Sequence[WildScript]] = ()
    """The realistic scripts that only a full test run submits."""

    @pytest.mark.parametrize("none", [(), ("-vm", "none")], ids=["plain", "-vm none"])
    def test_bare_metal_job_is_submitted_unchanged(
        self, harness: BatchHarness, none: tuple[str, ...]
    ) -> None:
        """A bare-metal job must keep its arguments, environment and script, without additions."""
        options, name = harness.dialect.options, script(harness)
        got = submit(harness, *none, *options, name)
        assert got.argv == (*options, name)
        assert got.script == SCRIPT
        assert not added_variables(harness, got.environ)

    @pytest.mark.parametrize("place", ["first", "between", "after the script", "in two places"])
    def test_vm_is_removed_and_other_arguments_are_kept(
        self, harness: BatchHarness, place: str
    ) -> None:
        """``-vm`` may be anywhere; the user's other arguments must keep their order."""
        options, name = harness.dialect.options, script(harness)
        late = "note=x"
        argv = {
            "first": (*VM, *options, name),
            "between": (*options[:2], *VM, *options[2:], name),
            "after the script": (*options, name, *VM),
            "in two places": (*VM, *options, name, "-vm", late),
        }[place]
        if not harness.dialect.permutes and name in argv[:-1]:
            argv = (*(word for word in argv if word != name), name)
        got = submit(harness, *argv)
        assert is_within(options, got.argv)
        assert not {"-vm", "ram=1G", late} & set(got.argv)
        expected = [("ram", "1G"), ("note", "x")][: 1 + (place == "in two places")]
        assert sorted(request_of(harness, got).pairs) == sorted(expected)
        bare = submit(harness, *options, name)
        names = [harness.start(each).hooks[0].job().name for each in (bare, got)]
        assert names[0] == names[1]
        assert script_in_guest(harness, got) == SCRIPT

    def test_options_after_the_script_take_effect(self, harness: BatchHarness) -> None:
        """Options after the script must take effect if the batch system accepts such options."""
        options, name = harness.dialect.options, script(harness)
        if not harness.dialect.permutes:
            pytest.skip("this submit command takes what follows the script as its arguments")
        got = submit(harness, name, *options, *VM)
        assert is_within(options, got.argv)
        assert script_in_guest(harness, got) == SCRIPT

    def test_script_is_read_from_standard_input(self, harness: BatchHarness) -> None:
        """A script may come from standard input, with and without a request."""
        if not harness.dialect.takes_stdin:
            pytest.skip("this submit command takes no script on standard input")
        options = harness.dialect.options
        assert submit(harness, *options, stdin=SCRIPT).script == SCRIPT
        got = submit(harness, *options, *VM, stdin=SCRIPT)
        assert script_in_guest(harness, got) == SCRIPT
        assert request_of(harness, got).pairs == (("ram", "1G"),)

    @pytest.mark.parametrize("count", [1, len(ODD_WORDS)])
    def test_script_arguments_arrive_unchanged(self, harness: BatchHarness, count: int) -> None:
        """Arguments of the script must reach the script in the guest unchanged."""
        end = harness.dialect.arguments(script(harness), ODD_WORDS[:count])
        got = submit(harness, *VM, *harness.dialect.options, *end)
        started = shell_started(harness, harness.start(got))
        assert started.args == ODD_WORDS[:count]
        assert script_in_guest(harness, got) == SCRIPT

    @pytest.mark.parametrize("prefix", ["#VSUB", "#PBS"])
    def test_vm_directives_of_the_script_take_effect(
        self, harness: BatchHarness, prefix: str
    ) -> None:
        """``#VSUB -vm`` and the old ``#PBS -vm`` must work; the command line takes precedence."""
        text = f"#!/bin/sh\n# note\n\n{prefix} -vm ram=1G,note=x\necho hello\n".encode()
        name = script(harness, text)
        got = submit(harness, *harness.dialect.options, name)
        assert dict(request_of(harness, got).pairs) == {"ram": "1G", "note": "x"}
        assert script_in_guest(harness, got) in (text, strip_pbs_vm(text))
        if prefix == "#VSUB":
            assert script_in_guest(harness, got) == text
        got = submit(harness, "-vm", "ram=2G", name)
        assert dict(request_of(harness, got).pairs) == {"ram": "2G", "note": "x"}

    def test_vm_none_overrides_vm_directives_of_the_script(self, harness: BatchHarness) -> None:
        """``-vm none`` must submit a bare-metal job without a request."""
        text = b"#!/bin/sh\n#VSUB -vm ram=1G\necho hello\n"
        got = submit(harness, "-vm", "none", script(harness, text))
        assert got.script == text
        assert harness.start(got).hooks[0].job().blob is None

    def test_batch_system_directives_are_kept(self, harness: BatchHarness) -> None:
        """The batch system's directives must stay in the script."""
        line = harness.dialect.directive
        text = f"#!/bin/sh\n{line}\n#VSUB -vm ram=1G\necho hello\n".encode()
        name = script(harness, text)
        got = submit(harness, name)
        assert got.script is not None
        assert line.encode() in got.script.split(b"\n")
        assert script_in_guest(harness, got) == text

    def test_unknown_option_is_passed_on_or_refused(self, harness: BatchHarness) -> None:
        """An unknown option must reach the batch system, or be refused without a submission.

        The error message must name the option.
        """
        unknown, name = harness.dialect.unknown, script(harness)
        if harness.answer(ProgramResult(3, b"", f"no such option: {unknown}\n".encode())):
            ended, got = attempt(harness, unknown, *VM, name)
            if got is not None:
                assert unknown in got.argv
                assert ended.code == 3
        else:
            ended, got = attempt(harness, unknown, *VM, name)
            assert got is None
        assert ended.code != 0
        assert unknown.lstrip("-").encode() in ended.stderr

    def test_submit_command_output_is_shown_unchanged(self, harness: BatchHarness) -> None:
        """The user must get the batch system's output, errors and exit status unchanged."""
        said = ProgramResult(17, b"42.server\n\xff", b"qsub: warning: \xe9\n")
        for vm in ((), VM):
            if not harness.answer(said):
                pytest.skip("there is no submit command: the adapter is the batch system itself")
            ended, _ = attempt(harness, *vm, script(harness))
            assert ended == said

    def test_unreadable_script_is_refused(self, harness: BatchHarness) -> None:
        """An unreadable script must be refused with its name, and no job may be created."""
        harness.answer(ProgramResult(1, b"", b"no-such-script: No such file or directory\n"))
        ended, _ = attempt(harness, *VM, "no-such-script")
        assert ended.code != 0
        assert b"no-such-script" in ended.stderr

    @pytest.mark.parametrize(("cpus", "mib"), [(3, 2048), (16, 65536)])
    def test_requested_cpus_and_memory_are_parsed(
        self, harness: BatchHarness, cpus: int, mib: int
    ) -> None:
        """``split()`` must return the CPUs and the memory that the user requests per node.

        vsub compares them with the ``-vm`` options.
        """
        words, name = harness.dialect.share(cpus, mib), script(harness)
        args = self.split(harness, *words, name)
        assert (args.vcpus_given, args.mib_given) == (cpus, mib)
        args = self.split(harness, name)
        assert (args.vcpus_given, args.mib_given) == (None, None)
        got = submit(harness, *words, *VM, name)
        found = harness.start(got).hooks[0].job()
        assert found.cpu_count in (cpus, None)
        assert found.cpu_counts in ((cpus,), ())
        assert found.mem_mib in (mib, None)

    def test_interactive_job_is_detected(self, harness: BatchHarness) -> None:
        """``split()`` must detect interactive jobs, and only those."""
        words = harness.dialect.interactive
        if not words:
            pytest.skip("no interactive jobs by this command")
        assert self.split(harness, *words, *VM).interactive
        assert not self.split(harness, script(harness)).interactive

    def test_realistic_scripts_arrive_unchanged(self, harness: BatchHarness) -> None:
        """Each script in :attr:`wild` must reach the guest byte for byte.

        If the batch system refuses a script, the message must be the same as without vTorque.
        """
        self.all_go_through(harness, self.wild)

    @pytest.mark.full
    def test_rare_scripts_arrive_unchanged(self, harness: BatchHarness) -> None:
        """Each script in :attr:`rarely` must also reach the guest byte for byte."""
        self.all_go_through(harness, self.rarely)

    def all_go_through(self, harness: BatchHarness, scripts: Sequence[WildScript]) -> None:
        """Submit all scripts. Raise AssertionError with the names of scripts that fail."""
        faults = {}
        for wild in scripts:
            try:
                self.check_script(harness, wild)
            except Exception as error:
                faults[wild.name] = f"{type(error).__name__}: {error}"
        assert faults == {}

    def check_script(self, harness: BatchHarness, wild: WildScript) -> None:
        """Submit one script. Check that the guest runs it unchanged, or that vsub refuses it."""
        name = script(harness, wild.content, wild.name)
        ended, got = attempt(harness, *VM, name)
        assert (ended.code != 0) == (wild.name in self.refused), ended
        if ended.code:
            assert self.refused[wild.name].encode() in ended.stderr
            assert attempt(harness, name)[0] == ended
        else:
            assert got is not None
            assert script_in_guest(harness, got) == wild.content
            assert harness.start(got).hooks[0].job().blob is not None
        (harness.directory / name).unlink()

    def split(self, harness: BatchHarness, *argv: str) -> SubmitArgs:
        """Call the submitter's ``split()`` with ``harness.directory`` as the working directory."""
        submitter = harness.system.submitter(harness.site)
        with contextlib.chdir(harness.directory):
            return submitter.split(argv)
