"""Root disks from untrusted images: root does not parse the image."""

import os
import subprocess

import pytest

from reachable import reachable
from vtorque_core.api import confined_tool
from vtorque_core.base.errors import HostFault
from vtorque_core.resources.disk import DiskCopy, Overlay


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_disk_copy_runs_qemu_img_unprivileged_with_open_files(tmp_path, monkeypatch):
    """Root's qemu-img would parse untrusted data (CVE-2024-4467)."""
    tool = tmp_path / "tools/qemu-img"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor last; do :; done\necho "$(id -u) $*" >"$last"\n')
    tool.chmod(0o755)
    reachable(tool)  # by the user nobody
    monkeypatch.setattr(confined_tool, "_PATH", f"{tool.parent}:{confined_tool._PATH}")
    (tmp_path / "base").write_bytes(bytes(512))
    path = tmp_path / "copy"
    DiskCopy(str(path), str(tmp_path / "base"), "raw", uid=1234).create()
    who, *words = path.read_text().split()
    assert (who, words[-2].rpartition("/")[0]) == ("65534", "/proc/self/fd")
    assert (path.stat().st_uid, path.stat().st_mode & 0o7777) == (1234, 0o600)


@pytest.mark.parametrize("made", [Overlay, DiskCopy])
def test_image_with_a_backing_file_is_rejected(tmp_path, made):
    """The image may have got a backing file after it was added to the pool."""
    image, other = tmp_path / "base", tmp_path / "other"
    other.write_bytes(bytes(1 << 20))
    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(other), str(image)]
    subprocess.run(create, check=True, timeout=180)
    with pytest.raises(HostFault, match="has a backing file"):
        made(str(tmp_path / "o"), str(image), "qcow2").create()
    assert not (tmp_path / "o").exists()


def test_overlay_gets_the_size_of_its_image_without_qemu_img(tmp_path):
    image = tmp_path / "base"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", image, "3G"], check=True, timeout=180
    )
    with image.open("r+b") as file:
        file.seek(48)  # refcount_table_offset (docs/interop/qcow2.txt): no tool accepts this one
        file.write(b"\xff" * 8)
    path = tmp_path / "o"
    Overlay(str(path), str(image), "qcow2").create()
    assert int.from_bytes(path.read_bytes()[24:32], "big") == 3 << 30
    odd = tmp_path / "odd"
    odd.write_bytes(bytes(1000))  # QEMU has whole sectors
    Overlay(str(tmp_path / "p"), str(odd), "raw").create()
    assert int.from_bytes((tmp_path / "p").read_bytes()[24:32], "big") == 1024
