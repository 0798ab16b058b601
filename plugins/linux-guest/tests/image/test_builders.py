"""Output of the image builders: kernels, modules, initramfs archives, options."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_linux_guest.image import micro_builder
from vtorque_linux_guest.image.debian_builder import DebianBuilder, parse_options
from vtorque_linux_guest.image.initramfs import InitramfsTree, add_modules
from vtorque_linux_guest.image.kernel import (
    KernelPackage,
    debs_directory,
    extract_vmlinux,
    fetch,
    kernel_package,
    need_tools,
    program,
)
from vtorque_linux_guest.image.recipe import LinuxRecipe

ELF = b"\x7fELF" + bytes(range(256)) * 64


def bzimage(payload: bytes, sectors: int = 3) -> bytes:
    image = bytearray((sectors or 4) * 512 + 512)
    image[0x1F1] = sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 100, len(payload))
    return bytes(image) + bytes(100) + payload + b"what follows"


def with_size(packed: bytes) -> bytes:
    return packed + struct.pack("<I", len(ELF))


def lz4(data: bytes) -> bytes:
    return subprocess.run(["lz4", "-l", "-c"], input=data, stdout=-1, check=True).stdout


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, stdout=-1, check=True).stdout


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(lambda: gzip.compress(ELF), id="gzip"),
        pytest.param(lambda: lzma.compress(ELF), id="xz"),
        pytest.param(lambda: with_size(lz4(ELF)), id="lz4"),
        pytest.param(lambda: with_size(zstd(ELF)), id="zstd"),
    ],
)
@pytest.mark.parametrize("sectors", [0, 3, 39])
def test_kernel_is_extracted(payload, sectors: int) -> None:
    assert extract_vmlinux(bzimage(payload(), sectors)) == ELF


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, lz4, zstd])
def test_oversized_kernel_is_refused_while_unpacking(pack, monkeypatch) -> None:
    """The kernel may come from any package of a recipe."""
    monkeypatch.setattr("vtorque_linux_guest.image.kernel.MAX_KERNEL", 1 << 20)
    with pytest.raises(HostFault, match="unpacks to more than 1 MiB"):
        extract_vmlinux(bzimage(with_size(pack(ELF + bytes(2 << 20)))))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "no HdrS"),
        (bytes(4096), "no HdrS"),
        (bzimage(b"unknown"), "the kernel's compression is unknown"),
        (bzimage(gzip.compress(b"no kernel")), "not an ELF"),
        (bzimage(lzma.compress(ELF)[:40] + b"\xff" * 100), "damaged"),
        (bzimage(gzip.compress(ELF)[:10] + b"\xff" * 100), "damaged"),
        (bzimage(b"\x02\x21\x4c\x18garbage"), "lz4"),
    ],
)
def test_invalid_kernel_is_refused(image: bytes, message: str) -> None:
    with pytest.raises(HostFault, match=message):
        extract_vmlinux(image)


def unpacked(archive: bytes, into: Path) -> Path:
    into.mkdir()
    command = ["busybox", "cpio", "-idm"]
    subprocess.run(command, input=archive, cwd=into, check=True, capture_output=True)
    return into


def test_archive_is_unpacked_by_cpio(tmp_path: Path) -> None:
    tree = InitramfsTree()
    tree.file("etc/deep/er/file", b"content\n", 0o640)
    tree.file("empty", b"")
    tree.directory("tmp", 0o1777)
    tree.link("bin/sh", "/bin/busybox")
    found = unpacked(tree.archive(), tmp_path / "out")
    assert (found / "etc/deep/er/file").read_bytes() == b"content\n"
    assert stat.S_IMODE((found / "etc/deep/er/file").stat().st_mode) == 0o640
    assert (found / "empty").read_bytes() == b""
    assert stat.S_IMODE((found / "tmp").stat().st_mode) == 0o1777
    assert str((found / "bin/sh").readlink()) == "/bin/busybox"
    assert (found / "etc/deep/er/file").stat().st_mtime == 0


def test_archive_does_not_depend_on_order() -> None:
    first, second = InitramfsTree(), InitramfsTree()
    for tree, names in ((first, ("a", "b/c")), (second, ("b/c", "a"))):
        for name in names:
            tree.file(name, name.encode())
    assert first.compressed() == second.compressed()


def module(*needs: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


@pytest.fixture
def kernel(tmp_path: Path) -> KernelPackage:
    base = tmp_path / "lib/modules/6.1.0-cloud"
    for path, content in {
        "kernel/drivers/virtio/virtio.ko": module("virtio_ring"),
        "kernel/drivers/virtio/virtio_ring.ko": module(),
        "kernel/drivers/block/virtio_blk.ko": module("virtio", "virtio_ring"),
        "kernel/drivers/char/hw_random/virtio-rng.ko": module("virtio"),
        "kernel/fs/packed.ko.xz": lzma.compress(module("virtio_blk")),
        "kernel/fs/broken.ko": b"\x7fELF",
    }.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(content)
    (base / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    return KernelPackage(tmp_path, "6.1.0-cloud", "linux-image-6.1.0-cloud", "6.1.0-1")


def test_modules_are_added_with_dependencies_in_load_order(kernel: KernelPackage) -> None:
    tree = InitramfsTree()
    loaded = add_modules(tree, kernel, ["virtio_blk", "ext4", "virtio-rng", "packed"])
    assert loaded == ["virtio_ring", "virtio", "virtio_blk", "virtio_rng", "packed"]
    base = "lib/modules/6.1.0-cloud"
    assert tree.entries[f"{base}/kernel/fs/packed.ko"][1] == module("virtio_blk")
    dep = tree.entries[f"{base}/modules.dep"][1].decode()
    lines = dict(line.split(":") for line in dep.splitlines())
    ring, virtio = (f"kernel/drivers/virtio/{n}.ko" for n in ("virtio_ring", "virtio"))
    assert lines["kernel/drivers/block/virtio_blk.ko"] == f" {virtio} {ring}"
    assert lines[ring] == ""
    blk = "kernel/drivers/block/virtio_blk.ko"
    assert lines["kernel/fs/packed.ko"] == f" {blk} {virtio} {ring}"
    assert tree.entries[f"{base}/modules.builtin"][1] == b"kernel/fs/ext4/ext4.ko\n"


@pytest.mark.parametrize("place", ["bin", "usr/bin"])
def test_program_is_found_in_bin_and_usr_bin(tmp_path: Path, place: str) -> None:
    with pytest.raises(HostFault, match="the packages do not contain the program busybox"):
        program(tmp_path, "busybox")
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "busybox").touch()
    assert program(tmp_path, "busybox") == tmp_path / place / "busybox"


def test_unknown_and_broken_modules(kernel: KernelPackage) -> None:
    with pytest.raises(Refused, match="has no module nfs"):
        add_modules(InitramfsTree(), kernel, ["nfs"])
    with pytest.raises(HostFault, match="no depends="):
        add_modules(InitramfsTree(), kernel, ["broken"])


def test_debian_options_become_a_recipe() -> None:
    assert parse_options({}) == LinuxRecipe("debian", "bookworm")
    given = {"suite": "trixie", "packages": "nfs-common,g++", "size": "20G"}
    expected = LinuxRecipe("debian", "trixie", ("nfs-common", "g++"), size=20480)
    assert parse_options(given) == expected
    assert parse_options({"kernel": "generic"}).kernel == "generic"


@pytest.mark.parametrize(
    "arguments",
    [
        {"nonsense": "1"},
        {"suite": "../x"},
        {"suite": "--version"},
        {"suite": ""},
        {"packages": "a b"},
        {"packages": "-x"},
        {"packages": "ok,--setup-hook=x"},
        {"size": "1M"},
        {"size": "2T"},
        {"size": "big"},
        {"kernel": "linux"},
    ],
)
def test_bad_debian_options_are_refused(arguments: dict[str, str]) -> None:
    with pytest.raises(Refused, match=next(iter(arguments))):
        parse_options(arguments)


def test_bad_micro_options_are_refused(tmp_path: Path) -> None:
    for arguments in ({"nonsense": "1"}, {"debs": "relative"}, {"debs": str(tmp_path / "none")}):
        with pytest.raises(Refused, match=next(iter(arguments))):
            micro_builder.MicroBuilder().build(arguments, tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_given_packages_must_contain_exactly_one_file_each(tmp_path: Path) -> None:
    assert debs_directory({"debs": str(tmp_path)}) == tmp_path
    with pytest.raises(Refused, match="has 0 files bash-static_"):
        fetch(["bash-static"], tmp_path, tmp_path)
    (tmp_path / "bash-static_1_amd64.deb").touch()
    assert fetch(["bash-static"], tmp_path, tmp_path) == [tmp_path / "bash-static_1_amd64.deb"]
    with pytest.raises(Refused, match="exactly one"):
        kernel_package("amd64", tmp_path)
    (tmp_path / "linux-image-6.1.0-1-cloud-amd64_6.1_amd64.deb").touch()
    (tmp_path / "linux-image-cloud-amd64_6.1_amd64.deb").touch()
    assert kernel_package("amd64", tmp_path) == "linux-image-6.1.0-1-cloud-amd64"
    (tmp_path / "linux-image-6.1.0-1-amd64_6.1_amd64.deb").touch()
    assert kernel_package("amd64", tmp_path) == "linux-image-6.1.0-1-cloud-amd64"
    assert kernel_package("amd64", tmp_path, "generic") == "linux-image-6.1.0-1-amd64"


def test_missing_tool_names_the_package() -> None:
    with pytest.raises(HostFault, match="no-such-tool: not installed; run: apt-get install"):
        need_tools("no-such-tool")


def test_distribution_image_without_root_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refused, match="only root can build an image of a distribution, because"):
        DebianBuilder().build({}, tmp_path, lambda _: None)
    assert not list(tmp_path.iterdir())
