"""Guests that boot from a disk of ``vmgr images add``, with the kernel found on it."""

import json
import shutil
import struct
import subprocess

import pytest

pytestmark = pytest.mark.e2e

NAME = "added-boot"
RECIPE = """
family = "debian"
suite = "bookworm"
packages = ["linux-image-cloud-amd64", "initramfs-tools"]
kernel = "own"
"""
START, SIZE = 1 << 20, 96 << 20  # bytes: start of the only partition


def tool(*argv):
    """Run a tool that must not fail."""
    subprocess.run([str(word) for word in argv], check=True, capture_output=True, timeout=120)


@pytest.fixture
def add(node, clean):
    """Return a function that adds a disk; the image is removed after the test."""

    def do(disk, *options):
        node.root("vmgr", "images", "add", str(disk), NAME, *map(str, options), timeout=300)
        return json.loads(node.root("vmgr", "images", "show", NAME).stdout)

    yield do
    node.root("vmgr", "images", "remove", NAME, "--now", check=False)
    assert not (node.state / "images" / NAME).exists()


@pytest.mark.full
def test_guest_boots_from_an_added_disk(clean, add, scratch):
    """A disk with a partition and micro's kernel in it, in the form of a VMware virtual machine."""
    node = clean
    micro = json.loads(node.root("vmgr", "images", "show", "micro").stdout)
    files = node.state / "images/micro" / micro["version"]
    root = scratch / "root"
    (root / "boot").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text('ID=made-here\nID_LIKE="debian"\n')
    shutil.copy(files / micro["kernel"], root / "boot/vmlinux-6.1.0-test")
    shutil.copy(files / micro["initrd"], root / "boot/initrd.img-6.1.0-test")
    raw = scratch / "disk.raw"
    with raw.open("wb") as file:
        file.truncate(START + SIZE)
        file.seek(446)  # the boot record's first entry: a Linux partition
        file.write(struct.pack("<B3sB3sII", 0, b"", 0x83, b"", START // 512, SIZE // 512))
        file.seek(510)
        file.write(b"\x55\xaa")
    offset = ("-E", f"offset={START}")
    tool("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, *offset, raw, SIZE >> 10)
    tool("qemu-img", "convert", "-f", "raw", "-O", "vmdk", raw, scratch / "disk.vmdk")

    cmdline = ("--cmdline", micro["cmdline"])
    image = add(scratch / "disk.vmdk", *cmdline, "--guest-type", "linux", "--label", "init=micro")
    assert (image["distro"], image["arch"]) == ("made-here", micro["arch"])
    assert image["files"][image["kernel"]]["sha256"] == micro["files"][micro["kernel"]]["sha256"]
    assert image["disk_format"] == "qcow2"

    script = (
        "#!/bin/sh\ncat /sys/block/vda/serial; echo\n"
        "cat /sys/block/vda/vda1/start /sys/block/vda/vda1/size\nexit 7\n"
    )
    result = node.job(script, "-vm", f"img={NAME}")
    assert result.code == 7, result.err
    words = result.out.decode().split()
    assert words == ["vtroot", str(START // 512), str(SIZE // 512)]


@pytest.mark.full
def test_debian_guest_boots_from_an_added_disk(clean, add, config, scratch):
    """The disk's own kernel and initramfs find the root file system by its UUID."""
    node = clean
    # The image has no agent: it is on the seed, as for any added disk.
    agent = node.prefix / "lib/vtorque-agent.{arch}"
    config("plugin.linux-guest", f'agent = "{agent}"')
    (scratch / "recipe.toml").write_text(RECIPE)
    recipe = f"recipe={scratch / 'recipe.toml'}"
    node.root("vmgr", "images", "build", "added-source", "linux", "-o", recipe, timeout=900)
    try:
        source = json.loads(node.root("vmgr", "images", "show", "added-source").stdout)
        disk = node.state / "images/added-source" / source["version"] / source["disk"]
        kind = source["disk_format"]
        tool("qemu-img", "convert", "-f", kind, "-O", "vhdx", disk, scratch / "disk.vhdx")
    finally:
        node.root("vmgr", "images", "remove", "added-source", "--now")
    image = add(scratch / "disk.vhdx")
    assert (image["guest_type"], image["distro"], image["arch"]) == ("linux", "debian", "x86_64")
    assert image["labels"] == {"init": "cloud-init", "family": "debian"}
    assert image["cmdline"].startswith("root=UUID=")

    script = "#!/bin/sh\n. /etc/os-release; echo $ID $VERSION_ID; findmnt -no UUID /; exit 7\n"
    result = node.job(script, "-vm", f"img={NAME},ram=768M,vcpus=2")
    assert result.code == 7, result.err
    name, version, uuid = result.out.decode().split()
    assert (name, version) == ("debian", "12")
    assert image["cmdline"].split()[0] == f"root=UUID={uuid}"
