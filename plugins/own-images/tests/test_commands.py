"""``vmgr images pull``, ``list --mine`` and ``remove`` for users' own images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from personal_site import PersonalSite
from vtorque_core.api import Refused
from vtorque_own_images import command, pull
from vtorque_own_images.cache import Cache
from vtorque_testing import vmgr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the config of a site with an administrator."""
    path = tmp_path / "site.toml"
    path.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    return path


def test_pulled_image_is_listed_and_removed(
    config: Path, layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "site_of", lambda _: site)
    pulled = vmgr.run(config, "images", "pull", f"oci:{layout}").stdout
    name, _, file = pulled.strip().rpartition(": ")
    assert Path(file).parent == images.root and name == f"own:{Path(file).stem[:12]}"
    (row,) = json.loads(vmgr.run(config, "images", "list", "--mine", "--json").stdout)
    assert (row["name"], row["reference"]) == (name, f"oci:{layout}")
    header, line = vmgr.run(config, "images", "list", "--mine").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "LAST", "USED", "REFERENCE"]
    assert line.split()[0] == name and line.endswith(f"oci:{layout}")
    assert vmgr.run(config, "images", "remove", name).stdout == f"removed {name}\n"
    assert list(images.root.iterdir()) == []
    assert vmgr.run(config, "images", "list", "--mine").stdout == ""
    with pytest.raises(Refused, match="not in your cache"):
        raise vmgr.run(config, "images", "remove", name).exception or AssertionError


def test_record_that_a_guest_has_forged_is_listed_without_control_characters(
    config: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A guest with work=home can write the cache."""
    images.root.mkdir(mode=0o700, parents=True)
    for digit, references in (("a", ["oci:\x1b]0;title\x07"]), ("b", [])):
        images.file(digit * 64).touch()
        facts = json.dumps({"format": 1, "references": references})
        images.file(digit * 64).with_suffix(".json").write_text(facts)
    listed = vmgr.run(config, "images", "list", "--mine").stdout
    assert "title" in listed and listed.replace("\n", "").isprintable()
    monkeypatch.setattr(pull, "has_jobs", lambda _: False)
    pull._prune(images, PersonalSite(keep=0.0))
    said = capsys.readouterr().err
    assert "title" in said and said.replace("\n", "").isprintable()


def test_pull_on_site_with_administrator_is_refused(
    config: Path, layout: Path, images: Cache
) -> None:
    with pytest.raises(Refused, match="which this site does not accept"):
        raise vmgr.run(config, "images", "pull", f"oci:{layout}").exception or AssertionError
    assert not images.root.exists()
