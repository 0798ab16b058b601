"""Fixtures of many tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from acme_card import starter
from vtorque_core.base.names import Paths


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Return an empty image pool."""
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """Return the directories of a node that does not have them yet."""
    return Paths(tmp_path / "state", tmp_path / "run")


@pytest.fixture
def start(paths: Paths) -> Callable[..., object]:
    """Return what starts a job there: its journal."""
    return starter(paths)
