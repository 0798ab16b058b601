"""The image pool: commits, lookups and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_keys import BUILT
from reachable import reachable
from vtorque_core.api import HostFault, Refused, VtorqueError
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.images.pool import select
from vtorque_core.images.sidecar import MAX_CMDLINE, parse_sidecar
from vtorque_core.live.images import BrokenImage, check_facts, describe, listing, lookup, store
from vtorque_images import change as images
from vtorque_images.check import check_disk

MICRO = replace(BUILT, kernel="vmlinux", initrd="initrd", labels={"init": "micro"})


def put(pool: Path, name: str, kernel: bytes = b"kernel", built: BuiltImage = MICRO) -> Any:
    with store.staging(pool) as staging:
        (staging / "vmlinux").write_bytes(kernel)
        (staging / "initrd").write_bytes(b"initrd")
        return images.commit(pool, name, staging, built, "test")


def qcow2(path: Path, *options: str) -> Path:
    command = ["qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), "1M"]
    subprocess.run(command, check=True, timeout=180)
    return path


def disk_image(pool: Path, disk_format: str, make: Callable[[Path], object]) -> Any:
    built = BuiltImage("linux", "debian", "x86_64", 256, disk="disk", disk_format=disk_format)
    with store.staging(pool) as staging:
        make(staging / "disk")
        return images.commit(pool, "d", staging, built, "test")


def test_commit_then_lookup_gives_the_same_image(pool: Path) -> None:
    committed = put(pool, "m")
    found = lookup(pool, "m")
    assert found == committed
    assert found.kernel is not None
    assert found.initrd is not None
    assert found.kernel.read_bytes() == b"kernel"
    assert found.kernel.is_relative_to(pool / "m")
    assert found.disk is None
    assert (found.distro, found.cmdline, found.labels) == (
        "micro",
        "console=ttyS0",
        {"init": "micro"},
    )
    assert found.kernel.stat().st_mode & 0o7777 == 0o644
    assert found.kernel.parent.stat().st_mode & 0o7777 == 0o755
    assert [p.name for p in pool.iterdir()] == ["m"], "the staging directory is left"


def test_modes_do_not_depend_on_the_umask(pool: Path) -> None:
    before = os.umask(0o077)
    try:
        image = put(pool, "m")
    finally:
        os.umask(before)
    assert image.kernel.stat().st_mode & 0o7777 == 0o644
    assert image.kernel.parent.stat().st_mode & 0o7777 == 0o755
    assert (pool / "m").stat().st_mode & 0o7777 == 0o755
    assert (pool / "m" / "image.json").stat().st_mode & 0o7777 == 0o644


def test_hash_depends_on_content_only(pool: Path) -> None:
    assert put(pool, "a").sha256 == put(pool, "b").sha256
    assert put(pool, "c", b"another").sha256 != lookup(pool, "a").sha256


def expire(pool: Path) -> None:
    """Let the time expire for which versions without a name are kept."""
    for note in pool.glob("*/*.old"):
        note.write_text("0")


def test_replaced_version_is_kept_for_starting_jobs(pool: Path) -> None:
    first = put(pool, "m", b"1")
    second = put(pool, "m", b"2")
    assert first.kernel.read_bytes() == b"1", (
        "the old version was removed, which starting jobs may use"
    )
    assert lookup(pool, "m") == second
    expire(pool)
    assert store.sweep(pool) == [f"m/{first.kernel.parent.name}"]
    assert sorted(p.name for p in (pool / "m").iterdir()) == [
        "image.json",
        second.kernel.parent.name,
    ]
    assert lookup(pool, "m") == second


def test_equal_content_is_the_same_version(pool: Path) -> None:
    first = put(pool, "m", b"1")
    inode = first.kernel.stat().st_ino
    again = put(pool, "m", b"1")
    assert again == first
    assert again.kernel.stat().st_ino == inode, "the file of running guests was replaced"
    put(pool, "m", b"2")
    back = put(pool, "m", b"1")
    expire(pool)
    store.sweep(pool)
    assert lookup(pool, "m") == back == first
    assert len(list((pool / "m").glob("v*"))) == 1


def test_equal_content_repairs_a_damaged_image(pool: Path) -> None:
    first = put(pool, "m", b"1")
    first.kernel.write_bytes(b"x")
    assert put(pool, "m", b"1") == first
    assert images.verify(pool, "m").kernel.read_bytes() == b"1"


@pytest.mark.parametrize(
    ("where", "step"),
    [(Path, "mkdir"), (Path, "rename"), (Path, "chmod"), (os, "fchmod"), (os, "fsync")],
)
def test_failed_commit_keeps_the_old_image(
    pool: Path, monkeypatch: pytest.MonkeyPatch, where: Any, step: str
) -> None:
    old = put(pool, "m", b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with store.staging(pool) as staging, monkeypatch.context() as patch:
        (staging / "vmlinux").write_bytes(b"new")
        (staging / "initrd").write_bytes(b"initrd")
        patch.setattr(where, step, full)
        with pytest.raises(HostFault, match="No space left"):
            images.commit(pool, "m", staging, MICRO, "test")
    assert lookup(pool, "m") == old
    images.verify(pool, "m")


def test_new_image_is_absent_until_its_sidecar_exists(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(images, "_write_sidecar", killed)
        with pytest.raises(KeyboardInterrupt):
            put(pool, "m")
    with pytest.raises(Refused, match="no such image"):
        lookup(pool, "m")
    assert listing(pool) == []
    image = put(pool, "m")
    assert [p.name for p in (pool / "m").glob("v*")] == [image.kernel.parent.name]


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", ".", "../m", "/etc/passwd", "m/../m", "a b", "a\nb", "a'b", 'a"b', "<m>"),
        *("$(m)", "-m", ".m", "x" * 101, "m\0", "ä"),
    ],
)
def test_bad_names_are_refused_everywhere(pool: Path, name: str) -> None:
    put(pool, "m")
    calls: list[Callable[[], object]] = [
        lambda: lookup(pool, name),
        lambda: images.verify(pool, name),
        lambda: describe(pool, name),
        lambda: images.remove(pool, name),
        lambda: images.commit(pool, name, pool, MICRO, "test"),
    ]
    for call in calls:
        with pytest.raises(Refused, match="is not the name of an image") as caught:
            call()
        assert "\n" not in str(caught.value)


@given(st.text())
def test_any_name_raises_a_vtorque_error(name: str) -> None:
    with pytest.raises(VtorqueError):
        lookup(Path("/nonexistent-pool"), name)


def test_submit_host_without_a_pool_points_to_the_nodes() -> None:
    with pytest.raises(HostFault, match=r"/none does not exist on this host\. Run this command"):
        lookup(Path("/none"), "micro")


def test_unknown_image_names_close_ones(pool: Path) -> None:
    put(pool, "micro")
    with pytest.raises(Refused, match=r"img=micor: no such image in .*did you mean micro\?"):
        lookup(pool, "micor")


def test_missing_pool_is_a_host_fault(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="does not exist"):
        lookup(tmp_path / "none", "m")


@pytest.mark.parametrize("mode", [0o777, pytest.param(0o775, marks=pytest.mark.root), 0o757])
def test_pool_that_others_can_write_is_refused(pool: Path, mode: int) -> None:
    put(pool, "m")
    pool.chmod(mode)
    for call in (lambda: lookup(pool, "m"), lambda: listing(pool)):
        with pytest.raises(Refused, match=re.escape(str(pool))) as caught:
            call()
        assert f"{mode:04o}" in str(caught.value)


def test_parent_that_others_can_write_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    (parent / "pool").mkdir(parents=True)
    parent.chmod(0o777)
    with pytest.raises(Refused, match=f"{re.escape(str(parent))}: can be written by others"):
        lookup(parent / "pool", "m")


@pytest.mark.parametrize("which", ["sidecar", "file", "version", "image"])
def test_image_that_others_can_write_is_refused(pool: Path, which: str) -> None:
    image = put(pool, "m")
    paths = {
        "sidecar": pool / "m/image.json",
        "file": image.kernel,
        "version": image.kernel.parent,
        "image": pool / "m",
    }
    paths[which].chmod(0o777)
    with pytest.raises(Refused, match="can be written by others"):
        lookup(pool, "m")


def test_image_outside_the_pool_is_refused(pool: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    put(outside, "m")
    (pool / "m").symlink_to(outside / "m")
    with pytest.raises(Refused, match="symbolic link"):
        lookup(pool, "m")


def test_sidecar_that_is_a_link_is_refused(pool: Path, tmp_path: Path) -> None:
    put(pool, "m")
    (pool / "m/image.json").rename(tmp_path / "image.json")
    (pool / "m/image.json").symlink_to(tmp_path / "image.json")
    with pytest.raises(Refused, match="the image is broken"):
        lookup(pool, "m")


def test_file_that_is_a_link_is_refused(pool: Path, tmp_path: Path) -> None:
    image = put(pool, "m")
    image.kernel.rename(tmp_path / "vmlinux")
    image.kernel.symlink_to(tmp_path / "vmlinux")
    with pytest.raises(Refused, match="not a regular file"):
        lookup(pool, "m")


def test_changed_file_is_refused_by_lookup_and_verify(pool: Path) -> None:
    image = put(pool, "m")
    image.kernel.write_bytes(b"KERNEL")
    with pytest.raises(Refused, match="vmlinux is not the file that was hashed"):
        lookup(pool, "m")
    with pytest.raises(Refused, match="vmlinux has sha256"):
        images.verify(pool, "m")
    assert [type(item) for item in listing(pool)] == [BrokenImage]
    assert [type(image) for image in listing(pool)] == [BrokenImage]


def test_change_with_a_forged_time_is_found_by_verify(pool: Path) -> None:
    image = put(pool, "m")
    status = image.kernel.stat()
    image.kernel.write_bytes(b"KERNEL")
    os.utime(image.kernel, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(Refused, match="vmlinux has sha256"):
        images.verify(pool, "m")


def test_missing_file_is_refused(pool: Path) -> None:
    put(pool, "m").initrd.unlink()
    with pytest.raises(Refused, match=r"the image is broken: .*initrd: No such file"):
        lookup(pool, "m")


@pytest.mark.root
def test_copied_pool_is_usable_after_root_verified_it(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(pool, "m")
    copy = tmp_path / "copy"
    shutil.copytree(pool, copy)
    with pytest.raises(Refused, match="run vmgr images verify m as root"):
        lookup(copy, "m")
    with monkeypatch.context() as another:
        another.setattr(images.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(Refused, match="as root"):
            images.verify(copy, "m")
    verified = images.verify(copy, "m")
    assert lookup(copy, "m") == verified


def _edit(pool: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = pool / "m/image.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "../../../etc/shadow"},
        {"kernel": "/etc/shadow"},
        {"version": ".."},
        {"version": "v1/../.."},
        {"name": "other"},
        {"schema": 2},
        {"arch": "<x>"},
        {"arch": 1},
        {"min_ram_mib": True},
        {"min_ram_mib": -1},
        {"cmdline": "a\nb"},
        {"cmdline": "x" * (MAX_CMDLINE + 1)},
        {"labels": {"a": 1}},
        {"labels": []},
        {"files": {}},
        {"files": None},
        {"sha256": "0" * 64},
        {"disk_format": "vmdk"},
        {"kernel": None},
        {"initrd": "vmlinux"},
    ],
)
def test_wrong_sidecar_is_refused(pool: Path, change: dict[str, Any]) -> None:
    put(pool, "m")
    _edit(pool, lambda data: data.update(change))
    with pytest.raises(Refused, match=r"img=m: the image is broken: image\.json"):
        lookup(pool, "m")


def test_sidecar_that_is_not_json_or_too_long_is_refused(pool: Path) -> None:
    put(pool, "m")
    for text in (b"", b"{", b"\xff", b"[]", b"[" * 60000, b" " * 70000):
        (pool / "m/image.json").write_bytes(text)
        with pytest.raises(Refused, match="the image is broken"):
            lookup(pool, "m")


def test_sidecar_that_is_a_fifo_does_not_block(pool: Path) -> None:
    put(pool, "m")
    (pool / "m/image.json").unlink()
    os.mkfifo(pool / "m/image.json")
    with pytest.raises(Refused, match="the image is broken"):
        lookup(pool, "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = ("schema", "name", "guest_type", "disk", "kernel", "files", "labels", "version", "sha256")


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_sidecar_is_parsed_or_a_value_error(change: dict[str, Any]) -> None:
    good = {
        "schema": 1,
        "name": "m",
        "guest_type": "linux",
        "distro": "d",
        "arch": "x86_64",
        "min_ram_mib": 1,
        "disk": None,
        "disk_format": "raw",
        "kernel": "k",
        "initrd": None,
        "cmdline": "",
        "labels": {},
        "version": "v1",
        "builder": "b",
        "created": "",
        "files": {},
    }
    with pytest.raises(ValueError, match=r".+"):
        parse_sidecar(json.dumps({**good, **change}).encode(), "m")


def test_selected_image_must_match_distro_and_arch(pool: Path) -> None:
    image = put(pool, "m")
    assert select(pool, "m", "micro", "x86_64") == image
    assert select(pool, "m", "", None) == image
    with pytest.raises(Refused, match="distro=debian: does not fit img=m, whose distro is micro"):
        select(pool, "m", "debian", None)
    with pytest.raises(Refused, match="arch=aarch64: does not fit img=m, whose arch is x86_64"):
        select(pool, "m", None, "aarch64")


def test_selection_by_family_ignores_case(pool: Path) -> None:
    rocky = replace(MICRO, distro="Rocky", labels={"family": "redhat"})
    image = put(pool, "r", built=rocky)
    put(pool, "m")
    for distro in ("rocky", "ROCKY", "RedHat"):
        assert select(pool, None, distro, None) == select(pool, "r", distro, None) == image
    with pytest.raises(Refused, match=r"does not fit img=r, whose distro is rocky or redhat"):
        select(pool, "r", "debian", None)


def test_selection_without_a_name_uses_the_only_match(pool: Path) -> None:
    with pytest.raises(Refused, match="the image pool has no usable image"):
        select(pool, "", "", "")
    image = put(pool, "m")
    assert select(pool, None, "micro", None) == image
    assert select(pool, "", "", "") == image
    with pytest.raises(Refused, match=r"no distro=debian image \(available: m\)"):
        select(pool, None, "debian", None)
    put(pool, "n")
    with pytest.raises(Refused, match=r"several images fit distro=micro.*\(m, n\)"):
        select(pool, None, "micro", None)


@pytest.mark.parametrize("kind", ["missing", "empty", "symlink", "hard link", "directory"])
def test_commit_takes_plain_files_only(pool: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with store.staging(pool) as staging:
        (staging / "initrd").write_bytes(b"initrd")
        target = staging / "vmlinux"
        match kind:
            case "empty":
                target.touch()
            case "symlink":
                target.symlink_to(secret)
            case "hard link":
                target.hardlink_to(secret)
            case "directory":
                target.mkdir()
        with pytest.raises(Refused, match="vmlinux"):
            images.commit(pool, "m", staging, MICRO, "test")
    assert not (pool / "m").exists()


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", ".hidden", "a/b", ""])
def test_commit_takes_files_of_the_staging_directory_only(pool: Path, file: str) -> None:
    built = BuiltImage("linux", "micro", "x86_64", 64, kernel=file)
    with pytest.raises(Refused, match="a repeated file name"), store.staging(pool) as staging:
        images.commit(pool, "m", staging, built, "test")


def test_disk_must_be_of_the_declared_format(pool: Path) -> None:
    with pytest.raises(Refused, match="disk has the format qcow2, not raw"):
        disk_image(pool, "raw", qcow2)
    with pytest.raises(Refused, match="disk has the format raw, not qcow2"):
        disk_image(pool, "qcow2", lambda path: path.write_bytes(bytes(1 << 20)))
    assert disk_image(pool, "qcow2", qcow2).disk.name == "disk"
    raw = disk_image(pool, "raw", lambda path: path.write_bytes(bytes(1 << 20)))
    assert raw.disk_format == "raw"


def test_disk_with_a_backing_or_data_file_is_refused(pool: Path, tmp_path: Path) -> None:
    base = qcow2(tmp_path / "base")
    with pytest.raises(Refused, match="backing file"):
        disk_image(pool, "qcow2", lambda path: qcow2(path, "-b", str(base), "-F", "qcow2"))
    with pytest.raises(Refused, match="data file"):
        disk_image(pool, "qcow2", lambda p: qcow2(p, "-o", f"data_file={tmp_path / 'data'}"))
    with pytest.raises(Refused, match="truncated"):
        disk_image(pool, "qcow2", lambda path: path.write_bytes(b"QFI\xfb\0\0\0\3"))


def test_backing_file_is_found_even_if_qemu_img_fails(tmp_path: Path) -> None:
    """A name at an offset beyond the file makes qemu-img fail; the header check comes first."""
    path = qcow2(tmp_path / "disk")
    content = bytearray(path.read_bytes())
    content[8:16] = (1 << 40).to_bytes(8, "big")
    path.write_bytes(content)
    with pytest.raises(Refused, match="backing file"):
        check_disk(path, "qcow2")


def test_facts_without_disk_and_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        check_facts(BuiltImage("linux", "micro", "x86_64", 64))
    with pytest.raises(ValueError, match="without a kernel"):
        check_facts(BuiltImage("linux", "micro", "x86_64", 64, disk="d", initrd="i"))


def test_removed_image_is_gone(pool: Path) -> None:
    put(pool, "m")
    put(pool, "n")
    images.remove(pool, "m")
    assert [image.name for image in listing(pool)] == ["n"]
    assert not (pool / "m").exists()
    with pytest.raises(Refused, match="no such image"):
        images.remove(pool, "m")


def test_broken_image_can_be_removed_and_replaced(pool: Path) -> None:
    put(pool, "m")
    (pool / "m/image.json").write_text("{")
    put(pool, "m")
    lookup(pool, "m")
    (pool / "m/image.json").write_text("{")
    images.remove(pool, "m")
    assert listing(pool) == []


def test_staging_directory_of_a_killed_builder_is_removed(pool: Path) -> None:
    left = pool / ".staging-left"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    with store.staging(pool) as living:
        with store.staging(pool) as second:
            assert living.is_dir()
            assert second != living
        assert not left.exists()
        assert living.stat().st_mode & 0o777 == 0o700
    assert not living.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_disk_is_parsed_unprivileged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vtorque_core.api import confined_tool

    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "qemu-img").write_text('#!/bin/sh\necho "{\\"format\\": \\"of $(id -u)\\"}"\n')
    reachable(tools / "qemu-img").chmod(0o755)
    monkeypatch.setattr(confined_tool, "_PATH", f"{tools}:{confined_tool._PATH}")
    (tmp_path / "disk").write_bytes(bytes(512))
    with pytest.raises(Refused, match="disk has the format of 65534, not raw"):
        check_disk(tmp_path / "disk", "raw")
