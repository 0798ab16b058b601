"""Fixtures for tests of several nodes: one machine is the pool's host and every node."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vtorque_cluster.cache import ImagePlaces
from vtorque_core.api import Paths


@pytest.fixture
def places() -> Iterator[ImagePlaces]:
    """Return an empty pool, a cache to be made, and a node without directories.

    All users can search the directory, unlike pytest's own.
    """
    with tempfile.TemporaryDirectory(prefix="vtorque-") as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "pool").mkdir(mode=0o755)
        yield ImagePlaces(top / "pool", top / "node/cache", Paths(top / "state", top / "run"))
