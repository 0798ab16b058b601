"""Fixtures for tests of imported disks."""

from pathlib import Path

import pytest


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Return an empty image pool."""
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    return path
