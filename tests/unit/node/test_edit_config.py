"""Setting one key of the site config changes nothing else."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from vtorque_admin import edit_config as edit
from vtorque_core.base.errors import HostFault


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '\n[options.img]\ndefault = "m"\n'),
        ("# x\n", '# x\n\n[options.img]\ndefault = "m"\n'),
        ("[options.img]\ndeny = ['a']\n", "[options.img]\ndefault = \"m\"\ndeny = ['a']\n"),
        ("[options.img] # c\n", '[options.img] # c\ndefault = "m"\n'),
        (
            "[options.img]\n  default = 'old' # why\n[node]\n",
            '[options.img]\n  default = "m" # why\n[node]\n',
        ),
        ('[options]\nimg.default = "old"\n', '[options]\nimg.default = "m"\n'),
        ('options = {img = {default = "old"}}\n', 'options = {img = {default = "m"}}\n'),
        ('options = {img = {deny = ["x"]}}\n', None),
        ('[options.img]\ndefault = """\nold"""\n', None),
        ("[options\n", None),
        ("options = 1\n", None),
    ],
)
def test_key_is_set_or_the_edit_is_rejected(before: str, after: str | None) -> None:
    if after is None:
        with pytest.raises(
            HostFault, match=r'\[options.img\] is too complex .*write default = "m"'
        ):
            edit.set_value(before, "options.img", "default", "m")
        return
    assert edit.set_value(before, "options.img", "default", "m") == after
    assert tomllib.loads(after)["options"]["img"]["default"] == "m"


def test_hostile_text_stays_text() -> None:
    value = '"]\n[node]\naccel = "kvm\\1'
    new = edit.set_value("[options.img]\n", "options.img", "default", value)
    assert tomllib.loads(new) == {"options": {"img": {"default": value}}}


def test_mode_and_links_stay(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_text("a")
    real.chmod(0o640)
    (tmp_path / "link.toml").symlink_to(real)
    edit.write(tmp_path / "link.toml", "b")
    assert (real.read_text(), real.stat().st_mode & 0o777) == ("b", 0o640)
    assert (tmp_path / "link.toml").is_symlink()
    edit.write(tmp_path / "new.toml", "c")
    assert (tmp_path / "new.toml").stat().st_mode & 0o777 == 0o644
    assert edit.read(tmp_path / "none.toml").startswith("# vTorque site config")
    assert sorted(os.listdir(tmp_path)) == ["link.toml", "new.toml", "real.toml"]  # noqa: PTH208
