"""The contract of all guest types, for the type ``linux`` with the real agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vtorque_linux_guest.job.driver import LinuxDriver
from vtorque_testing.agent_guest import AgentHarness
from vtorque_testing.guest import GuestContract


class TestLinuxGuest(GuestContract):
    @pytest.fixture
    def harness(self, binary: Path, tmp_path: Path) -> Iterator[AgentHarness]:
        made = AgentHarness(LinuxDriver(), tmp_path, binary)
        yield made
        made.close()
