"""Provide the image that tests use on the simulated nodes of :mod:`vtorque_testing.recorded`."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.images import store
from vtorque_images import change


def put_image(pool: Path) -> None:
    """Put the image ``recorded`` into an empty pool.

    The image is built once per process and hard-linked into each pool, because nodes only read it.
    In a pool on another file system, where hard links are impossible, the image is built again.
    """
    made = _make_pool()
    if made.stat().st_dev == pool.stat().st_dev:
        shutil.copytree(made, pool, copy_function=os.link, dirs_exist_ok=True)
    else:
        _build(pool)


@functools.cache
def _make_pool() -> Path:
    pool = Path(tempfile.mkdtemp(prefix="vtorque-recorded-"))
    atexit.register(shutil.rmtree, pool, ignore_errors=True)
    pool.chmod(0o755)
    _build(pool)
    return pool


def _build(pool: Path) -> None:
    with store.staging(pool) as staging:
        (staging / "disk.raw").write_bytes(bytes(1 << 20))
        labels = {"agent": "builtin"}
        built = BuiltImage("linux", "debian", "x86_64", 64, "disk.raw", "raw", labels=labels)
        change.commit(pool, "recorded", staging, built, "recorded")
