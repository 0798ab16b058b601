"""The systemd unit of the service: written if systemd runs, and accepted by systemd."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import LONG
from vtorque_admin.steps import systemd_unit
from vtorque_core.api.setup_steps import Installation
from vtorque_local import unit


@pytest.fixture
def place(tmp_path: Path) -> Installation:
    config, shell = tmp_path / "50% $HOME.toml", tmp_path / "jobshell"
    return Installation(Path(sys.executable), config, shell, python=Path(sys.executable))


def test_systemd_accepts_the_unit(place: Installation, tmp_path: Path) -> None:
    path = tmp_path / unit.NAME
    (step,) = systemd_unit(unit.NAME, unit.text(place), units=tmp_path, booted=tmp_path)
    step.apply()
    assert step.is_applied()
    said = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)),
        capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    text = path.read_text()
    assert f"local serve --foreground --config '{tmp_path}/50%% $$HOME.toml'\n" in text
    for limit in ("MemoryMax=95%", "TasksMax=90%", "Restart=on-failure"):
        assert f"{limit}\n" in text
    step.undo()
    assert not path.exists()


def test_no_unit_is_written_without_systemd(place: Installation, tmp_path: Path) -> None:
    assert systemd_unit(unit.NAME, unit.text(place), booted=tmp_path / "none") == []
