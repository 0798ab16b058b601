"""Test the warnings about default ACLs with real ACLs."""

import os
import subprocess

from vtorque_linux_guest.job import default_acl


def test_warnings_name_directories_with_a_default_acl(tmp_path):
    plain, listed = tmp_path / "plain", tmp_path / "listed"
    for directory in (plain, listed):
        directory.mkdir()
    subprocess.run(["setfacl", "-m", f"u:{os.getuid()}:rwx", plain], check=True, timeout=60)
    subprocess.run(["setfacl", "-d", "-m", "g::rwx", listed], check=True, timeout=60)
    places = [str(each) for each in (plain, listed, listed, tmp_path / "none")]
    (line,) = default_acl.warnings(places, 0o077)
    assert line.startswith(f"warning: {listed} has a default ACL. In a guest the umask 0077 limits")


def test_umask_that_masks_nothing_gives_no_warnings(tmp_path):
    subprocess.run(["setfacl", "-d", "-m", "g::rwx", tmp_path], check=True, timeout=60)
    assert default_acl.warnings([str(tmp_path)], 0) == []
