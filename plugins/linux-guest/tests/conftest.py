"""Guests as planned by the core, their setup.sh without a guest, and the real agent."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from local_agent import OFTEN, SANITIZED, HostedAgent
from sample_guests import PLAN, SHELLS, FakeRoot, fake_guest
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.agent.build import build_agent
from vtorque_linux_guest.job.stream import Session


@pytest.fixture
def plan() -> Callable[..., GuestPlan]:
    return lambda **changes: replace(PLAN, **changes)


@pytest.fixture(
    params=[
        pytest.param(SHELLS[0], id="dash"),
        pytest.param(SHELLS[1], id="busybox", marks=pytest.mark.full),
    ]
)
def fake_root(request: pytest.FixtureRequest) -> Iterator[FakeRoot]:
    with fake_guest(request.param) as root:
        yield root


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the agent, which the first of xdist's processes builds for all."""
    top = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent
    out = top / "vtorque-agent"
    with (top / "vtorque-agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            build_agent(out, "gcc", (*SANITIZED, OFTEN))
    return out


@pytest.fixture
def agent(binary: Path) -> Iterator[HostedAgent]:
    with HostedAgent(binary) as running:
        running.ready()
        yield running


@pytest.fixture
def session(agent: HostedAgent) -> Iterator[Session]:
    connection = agent.connect()
    opened = Session(connection)
    opened.hello(time.monotonic() + 20)
    yield opened
    connection.close()
