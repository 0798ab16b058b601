"""The core's resource kinds: created safely, released twice, and released after any failure."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from journalled import through_the_journal
from vtorque_core.api.job_files import File, Tree
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.resources import user_daemon, virtiofs_daemon
from vtorque_core.resources.disk import DiskCopy, Overlay
from vtorque_core.resources.kinds import CORE_KINDS, HELPERS, core_kind
from vtorque_core.resources.lease import Lease
from vtorque_core.resources.virtiofs_daemon import Virtiofsd

ROOT = os.geteuid() == 0


def test_resources_that_survive_a_reboot_are_known():
    kinds = {name: core_kind(name) for name in CORE_KINDS}
    assert all(kind is not None and kind.kind == name for name, kind in kinds.items())
    assert kinds.keys() > HELPERS
    lasting = {name for name, kind in kinds.items() if not kind.volatile}
    assert lasting == {"file", "image", "tree", "overlay", "disk-copy", "disk-file", "spare"}
    assert {name for name, k in kinds.items() if k.blocking} == {
        "domain",
        "process",
        "starter",
        "virtiofsd",
        "userdisk",
        "mount",
        "netfilter",
        "image",
        "spare",
    }


# -- file, tree -------------------------------------------------------------------------------


def test_file_has_its_mode_and_content_and_is_released_twice(tmp_path):
    path = tmp_path / "seed.iso"
    file = File(str(path), mode=0o644, content=b"\0data")
    old = os.umask(0o077)
    try:
        file.create()
    finally:
        os.umask(old)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (b"\0data", 0o644)
    again = through_the_journal(file, tmp_path)
    assert again == File(str(path), mode=0o644)
    again.release()
    again.release()
    assert not path.exists()


def test_file_neither_overwrites_nor_follows_links(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(victim)
    for path in (victim, link):
        with pytest.raises(HostFault, match="File exists"):
            File(str(path), content=b"x").create()
    File(str(link)).release()
    assert victim.read_text() == "precious"
    assert not link.is_symlink()


def test_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "proof.json"
    file = File(str(path), mode=0o644, replace=True, content=b"1")
    file.create()
    dataclasses.replace(file, content=b"2").create()
    assert path.read_bytes() == b"2"
    Path(safefs.temporary_name(str(path))).write_bytes(b"half")
    through_the_journal(file, tmp_path).release()
    assert not path.exists() and not Path(safefs.temporary_name(str(path))).exists()


@pytest.mark.parametrize("path", ["relative", "/tmp/../etc/x", "/"])
def test_strange_paths_are_refused(path):
    for resource in (File(path), Tree(path)):
        with pytest.raises(HostFault, match="not an absolute path"):
            resource.create()
        with pytest.raises(HostFault, match="not an absolute path"):
            resource.release()


def test_directory_that_others_can_write_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for resource in (File(str(open_to_all / "f")), Tree(str(open_to_all / "t" / "u"))):
        with pytest.raises(HostFault, match="open can be written by others"):
            resource.create()
        with pytest.raises(HostFault, match="open can be written by others"):
            resource.release()
    open_to_all.chmod(0o1777)
    File(str(open_to_all / "f")).create()


@pytest.mark.skipif(not ROOT, reason="only root can give a directory away")
def test_directory_of_a_user_is_refused(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 4242, 4242)
    with pytest.raises(HostFault, match="theirs belongs to uid 4242"):
        File(str(theirs / "f")).create()


def test_link_to_a_safe_directory_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    File(str(tmp_path / "link" / "f")).create()
    assert (tmp_path / "real" / "f").exists()


def test_tree_is_removed_with_its_content_without_following_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    tree = Tree(str(tmp_path / "job"), mode=0o711)
    tree.create()
    top = tmp_path / "job"
    assert top.stat().st_mode & 0o7777 == 0o711
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").write_text("x")
    (top / "a" / "out").symlink_to(outside)
    (top / "dangling").symlink_to("/nonexistent")
    os.mkfifo(top / "fifo")
    again = through_the_journal(tree, tmp_path)
    again.release()
    again.release()
    assert not top.exists()
    assert (outside / "precious").exists()


def test_tree_waits_for_a_straggler(tmp_path, monkeypatch):
    """qemu-img continues for a moment when the prologue that called it was killed."""
    (tmp_path / "job" / "g0").mkdir(parents=True)
    real = os.rmdir

    def rmdir(name, *, dir_fd):
        if name == "g0":
            monkeypatch.setattr(os, "rmdir", real)
            (tmp_path / "job" / "g0" / "late").write_text("x")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    Tree(str(tmp_path / "job")).release()
    assert not (tmp_path / "job").exists()


def test_tree_replaced_by_a_link_removes_only_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "job").symlink_to(tmp_path / "real")
    Tree(str(tmp_path / "job")).release()
    assert (tmp_path / "real").exists() and not (tmp_path / "job").is_symlink()


def test_existing_tree_is_an_error(tmp_path):
    with pytest.raises(HostFault, match="File exists"):
        Tree(str(tmp_path)).create()


MOUNTED = """
import os, pathlib, sys
from vtorque_core.base import safefs
from vtorque_core.api import HostFault
from vtorque_core.api.job_files import Tree
from vtorque_core.resources.disk import MountResource
top = pathlib.Path(sys.argv[1])
if sys.argv[2] == "in a user namespace":  # the owner of / is nobody in there
    safefs._check = lambda *_: None
(top / "src").mkdir(); (top / "src" / "precious").write_text("x")
Tree(str(top / "job")).create(); (top / "job" / "mnt").mkdir()
mount = MountResource(str(top / "src"), str(top / "job" / "mnt"), options=("bind",))
mount.create()
try:
    mount.create()
except HostFault as error:
    assert "is already a mount point" in str(error), error
else:
    raise SystemExit("mounted twice")
assert (top / "job" / "mnt" / "precious").exists()
try:
    Tree(str(top / "job")).release()
except HostFault as error:
    assert "is a mount point" in str(error), error
else:
    raise SystemExit("entered a mount of the same file system")
assert (top / "src" / "precious").exists()
mount.release(); mount.release()
Tree(str(top / "job")).release()
assert not (top / "job").exists() and (top / "src" / "precious").exists()
print("ok")
"""


def test_tree_is_released_only_after_a_mount_inside_it(tmp_path):
    """The test runs in a mount namespace, without root also in a user namespace (unshare(1))."""
    unshare = ["unshare", "--mount", *([] if ROOT else ["--map-root-user"])]
    done = subprocess.run(
        [
            *(*unshare, sys.executable, "-c", MOUNTED, str(tmp_path)),
            "as root" if ROOT else "in a user namespace",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# -- overlay ----------------------------------------------------------------------------------


def test_overlay_names_its_image_and_does_not_change_the_image(tmp_path):
    image = tmp_path / "base,with=odd:name.raw"
    with image.open("wb") as file:
        file.truncate(20 << 30)
    overlay = Overlay(str(tmp_path / "root.qcow2"), str(image), "raw", size_mib=30 << 10)
    overlay.create()
    path = tmp_path / "root.qcow2"
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.stat().st_size < 1 << 20
    shown = subprocess.run(
        ["qemu-img", "info", "--output=json", str(path)],
        capture_output=True,
        check=True,
        timeout=180,
    )
    info = json.loads(shown.stdout)
    assert info["format"] == "qcow2"
    assert info["full-backing-filename"] == str(image)
    assert info["backing-filename-format"] == "raw"
    assert info["virtual-size"] == 30 << 30
    with pytest.raises(HostFault, match="File exists"):
        overlay.create()
    again = through_the_journal(overlay, tmp_path)
    again.release()
    again.release()
    assert not path.exists() and image.exists()


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_disk_copy_has_the_content_and_no_backing_file(tmp_path, kind):
    image, path = tmp_path / "base", tmp_path / "root.qcow2"
    content = b"what the image has" * 1000
    raw = tmp_path / "content"
    with raw.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(500 << 20)
        file.write(content)
    subprocess.run(
        ["qemu-img", "convert", "-q", "-f", "raw", "-O", kind, *map(str, (raw, image))],
        check=True,
        timeout=180,
    )
    copy = DiskCopy(str(path), str(image), kind)
    copy.create()
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.stat().st_size < 2 << 20, "holes are not preserved"
    with pytest.raises(HostFault, match="File exists"):
        copy.create()
    image.unlink()
    show = ["qemu-img", "info", "--output=json", str(path)]
    info = json.loads(subprocess.run(show, capture_output=True, check=True, timeout=180).stdout)
    assert (info["format"], info["virtual-size"]) == ("qcow2", 1 << 30)
    assert "backing-filename" not in info
    same = ["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", *map(str, (raw, path))]
    assert subprocess.run(same, check=False, timeout=180).returncode == 0
    again = through_the_journal(copy, tmp_path)
    again.release()
    again.release()
    assert not path.exists()


def test_disk_copy_of_an_image_in_another_format_is_a_host_fault(tmp_path):
    (tmp_path / "image").write_bytes(b"no qcow2" * 512)
    copy = DiskCopy(str(tmp_path / "o"), str(tmp_path / "image"), "qcow2")
    with pytest.raises(HostFault, match="not in qcow2 format"):
        copy.create()
    copy.release()
    assert not (tmp_path / "o").exists()


def test_overlay_of_a_missing_image_is_a_host_fault(tmp_path):
    overlay = Overlay(str(tmp_path / "o"), str(tmp_path / "missing"), "qcow2")
    with pytest.raises(HostFault, match="missing"):
        overlay.create()
    overlay.release()
    assert list(tmp_path.iterdir()) == []


# -- lease ------------------------------------------------------------------------------------


def test_lease_is_restored_from_its_record(tmp_path):
    lease = Lease("memory", "g0", 512)
    lease.create()
    assert through_the_journal(lease, tmp_path) == lease
    lease.release()


# -- virtiofsd and domain have their own tests -----------------------------------------------------


def share(tmp_path):
    return virtiofs_daemon.ServedDirectory(
        source="/tmp",
        socket=str(tmp_path / "s"),
        lock=str(tmp_path / "l"),
        log=str(tmp_path / "log"),
        uid=1000,
        gid=1000,
        groups=(),
        subordinate_id=100000,
        readonly=False,
        socket_owner=0,
        owner_check=False,
    )


def test_virtiofsd_record_contains_only_its_lock(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        virtiofs_daemon.ServedDirectory, "start", lambda s: calls.append(("start", s))
    )
    monkeypatch.setattr(user_daemon, "stop", lambda lock, end: calls.append(("stop", lock, end)))
    daemon = Virtiofsd(share(tmp_path))
    daemon.create()
    again = through_the_journal(daemon, tmp_path)
    assert again == Virtiofsd(lock=str(tmp_path / "l"))
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    again.release()
    assert calls[0] == ("start", share(tmp_path))
    assert calls[1][:2] == ("stop", str(tmp_path / "l"))
    assert 1000 < calls[1][2] < 1030
