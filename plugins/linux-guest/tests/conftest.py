"""Guests as the core would plan them, their setup.sh without a guest, and the real agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from local_agent import SANITIZED, LocalAgent
from sample_guests import PLAN, SHELLS, FakeRoot, fake_guest
from vtorque_core.api_node import GuestPlan
from vtorque_linux_guest.agent_build import build_agent
from vtorque_linux_guest.stream import Session


@pytest.fixture
def plan() -> Callable[..., GuestPlan]:
    return lambda **changes: replace(PLAN, **changes)


@pytest.fixture(params=SHELLS, ids=["dash", "busybox"])
def fake_root(request: pytest.FixtureRequest) -> Iterator[FakeRoot]:
    with fake_guest(request.param) as root:
        yield root


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("agent") / "vtorque-agent"
    build_agent(out, "gcc", SANITIZED)
    return out


@pytest.fixture
def agent(binary: Path) -> Iterator[LocalAgent]:
    with LocalAgent(binary) as running:
        running.ready()
        yield running


@pytest.fixture
def session(agent: LocalAgent) -> Iterator[Session]:
    connection = agent.connect()
    opened = Session(connection)
    opened.hello(time.monotonic() + 20)
    yield opened
    connection.close()
