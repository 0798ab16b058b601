"""The contract of guest types finds each defect. Real guest types are tested in their plugins."""

import contextlib
import dataclasses
import os
import signal
import time

import pytest

from vtorque_core.api import HostFault
from vtorque_core.api.guest_driver import GuestDied
from vtorque_linux_guest.job import run_job
from vtorque_linux_guest.job.driver import LinuxDriver
from vtorque_testing.agent_guest import AgentHarness
from vtorque_testing.guest import CallTimeout, GuestContract

pytestmark = pytest.mark.e2e
CONTRACT = GuestContract()


class Impatient(AgentHarness):
    """A hang is to be found soon."""

    def __init__(self, *args):
        super().__init__(*args)
        self.patience = 3.0


@pytest.fixture(scope="module")
def harness_of(tmp_path_factory):
    made = []
    first = AgentHarness(LinuxDriver(), tmp_path_factory.mktemp("agent"))

    def make(driver):
        made.append(Impatient(driver, first.binary.parent, first.binary))
        return made[-1]

    yield make
    for each in (first, *made):
        each.close()


class ReadyAtOnce(LinuxDriver):
    caught_by = CONTRACT.test_silence_is_a_host_fault_at_the_deadline

    def await_ready(self, guest, deadline, step):
        pass


class ReadyAtAnyWord(LinuxDriver):
    def caught_by(self, harness):
        CONTRACT.test_garbage_is_not_ready(harness, 2)

    def await_ready(self, guest, deadline, step):
        with contextlib.suppress(HostFault):
            super().await_ready(guest, deadline, step)


class HasNoDeadline(LinuxDriver):
    caught_by = CONTRACT.test_silence_is_a_host_fault_at_the_deadline

    def await_ready(self, guest, deadline, step):
        super().await_ready(guest, deadline + 1000, step)


class BlamesNobody(LinuxDriver):
    caught_by = CONTRACT.test_guest_killed_during_boot_is_a_host_fault

    def await_ready(self, guest, deadline, step):
        try:
            super().await_ready(guest, deadline, step)
        except HostFault as error:
            raise OSError(str(error)) from None


class DoesNotSayWhy(LinuxDriver):
    caught_by = CONTRACT.test_failed_setup_reports_the_reason

    def await_ready(self, guest, deadline, step):
        try:
            super().await_ready(guest, deadline, step)
        except HostFault:
            raise HostFault("the guest is not ready") from None


class DeathIsSuccess(LinuxDriver):
    def caught_by(self, harness):
        CONTRACT.test_guest_killed_during_the_script_gives_no_success(harness, 0)

    def run(self, guest, script, streams):
        try:
            return super().run(guest, script, streams)
        except GuestDied:
            return 0


class WaitsForTheDead(LinuxDriver):
    caught_by = CONTRACT.test_missing_guest_raises_before_the_job

    def run(self, guest, script, streams):
        while True:
            with contextlib.suppress(GuestDied):
                return super().run(guest, script, streams)
            time.sleep(0.05)


class LosesTheCode(LinuxDriver):
    def caught_by(self, harness):
        CONTRACT.test_exit_code_is_that_of_the_script(harness, 128)

    def run(self, guest, script, streams):
        return super().run(guest, script, streams) & 0x7F


class PassesNoSignalOn(LinuxDriver):
    caught_by = CONTRACT.test_each_signal_reaches_the_script

    def run(self, guest, script, streams):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_job, "FORWARDED", ())
            return super().run(guest, script, streams)


class HasOneOutput(LinuxDriver):
    caught_by = CONTRACT.test_stderr_is_separate

    def run(self, guest, script, streams):
        return super().run(guest, script, dataclasses.replace(streams, stderr=streams.stdout))


class LosesTheLastLine(LinuxDriver):
    caught_by = CONTRACT.test_output_is_that_of_the_script

    def run(self, guest, script, streams):
        with (read_end := PipeTo(streams.stdout)) as pipe:
            code = super().run(guest, script, dataclasses.replace(streams, stdout=pipe))
        read_end.pass_on(drop=5)
        return code


class PipeTo:
    """A pipe before a descriptor."""

    def __init__(self, target):
        self.target, (self.read, self.write) = target, os.pipe()

    def __enter__(self):
        return self.write

    def __exit__(self, *_):
        os.close(self.write)

    def pass_on(self, drop):
        os.write(self.target, os.read(self.read, 1 << 16)[:-drop])
        os.close(self.read)


class HasNoInput(LinuxDriver):
    caught_by = CONTRACT.test_standard_input_reaches_the_script

    def run(self, guest, script, streams):
        return super().run(guest, script, dataclasses.replace(streams, stdin=None))


class HasNoTerminal(LinuxDriver):
    caught_by = CONTRACT.test_terminal_has_the_size_of_the_users

    def run(self, guest, script, streams):
        return super().run(guest, script, dataclasses.replace(streams, terminal=False))


class KeepsTheSignals(LinuxDriver):
    caught_by = CONTRACT.test_term_ends_the_job

    def run(self, guest, script, streams):
        code = super().run(guest, script, streams)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return code


@pytest.mark.parametrize("kind", LinuxDriver.__subclasses__())
def test_contract_finds_each_defect(harness_of, kind):
    driver = kind()
    with pytest.raises((AssertionError, CallTimeout)):
        driver.caught_by(harness_of(driver))


def test_missing_capability_needs_a_known_name_and_a_reason(harness_of):
    harness = harness_of(LinuxDriver())
    CONTRACT.test_missing_capabilities_are_declared(harness)
    for wrong in ({"signals": ""}, {"sound": "a guest has no sound card"}):
        harness.lacks = wrong
        with pytest.raises(AssertionError):
            CONTRACT.test_missing_capabilities_are_declared(harness)
