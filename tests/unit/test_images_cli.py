"""``vmgr images`` as people call it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vtorque_core import images
from vtorque_core.api import ImageBuilder
from vtorque_core.api_image import BuiltImage
from vtorque_core.cli import images as command
from vtorque_core.cli import site as cli_site
from vtorque_core.errors import HostFault, Refused, UsageError


class Fake:
    """A builder that takes ``kernel=`` and fails as told by ``fail=``."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        progress("faking")
        if "fail" in arguments:
            raise RuntimeError(arguments["fail"])
        (staging / "k").write_text(arguments.get("kernel", "kernel"))
        return BuiltImage("linux", "micro", "x86_64", 64, kernel="k")


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    plugins = SimpleNamespace(image_builders=lambda: {"fake": ImageBuilder("fake", "a fake", Fake)})
    site = SimpleNamespace(images=SimpleNamespace(pool=path))
    monkeypatch.setattr(cli_site, "load_for_root", lambda config: (site, plugins))
    monkeypatch.setattr(cli_site, "load", lambda config, node: (site, plugins))
    monkeypatch.setattr(command, "effective_root", lambda: True)
    return path


def run(*args: str) -> Result:
    return CliRunner().invoke(command.images, args, obj=Path("/unused.toml"))


def raised(*args: str) -> Any:
    return run(*args).exception


def test_build_list_show_verify_remove(pool: Path) -> None:
    built = run("build", "m", "fake", "-o", "kernel=one")
    assert built.exit_code == 0
    assert " s  faking" in built.stderr
    assert images.lookup(pool, "m").kernel is not None
    assert "micro" in run("list").stdout
    listed = json.loads(run("list", "--json").stdout)
    assert [(row["name"], row["distro"], row["min_ram_mib"]) for row in listed] == [
        ("m", "micro", 64)
    ]
    shown = json.loads(run("show", "m").stdout)
    assert (shown["builder"], shown["sha256"]) == ("fake", images.lookup(pool, "m").sha256)
    assert run("verify").stdout.startswith("m: ok, sha256 ")
    assert run("remove", "m").exit_code == 0
    assert list(pool.iterdir()) == []


def test_broken_image_is_listed_and_gives_exit_code_1(pool: Path) -> None:
    run("build", "m", "fake")
    kernel = images.lookup(pool, "m").kernel
    assert kernel is not None
    kernel.write_text("changed")
    listed = run("list")
    assert listed.exit_code == 1
    assert "broken" in listed.stdout
    assert "broken" in json.loads(run("list", "--json").stdout)[0]
    verified = run("verify", "m")
    assert verified.exit_code == 1
    assert "k has sha256" in verified.stderr


@pytest.mark.parametrize(
    "args",
    [("build", "m", "fake"), ("remove", "m")],
)
def test_only_root_changes_the_pool(
    pool: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    run("build", "m", "fake")
    before = images.describe(pool, "m")
    monkeypatch.setattr(command, "effective_root", lambda: False)
    assert isinstance(raised(*args), UsageError)
    assert images.describe(pool, "m") == before


def test_bad_arguments(pool: Path) -> None:
    assert isinstance(raised("build", "../m", "fake"), Refused)
    assert "there is: fake" in str(raised("build", "m", "other"))
    for option in ("kernel", "=x", ""):
        assert isinstance(raised("build", "m", "fake", "-o", option), UsageError)
    assert "each key once" in str(raised("build", "m", "fake", "-o", "a=1", "-o", "a=2"))
    assert list(pool.iterdir()) == []


def test_failing_builder_is_named_and_leaves_nothing(pool: Path) -> None:
    error = raised("build", "m", "fake", "-o", "fail=no space")
    assert isinstance(error, HostFault)
    assert "image builder fake failed: RuntimeError: no space" in str(error)
    assert list(pool.iterdir()) == []
