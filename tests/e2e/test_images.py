"""Images are added, updated and removed while real guests run from them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

WAIT = '#!/bin/sh\nuntil [ -e "$HOME/go" ]; do sleep 0.2; done\necho done\n'


@pytest.fixture
def image(node, scratch, config):
    """Add an image with a disk: micro's kernel, and a disk that its guests do not use."""
    if "\nkeep = 0\n" not in node.config.read_text():
        config("images", "keep = 0")
    node.root("vmgr", "images", "remove", "added", "--now", check=False)  # of a killed run
    micro = json.loads(node.root("vmgr", "images", "show", "micro").stdout)
    files = node.state / "images/micro" / micro["version"]
    for name in (micro["kernel"], micro["initrd"]):
        shutil.copy(files / name, scratch / name)
    disk(scratch / "disk.vmdk", "vmdk")
    described = [
        *("--guest-type", "linux", "--distro", "added", "--arch", micro["arch"]),
        *("--kernel", scratch / micro["kernel"], "--initrd", scratch / micro["initrd"]),
        *("--cmdline", micro["cmdline"], "--label", "init=micro", "--json"),
    ]
    done = node.root("vmgr", "images", "add", scratch / "disk.vmdk", "added", *map(str, described))
    yield json.loads(done.stdout)
    for job in json.loads(node.root("vmgr", "ps", "--json").stdout):
        node.root("vmgr", "cancel", job["id"], check=False)  # left by a failed test
    node.wait_for(lambda: not list((node.state / "journal").iterdir()), what="the end of all jobs")
    node.root("vmgr", "images", "remove", "added", "--now", check=False)
    assert not (node.state / "images/added").exists()


def disk(path, kind):
    """Make a disk of 40 MiB with some content."""
    create = ["qemu-img", "create", "-q", "-f", kind, str(path), "40M"]
    write = ["qemu-io", "-f", kind, "-c", "write -q -P 85 0 1M", str(path)]
    for argv in (create, write):
        subprocess.run(argv, check=True, timeout=180, capture_output=True)
    return path


def end(node, job_id):
    """Let the waiting job end; wait for its end."""
    (node.home / "go").touch()
    node.wait_for(lambda: node.state_of(job_id) in (None, "C"), what="the job's end")
    node.wait_for(lambda: not list((node.state / "journal").iterdir()), what="the teardown's end")


def overlay_of(node):
    """Return the path of a running guest's layer, and its base according to qemu-img."""
    key, _ = node.running()
    (path,) = [
        p for top in (node.state, node.run_dir) for p in (top / "jobs" / key).rglob("root.qcow2")
    ]
    argv = ["qemu-img", "info", "-U", "--output=json", str(path)]
    info = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=180).stdout)
    return path, Path(info["backing-filename"])


def start(node, *pairs):
    """Submit the waiting job; return its id when its guest runs."""
    (node.home / "go").unlink(missing_ok=True)
    job_id = node.submit(WAIT, "-vm", ",".join(("img=added", *pairs)))
    node.wait_for(lambda: _phase(node, "run"), what="the guest's start")
    return job_id


def _phase(node, name):
    journals = list((node.state / "journal").glob("*.jsonl"))
    return any(f'"name": "{name}"' in path.read_text() for path in journals) or any(
        f'"name":"{name}"' in path.read_text() for path in journals
    )


def test_running_jobs_keep_their_image_version(guest, image, scratch):
    node = guest
    pool = node.state / "images/added"
    job_id = start(node)
    assert overlay_of(node)[1] == pool / image["version"] / "disk.qcow2"
    (row,) = [
        row
        for row in json.loads(node.root("vmgr", "images", "list", "--json").stdout)
        if row["name"] == "added"
    ]
    assert row["used_by"] == [job_id]
    as_user = json.loads(node.as_user("vmgr", "images", "list", "--json").stdout)
    assert [row["used_by"] for row in as_user if row["name"] == "added"] == [None]
    refused = node.root("vmgr", "images", "remove", "added", check=False)
    assert refused.returncode == 2
    assert f"img=added: is in use by {job_id}".encode() in refused.stderr
    update = ["vmgr", "images", "update", "added", str(disk(scratch / "new.vhdx", "vhdx"))]
    node.root(*update, "--label", "new=1")
    for note in pool.glob("*.old"):
        note.write_text("0")
    node.root("vmgr", "images", "verify")
    node.root("vmgr", "images", "label", "added", "x=y")
    assert (pool / image["version"]).is_dir(), "the image of a running job was removed"
    end(node, job_id)
    assert (node.home / "out").read_text() == "done\n"
    assert not (pool / image["version"]).exists(), "the old version is left after the job's end"
    new = json.loads(node.root("vmgr", "images", "show", "added").stdout)
    assert new["version"] != image["version"]
    assert (new["labels"]["new"], new["distro"]) == ("1", "added")


def test_image_of_a_memory_root_disk_is_removed_when_free(guest, image):
    """The root disk is in a tmpfs of its size, above the image's files."""
    node = guest
    job_id = start(node, "fs_type=ramdisk")
    path, base = overlay_of(node)
    assert path.is_relative_to(node.run_dir)
    assert base.is_relative_to(node.state / "images/added")
    size = subprocess.run(
        ["findmnt", "-nbo", "FSTYPE,SIZE", "--target", str(path.parent)],
        check=True,
        capture_output=True,
        timeout=180,
        text=True,
    ).stdout.split()
    assert size == ["tmpfs", str(42 << 20)]
    said = node.root("vmgr", "images", "remove", "added", "--when-free").stdout.decode()
    assert said == f"removed added; its files are kept until {job_id} end\n"
    refused = node.as_user("vsub", "-vm", "img=added", node.script(WAIT), check=False)
    assert b"no such image" in refused.stderr
    end(node, job_id)
    assert (node.home / "out").read_text() == "done\n"
    assert not (node.state / "images/added").exists()


@pytest.mark.full
def test_memory_root_disk_can_be_a_copy(guest, image, config):
    node = guest
    config("images", 'ramdisk = "copy"')
    job_id = start(node, "fs_type=ramdisk")
    key, domain = node.running()
    path = node.run_dir / "jobs" / key / "g0/ram/root.qcow2"
    argv = ["qemu-img", "info", "-U", "--output=json", str(path)]
    info = json.loads(subprocess.run(argv, check=True, capture_output=True, timeout=180).stdout)
    assert "backing-filename" not in info
    assert info["virtual-size"] == 40 << 20
    base = node.state / "images/added" / image["version"] / "disk.qcow2"
    same = ["qemu-img", "compare", "-q", "-U", str(base), str(path)]
    assert subprocess.run(same, check=False, timeout=180).returncode == 0
    shown = subprocess.run(
        ["virsh", "-q", "dumpxml", domain], check=True, capture_output=True, timeout=180
    )
    assert str(base).encode() not in shown.stdout
    (record,) = (node.state / "journal").glob("*.jsonl")
    assert '"kind":"disk-copy"' in record.read_text().replace(" ", "")
    end(node, job_id)
    assert (node.home / "out").read_text() == "done\n"
    assert not path.exists()


@pytest.mark.full
def test_node_cache_of_an_image_is_used(guest, image, config, scratch):
    node = guest
    cache = scratch / "cache"
    config("images", f'cache = "{cache}"')
    pushed = cache / ".partial/added"  # as left by rsync from the pool's host
    shutil.copytree(node.state / "images/added" / image["version"], pushed / image["version"])
    shutil.copy2(node.state / "images/added/image.json", pushed)
    received = node.root("vmgr", "images", "sync", "--received", "added")
    assert received.stdout == b"copied: added\n"
    job_id = start(node)
    assert overlay_of(node)[1] == cache / "added" / image["version"] / "disk.qcow2"
    end(node, job_id)
    (cache / "added" / image["version"] / "disk.qcow2").write_bytes(b"damaged")
    job_id = start(node)
    assert overlay_of(node)[1].is_relative_to(node.state / "images")
    end(node, job_id)
    assert (node.home / "out").read_text() == "done\n"


def test_only_a_signed_image_boots(guest, image, config, scratch):
    node = guest
    key, signers = scratch / "key", scratch / "signers"
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(keygen, check=True, timeout=180)
    signers.write_text(f"e2e@site {key.with_suffix('.pub').read_text()}")
    signers.chmod(0o644)
    config("images", f'signers = "{signers}"')
    refused = node.job("#!/bin/sh\ntrue\n", "-vm", "img=added")
    assert refused.code != 0
    assert b"img=added: the image is not signed" in refused.err + refused.out
    said = node.root("vmgr", "images", "sign", "added", "--key", key).stdout
    assert said == b"added is signed by e2e@site\n"
    result = node.job("#!/bin/sh\necho booted; exit 7\n", "-vm", "img=added")
    assert (result.code, result.out) == (7, b"booted\n"), result.err
