"""What the tests of many nodes begin with: one machine is the pool's host and every node."""

from pathlib import Path

import pytest

from vtorque_core.api import Paths
from vtorque_core.live.images import Places


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return an empty pool, a cache that is to be made, and a node that has no directories yet."""
    pool = tmp_path / "pool"
    pool.mkdir(mode=0o755)
    return Places(pool, tmp_path / "node/cache", Paths(tmp_path / "state", tmp_path / "run"))
