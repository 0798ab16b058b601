"""Run a guest with QEMU but without libvirt, with the virtiofsd shares of a job. Needs root."""

import contextlib
import gzip
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.resources import virtiofs_daemon

USER, OTHER, PROJECT, SUBORDINATE = 61001, 61002, 61010, 100000
QEMU_UID = 64055  # libvirt-qemu on Debian
MODULES = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "fuse",
    "virtiofs",
]


def cpio(entries: dict[str, tuple[int, bytes]]) -> bytes:
    """Return a newc archive (cpio(5)); ``entries``: name to mode (with file type) and content."""
    out = bytearray()
    for number, (name, (mode, data)) in enumerate([*entries.items(), ("TRAILER!!!", (0, b""))]):
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + raw
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def unpack_kernel() -> Path:
    """Return the unpacked Debian cloud kernel; it is fetched once per machine."""
    cache = Path(tempfile.gettempdir()) / "vtorque-e2e-cloud-kernel"
    cache.mkdir(mode=0o755, exist_ok=True)
    assert cache.lstat().st_uid == 0
    if not (cache / "done").exists():
        asked = ["apt-cache", "depends", "linux-image-cloud-amd64"]
        package = subprocess.check_output(asked, text=True, timeout=180)
        package = package.split("Depends:")[1].split()[0]
        subprocess.run(["apt-get", "-q", "download", package], cwd=cache, check=True, timeout=300)
        (deb,) = cache.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", deb.name, "."], cwd=cache, check=True, timeout=300)
        deb.unlink()
        (cache / "done").touch()
    return cache


def initramfs(kernel: Path, init: str) -> bytes:
    """Return an initramfs whose ``/init`` is this script, with its ``@MODULES@`` filled in."""
    (found,) = kernel.glob("**/lib/modules/*/modules.builtin")
    built_in = found.read_text()  # Debian 13 builds in all MODULES
    modules = [module for module in MODULES if f"/{module}.ko" not in built_in]
    init = init.replace("@MODULES@", " ".join(modules))
    busybox = Path(shutil.which("busybox") or "busybox-static is not installed")
    directory, program, plain = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755, stat.S_IFREG | 0o644
    folders = ("bin", "dev", "etc", "home", "modules", "opt", "proc", "tmp")
    entries = dict.fromkeys(folders, (directory, b""))
    entries["bin/busybox"] = (program, busybox.read_bytes())
    passwd = f"root:x:0:0::/:/bin/sh\nuser:x:{USER}:{USER}::/home:/bin/sh\n"
    entries["etc/passwd"] = (plain, passwd.encode())
    group = f"root:x:0:\nuser:x:{USER}:\nproject:x:{PROJECT}:user\n"
    entries["etc/group"] = (plain, group.encode())
    for module in modules:
        (path,) = found.parent.glob(f"kernel/**/{module}.ko")
        entries[f"modules/{module}.ko"] = (plain, path.read_bytes())
    entries["init"] = (program, init.encode())
    return gzip.compress(cpio(entries), 1)


def share(place: Path, name: str) -> virtiofs_daemon.ServedDirectory:
    """Return a share of ``place``: the user's ``home``, or ``opt``, which is read-only."""
    run = place / "run"
    return virtiofs_daemon.ServedDirectory(
        source=str(place / name), socket=str(run / f"{name}.sock"), lock=str(run / f"{name}.lock"),
        log=str(run / f"{name}.log"), uid=USER, gid=USER, groups=(USER, PROJECT),
        subordinate_id=SUBORDINATE, readonly=name == "opt", socket_owner=QEMU_UID,
        owner_check=name == "home",
    )  # fmt: skip


@contextlib.contextmanager
def guest(kernel: Path, place: Path, init: str) -> Iterator[subprocess.Popen[str]]:
    """Boot a guest with both shares as QEMU's own user; the caller reads its console."""
    (vmlinuz,) = kernel.glob("boot/vmlinuz-*")
    initrd = place / "initrd"
    initrd.write_bytes(initramfs(kernel, init))
    options = "-nodefaults -no-user-config -no-reboot -display none -serial stdio -cpu max -m 256"
    argv = ["qemu-system-x86_64", *options.split()]
    argv += ["-machine", "q35,accel=tcg,memory-backend=ram"]
    argv += ["-object", "memory-backend-memfd,id=ram,size=256M,share=on"]
    argv += ["-kernel", str(vmlinuz), "-initrd", str(initrd)]
    argv += ["-append", "console=ttyS0 quiet panic=-1 cryptomgr.notests=1"]
    for tag in ("home", "opt"):
        argv += ["-chardev", f"socket,id={tag},path={place}/run/{tag}.sock"]
        argv += ["-device", f"vhost-user-fs-pci,chardev={tag},tag={tag}"]
    qemu = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", user=QEMU_UID, group=QEMU_UID, extra_groups=[], cwd="/",
    )  # fmt: skip
    try:
        yield qemu
    finally:
        qemu.kill()
        qemu.wait(180)
        assert qemu.stdout is not None
        qemu.stdout.close()
