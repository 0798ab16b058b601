"""The commands ``vmgr images add``, ``update`` and ``build NAME disk``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from vtorque_core.api import Refused, UsageError
from vtorque_core.live import images
from vtorque_testing import vmgr

FACTS = ("--guest-type", "linux", "--distro", "tiny", "--arch", "x86_64")
KERNEL = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\2\0\x3e\0" + bytes(200)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(images, "effective_root", lambda: True)
    (tmp_path / "pool").mkdir(mode=0o755)
    text = f'[images]\npool = "{tmp_path}/pool"\n[paths]\nstate = "{tmp_path}/s"\n'
    path = tmp_path / "site.toml"
    path.write_text(f'{text}run = "{tmp_path}/r"\n')
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loader.elf"
    path.write_bytes(KERNEL)
    return path


def run(config: Path, *args: object) -> Result:
    return vmgr.run(config, "images", *args)


def shown(config: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(run(config, "show", name).stdout)
    return found


def test_add_stores_all_options_in_the_image(config: Path, file: Path) -> None:
    more = ("--cmdline", "quiet a=b", "--label", "x=y=z", "--min-ram", 99)
    done = run(config, "add", file, *FACTS, *more)
    assert done.exit_code == 0, done.output
    image = shown(config, "loader")
    assert (image["distro"], image["arch"], image["min_ram_mib"]) == ("tiny", "x86_64", 99)
    assert (image["cmdline"], image["labels"]) == ("quiet a=b", {"x": "y=z"})
    assert image["builder"] == "disk"


def test_build_with_builder_disk_equals_add(config: Path, file: Path) -> None:
    run(config, "add", file, "one", *FACTS)
    words = ("guest_type=linux", "distro=tiny", "arch=x86_64", f"file={file}")
    done = run(config, "build", "two", "disk", *(part for word in words for part in ("-o", word)))
    assert done.exit_code == 0, done.output
    assert shown(config, "two")["sha256"] == shown(config, "one")["sha256"]


def test_add_creates_and_update_replaces_an_image(config: Path, file: Path) -> None:
    missing = run(config, "update", "m", file).exception
    assert isinstance(missing, Refused) and "no such image" in str(missing)
    run(config, "add", file, "m", *FACTS, "--label", "a=b")
    twice = run(config, "add", file, "m", *FACTS).exception
    assert isinstance(twice, Refused) and "vmgr images update m FILE" in str(twice)
    file.write_bytes(KERNEL + b"new")
    before = shown(config, "m")
    assert run(config, "update", "m", file).exit_code == 0
    after = shown(config, "m")
    assert after["sha256"] != before["sha256"]
    assert (after["distro"], after["labels"]) == ("tiny", {"a": "b"})
    both = run(config, "build", "m", "disk", "--new", "--update", "-o", f"file={file}")
    assert isinstance(both.exception, UsageError)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("format=iso", "must be one of qcow2, vmdk, vhdx, raw"),
        ("boot=never", "must be one of auto, kernel, disk"),
        ("min_ram=much", "min_ram=much: is not a whole number"),
        ("colour=red", "has no option colour"),
        ("label.=x", "has no option label."),
    ],
)
def test_bad_option_of_the_builder_is_refused(
    config: Path, file: Path, option: str, words: str
) -> None:
    error = run(config, "build", "m", "disk", "-o", f"file={file}", "-o", option).exception
    assert isinstance(error, Refused) and words in str(error)
    error = run(config, "build", "m", "disk").exception
    assert isinstance(error, Refused) and "-o file=FILE" in str(error)


def test_missing_plugin_is_named_with_its_install_command(config: Path, file: Path) -> None:
    assert "  add " in run(config, "--help").stdout
    config.write_text(f'[plugins]\ndisable = ["disk-image"]\n{config.read_text()}')
    for args in (("add", file), ("update", "m", file)):
        error = run(config, *args).exception
        assert isinstance(error, UsageError)
        assert "pip install --no-index --find-links WHEELS 'vtorque-disk-image'" in str(error)
    assert "  add " not in run(config, "--help").stdout
    assert run(config, "nonsense").exit_code == 2
