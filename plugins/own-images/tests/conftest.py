"""Fixtures: a registry, and a personal site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_images import as_directory, layer, layout_files
from personal_site import PersonalSite
from registry import Registry
from vtorque_own_images.cache import Cache, cache_of


@pytest.fixture
def site() -> Any:
    return PersonalSite()


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Any) -> Cache:
    """Return the user's empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_of(site)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Return an OCI layout with two layers."""
    lower = layer(
        ("bin/", "", "d"), ("bin/sh", b"shell", "f"), ("gone", b"1", "f"), ("etc/", "", "d"),
        ("etc/os-release", b"ID=strange\n", "f"),
    )  # fmt: skip
    upper = layer(("bin/again", "bin/sh", "h"), (".wh.gone", b"", "f"), ("link", "bin/sh", "l"))
    return as_directory(layout_files([lower, upper], Env=["GREETING=hello"]), tmp_path / "layout")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Return a running registry that the user is logged in to."""
    found = Registry(tmp_path / "registry")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    found.start()
    yield found
    found.stop()
