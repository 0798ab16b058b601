"""Guests as the core would plan them, and a place where their setup.sh can run without a guest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from vtorque_core.api_node import GuestPlan
from vtorque_linux_guest.testing_guests import PLAN, SHELLS, FakeRoot, fake_guest


@pytest.fixture
def plan() -> Callable[..., GuestPlan]:
    return lambda **changes: replace(PLAN, **changes)


@pytest.fixture(params=SHELLS, ids=["dash", "busybox"])
def fake_root(request: pytest.FixtureRequest) -> Iterator[FakeRoot]:
    with fake_guest(request.param) as root:
        yield root
