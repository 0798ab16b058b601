"""Doctor's checks of a personal site: each missing item, with the way to install it."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vtorque_admin import doctor
from vtorque_core.base import kvm

OWNER = os.getuid() or 65534  # for root: the user nobody's personal site
SITE: Any = SimpleNamespace(
    owner=OWNER, node=SimpleNamespace(accel="auto", qemu_user=""),
    paths=SimpleNamespace(run=Path("/nonexistent")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "package"),
    [
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("/usr/lib/qemu/virtiofsd", "virtiofsd, on Debian 12 qemu-system-common"),
        ("libvirtd", "libvirt-daemon-system"),
    ],
)
def test_missing_program_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, missing: str, package: str
) -> None:
    def which(tool: str, path: str) -> str | None:
        return None if tool == missing else tool

    monkeypatch.setattr(shutil, "which", which)
    found = [result for result in doctor.check_tools(SITE) if result.status != "ok"]
    assert [(each.status, each.message, each.fix) for each in found] == [
        ("failed", f"{missing} is missing", f"as root: install the package {package}")
    ]


@pytest.mark.parametrize(
    ("there", "mine", "fix"),
    [
        (True, False, f"as root: usermod -aG kvm {pwd.getpwuid(OWNER).pw_name}; then log in"),
        (True, True, "enable virtualization in the firmware"),
        (False, False, "enable virtualization in the firmware"),
    ],
)
def test_kvm_without_access_is_reported_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool, mine: bool, fix: str
) -> None:
    device = tmp_path / "kvm"
    if there:
        device.touch()
    monkeypatch.setattr(doctor, "_KVM", device)
    monkeypatch.setattr(os, "access", lambda *_: mine)
    chosen = kvm.Accel("tcg", "KVM fails (Permission denied)")
    monkeypatch.setattr(kvm, "choose", lambda *_: chosen)
    (result,) = doctor.check_accel(SITE)
    assert (result.status, result.message) == ("warning", chosen.warning)
    assert result.fix.startswith(fix)
    monkeypatch.setattr(kvm, "choose", lambda *_: replace(chosen, type="kvm", warning=None))
    assert [result.status for result in doctor.check_accel(SITE)] == ["ok"]
