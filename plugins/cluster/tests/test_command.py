"""``vmgr images sync`` on the host of the pool and on a node, and the site's secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from programs import fake_program
from vtorque_cluster.cache import ImagePlaces
from vtorque_cluster.command import _site_secret
from vtorque_core.api import ConfigError, UsageError
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.base import run_tool
from vtorque_core.live import images
from vtorque_core.live.images import store
from vtorque_images import change
from vtorque_testing import vmgr


def test_site_secret_is_created_once(places: ImagePlaces) -> None:
    paths = places.paths
    secret = _site_secret(paths)
    assert len(secret) == 64
    assert paths.secret.stat().st_mode & 0o7777 == 0o600
    assert _site_secret(paths) == secret
    paths.secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        _site_secret(paths)


FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o|-l|-p) shift;; esac; shift; done
node=$1; shift
printf '%s %s\\n' "$node" "$*" >> "$0.log"
case $node in n2) echo "no space" >&2; exit 1;; esac
case "$*" in *rsync*) exec sh -c "$*";; esac
"""


@pytest.fixture
def config(places: ImagePlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the config of a site with one image, m; the tests are treated as root."""
    monkeypatch.setattr(images, "effective_root", lambda: True)
    with store.staging(places.pool) as staging:
        (staging / "k").write_text("kernel")
        built = BuiltImage("linux", "micro", "x86_64", 64, kernel="k")
        change.commit(places.pool, "m", staging, built, "test")
    path = tmp_path / "site.toml"
    path.write_text(f"""
[images]
pool = "{places.pool}"
cache = "{places.cache}"
[paths]
state = "{places.paths.state}"
run = "{places.paths.run}"
""")
    return path


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an ssh first in PATH that works here and fails for n2; return its log."""
    fake = fake_program(tmp_path / "bin" / "ssh", FAKE_SSH)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    monkeypatch.setattr(run_tool, "_TOOL_PATH", f"{fake.parent}:/usr/bin:/bin")
    return Path(f"{fake}.log")


def sync(config: Path, *args: str) -> Result:
    return vmgr.run(config, "images", "sync", *args)


def test_images_are_sent_to_all_reachable_nodes(
    config: Path, places: ImagePlaces, ssh: Path
) -> None:
    done = sync(config, "--nodes", "n[1-3]")
    assert done.exit_code == 1, done.output
    assert "n2:\n" in done.stdout and "2 of 3 nodes done; failed: n2\n" in done.stdout
    called = [line for line in ssh.read_text().splitlines() if "vmgr" in line]
    assert sorted(line.split()[0] for line in called) == ["n1", "n3"], "images were sent to n2"
    end = f"--config {config} images sync --received --only -- m"
    assert all(line.endswith(end) for line in called)
    assert list((places.cache / ".partial").glob("m/v*/k")), "rsync has sent no files"
    assert sync(config, "--received", "m").stdout == "copied: m\n"
    assert change.verify(places.cache, "m").name == "m"
    done = sync(config, "--nodes", "n1", "m")
    assert (done.exit_code, done.stdout) == (0, "1 of 1 nodes done\n")
    assert ssh.read_text().splitlines()[-1].endswith("images sync --received -- m")
    assert sync(config, "--received", "m").stdout == "already up to date: m\n"


def test_missing_requirement_is_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--nodes NODESET" in str(sync(config).exception)
    config.write_text(config.read_text().replace("cache =", "# cache ="))
    assert "[images] cache is not set" in str(sync(config).exception)
    monkeypatch.setattr(images, "effective_root", lambda: False)
    refused = sync(config, "--nodes", "n1").exception
    assert isinstance(refused, UsageError) and "root" in str(refused)


def test_missing_plugin_is_named_with_its_install_command(config: Path) -> None:
    config.write_text(f'[plugins]\ndisable = ["cluster"]\n{config.read_text()}')
    error = sync(config, "--nodes", "n1").exception
    assert isinstance(error, UsageError)
    assert "pip install --no-index --find-links WHEELS 'vtorque-cluster'" in str(error)
