"""A disk in a file: real mke2fs, read back with debugfs."""

import subprocess

import pytest

from journalled import through_the_journal
from vtorque_core.api.disk_file import DiskFile
from vtorque_core.base.errors import HostFault


def debugfs(path, command):
    done = subprocess.run(
        ["debugfs", "-R", command, path], capture_output=True, text=True, check=True, timeout=180
    )
    return done.stdout


def test_disk_has_a_file_system_owned_by_the_given_user(tmp_path):
    disk = DiskFile(str(tmp_path / "d.raw"), 16, owner=(1234, 5678), label="scratch")
    disk.create()
    status = (tmp_path / "d.raw").stat()
    assert (status.st_size, status.st_mode & 0o7777) == (16 << 20, 0o600)
    assert status.st_blocks * 512 < 16 << 20
    assert "User:  1234   Group:  5678" in debugfs(disk.path, "stat <2>")
    assert "scratch" in debugfs(disk.path, "show_super_stats -h")


def test_disk_without_a_file_system_is_zeros(tmp_path):
    disk = DiskFile(str(tmp_path / "d.raw"), 1, file_system="")
    disk.create()
    assert (tmp_path / "d.raw").read_bytes() == bytes(1 << 20)


def test_release_by_another_process_is_idempotent_and_removes_a_partial_disk(tmp_path):
    disk = DiskFile(str(tmp_path / "d.raw"), 4, uid=-1)
    again = through_the_journal(disk, tmp_path)
    again.release()
    (tmp_path / "d.raw").write_bytes(b"half")
    again.release()
    again.release()
    assert not (tmp_path / "d.raw").exists()


def test_create_rejects_an_existing_file_and_size_zero(tmp_path):
    (tmp_path / "d.raw").write_text("mine")
    with pytest.raises(HostFault, match="File exists"):
        DiskFile(str(tmp_path / "d.raw"), 4).create()
    assert (tmp_path / "d.raw").read_text() == "mine"
    with pytest.raises(HostFault, match="invalid disk size 0 MiB"):
        DiskFile(str(tmp_path / "e.raw")).create()
