"""The KVM probe: cached once per boot, trusted only from root, bounded in time."""

import json
import os
from pathlib import Path

import pytest

from patience import with_more_time
from vtorque_core.base import kvm
from vtorque_core.base.errors import HostFault
from vtorque_core.base.kvm import Accel, Probe


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """Coming probes; the test fails if more are requested."""
    queue: list[Probe] = []
    monkeypatch.setattr(kvm, "probe", lambda user=None: queue.pop(0))
    return queue


def test_tcg_is_not_probed(tmp_path: Path, answers: list[Probe]) -> None:
    assert kvm.choose("tcg", tmp_path) == Accel("tcg")


def test_auto_selects_working_kvm(tmp_path: Path, answers: list[Probe]) -> None:
    answers.append(Probe())
    assert kvm.choose("auto", tmp_path) == Accel("kvm")


def test_auto_warns_once_and_emulates_without_kvm(tmp_path: Path, answers: list[Probe]) -> None:
    answers.append(Probe("no such device"))
    chosen = kvm.choose("auto", tmp_path)
    assert chosen.type == "tcg"
    assert chosen.warning is not None
    assert "no such device" in chosen.warning
    assert "\n" not in chosen.warning


def test_kvm_without_kvm_is_a_host_fault(tmp_path: Path, answers: list[Probe]) -> None:
    answers.append(Probe("no such device"))
    with pytest.raises(HostFault, match=r"no such device.*accel = \"auto\""):
        kvm.choose("kvm", tmp_path)


def test_choice_reports_an_unsupported_probe(tmp_path: Path, answers: list[Probe]) -> None:
    answers.append(Probe(note="cannot probe it on s390x"))
    assert kvm.choose("kvm", tmp_path) == Accel("kvm", "cannot probe it on s390x")


def test_probe_result_is_cached_for_this_boot(tmp_path: Path, answers: list[Probe]) -> None:
    answers.append(Probe("first"))
    umask = os.umask(0o077)  # root's programs have this group
    try:
        assert kvm.cached_probe(tmp_path) == Probe("first")
    finally:
        os.umask(umask)
    assert kvm.cached_probe(tmp_path) == Probe("first")
    mode = (tmp_path / "accel.json").stat().st_mode & 0o777
    assert mode == 0o644  # a user's dry run reads it too
    assert [p.name for p in tmp_path.iterdir()] == ["accel.json"]


def test_probe_is_cached_per_group(tmp_path: Path, answers: list[Probe]) -> None:
    answers += [Probe("for one"), Probe("for other")]
    kvm.cached_probe(tmp_path, "daemon")
    assert kvm.cached_probe(tmp_path, "bin") == Probe("for other")
    with pytest.raises(HostFault, match="QEMU's group 'nobody-of-this-name' does not"):
        kvm.cached_probe(tmp_path, "nobody-of-this-name")


def test_changed_access_to_dev_kvm_repeats_the_probe(
    tmp_path: Path, answers: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has joined the group of /dev/kvm does not need to wait for the next boot."""
    answers += [Probe("Permission denied"), Probe()]
    may = False
    monkeypatch.setattr(os, "access", lambda *_: may)
    assert kvm.cached_probe(tmp_path).failure
    may = True
    assert kvm.cached_probe(tmp_path) == kvm.cached_probe(tmp_path) == Probe()


def test_cached_probe_of_another_boot_is_ignored(
    tmp_path: Path, answers: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers += [Probe("before"), Probe("after")]
    kvm.cached_probe(tmp_path)
    monkeypatch.setattr(kvm, "boot_id", lambda: "another")
    assert kvm.cached_probe(tmp_path) == Probe("after")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"boot": 1}', "\xff", "null"])
def test_damaged_cached_probe_is_ignored(
    tmp_path: Path, answers: list[Probe], content: str
) -> None:
    (tmp_path / "accel.json").write_bytes(content.encode("latin-1"))
    (tmp_path / "accel.json").chmod(0o644)
    answers.append(Probe("fresh"))
    assert kvm.cached_probe(tmp_path) == Probe("fresh")


def test_cached_probe_that_others_can_write_is_ignored(
    tmp_path: Path, answers: list[Probe]
) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    forged = {
        "boot": boot,
        "user": None,
        "group": os.access("/dev/kvm", os.R_OK | os.W_OK),
        "failure": "",
        "note": "",
    }
    note = tmp_path / "accel.json"
    note.write_text(json.dumps(forged))
    note.chmod(0o666)
    answers.append(Probe("truth"))
    assert kvm.cached_probe(tmp_path) == Probe("truth")


def test_cached_probe_behind_a_link_is_ignored(tmp_path: Path, answers: list[Probe]) -> None:
    answers += [Probe("noted"), Probe("truth")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kvm.cached_probe(elsewhere)
    run = tmp_path / "run"
    run.mkdir()
    (run / "accel.json").symlink_to(elsewhere / "accel.json")
    assert kvm.cached_probe(run) == Probe("truth")


def test_missing_cache_directory_does_not_fail_the_probe(
    tmp_path: Path, answers: list[Probe]
) -> None:
    answers.append(Probe())
    assert kvm.cached_probe(tmp_path / "none") == Probe()


def test_real_probe_ends_within_its_timeout() -> None:
    found = kvm.probe(timeout=1.0)
    if not Path("/dev/kvm").exists():
        assert "/dev/kvm" in found.failure
    assert isinstance(found.failure, str)


def test_hanging_probe_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hang = tmp_path / "python"
    pid = tmp_path / "pid"
    hang.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 1000\n")
    hang.chmod(0o755)
    monkeypatch.setattr(kvm.sys, "executable", str(hang))

    def attempt(limit: float) -> None:
        found = kvm.probe(timeout=limit)
        assert "did not finish" in found.failure
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)

    with_more_time(attempt, 0.5, 5, 20)


def test_crashing_probe_means_no_kvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    crash.chmod(0o755)
    monkeypatch.setattr(kvm.sys, "executable", str(crash))
    assert kvm.probe() == Probe("the probe exited with status 3: out of luck")
