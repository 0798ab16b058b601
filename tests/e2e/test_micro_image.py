"""The two Linux images, built from Debian's packages and booted with QEMU only: no libvirt.

Needs root, Debian's apt sources and the packages that the builders name.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from vtorque_core.api.image_builder import Builder
from vtorque_core.api.values import Image
from vtorque_core.images import store
from vtorque_images import change
from vtorque_linux_guest.boot.seed import iso
from vtorque_linux_guest.image.debian_builder import DebianBuilder
from vtorque_linux_guest.image.micro_builder import MicroBuilder
from vtorque_linux_guest.job.status_port import StatusReader

pytestmark = [pytest.mark.e2e, pytest.mark.full]

CONF = (
    "user=tester\nuid=1234\ngid=1234\nhome=/home/tester\nshell=/bin/sh\nspool=/run/spool\n"
    "status=port:org.vtorque.status\nrun=port:org.vtorque.run\nsetup=/run/vtorque/setup.sh\n"
)


def build(builder: Builder, arguments: Mapping[str, str], pool: Path, name: str) -> Image:
    with store.staging(pool) as staging:
        built = builder.build(arguments, staging, lambda text: None)
        return change.commit(pool, name, staging, built, name)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.fail("the e2e tests need root")
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def micro(pool: Path) -> Image:
    return build(MicroBuilder(), {}, pool, "micro")


@dataclass
class MicroGuest:
    process: subprocess.Popen[bytes]
    status: socket.socket
    console: Path
    started: float

    def wait_ready(self, seconds: float) -> float:
        list(StatusReader(self.status).steps(time.monotonic() + seconds))
        return time.monotonic() - self.started

    def wait_console(self, text: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while text not in (said := self.console.read_text(errors="replace")):
            assert time.monotonic() < deadline, f"no {text!r} in: {said[-3000:]}"
            time.sleep(0.05)
        return said


@contextmanager
def boot(
    image: Image, directory: Path, seed: Mapping[str, bytes] | None, ram: int, port: str = "status"
) -> Iterator[MicroGuest]:
    status, console = directory / "status", directory / "console"
    command = ["qemu-system-x86_64", "-accel", "tcg", "-machine", "q35,usb=off", "-cpu", "max"]
    command += ["-m", str(ram), "-nodefaults", "-no-user-config", "-display", "none"]
    command += ["-no-reboot", "-serial", f"file:{console}"]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initrd)]
    command += ["-append", image.cmdline, "-device", "virtio-rng-pci"]
    command += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=s,path={status}"]
    command += ["-device", f"virtserialport,chardev=s,name=org.vtorque.{port}"]
    command += ["-chardev", "null,id=r", "-device", "virtserialport,chardev=r,name=org.vtorque.run"]
    if seed is not None:
        (directory / "seed.iso").write_bytes(iso(seed))
        # First on the bus: the guest must not assume an order of its disks.
        drive = f"file={directory}/seed.iso,if=none,id=seed,format=raw,readonly=on"
        command += ["-drive", drive, "-device", "virtio-blk-pci,drive=seed,serial=vtseed"]
    if image.disk is not None:
        drive = f"file={image.disk},if=none,id=root,format=qcow2,snapshot=on"
        command += ["-drive", drive, "-device", "virtio-blk-pci,drive=root,serial=vtroot"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(status))
    listener.listen(1)
    listener.settimeout(180)
    started = time.monotonic()
    with listener, subprocess.Popen(command) as process:
        try:
            connection, _ = listener.accept()
            with connection:
                yield MicroGuest(process, connection, console, started)
        finally:
            process.kill()


def seed_of(script: str) -> dict[str, bytes]:
    setup = f"#!/bin/sh\nset -eu\nmkdir -p /run/spool /home/tester\n{script}\n"
    return {"vtorque/agent.conf": CONF.encode(), "vtorque/setup.sh": setup.encode()}


def test_micro_build_is_reproducible(micro: Image, pool: Path) -> None:
    started = time.monotonic()
    again = build(MicroBuilder(), {}, pool, "again")
    took = time.monotonic() - started
    sys.stdout.write(f"micro built in {took:.1f} s\n")
    for first, second in ((micro.kernel, again.kernel), (micro.initrd, again.initrd)):
        assert first is not None
        assert second is not None
        assert first != second
        hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)}
        assert len(hashes) == 1
    assert micro.sha256 == again.sha256
    assert again.initrd is not None
    assert again.initrd.stat().st_size < 4 << 20


@pytest.mark.releases
def test_micro_initramfs_contains_nothing_of_this_machine(micro: Image) -> None:
    assert micro.initrd is not None
    content = gzip.decompress(micro.initrd.read_bytes())
    assert socket.gethostname().encode() + b"\n" not in content
    assert str(Path(__file__).parents[2]).encode() not in content


@pytest.mark.releases
def test_micro_is_complete(micro: Image, tmp_path: Path) -> None:
    script = """
    exec >/dev/console 2>&1
    /bin/bash -c 'echo "bash: ${BASH_VERSION%%.*}"'
    echo "mounts: $(cut -d' ' -f2 /proc/mounts | sort | tr '\\n' ' ')"
    echo "modes: $(stat -c '%a' /run/vtorque /run/vtorque/agent.conf /tmp /dev/null | tr '\\n' ' ')"
    echo "stdin: $(readlink /dev/stdin)"
    echo "lo: $(cat /sys/class/net/lo/flags)"
    modprobe overlay && echo "overlay: $(grep -c overlay /proc/filesystems)"
    echo "virtiofs: $(grep -c virtiofs /proc/filesystems)"
    echo "rng: $(cat /sys/class/misc/hw_random/rng_current)"
    (sh -c 'exit 0' &)
    (sh -c 'sleep 1; exit 0' &)
    """
    late = "(sleep 3; ls -l /dev/virtio-ports; echo zombies: $(ps -o stat | grep -c ^Z)) &"
    with boot(micro, tmp_path, seed_of(script + late), ram=micro.min_ram_mib) as guest:
        took = guest.wait_ready(180)
        said = guest.wait_console("zombies:", 180)
        assert guest.process.poll() is None
    sys.stdout.write(f"micro READY in {took:.2f} s\n")
    assert re.search(r"bash: [5-9]", said)
    assert "mounts: / /dev /dev/pts /dev/shm /proc /run /sys " in said
    assert "modes: 700 400 1777 666 " in said or "modes: 700 600 1777 666 " in said
    assert "stdin: /proc/self/fd/0" in said
    assert "lo: 0x9" in said, "the loopback interface is not up"
    assert "overlay: 1" in said
    assert "virtiofs: 1" in said
    assert "rng: virtio_rng.0" in said
    assert re.search(r"org\.vtorque\.status -> \.\./vport", said)
    assert re.search(r"org\.vtorque\.run -> \.\./vport", said)
    assert "zombies: 0" in said


@pytest.mark.releases
def test_micro_powers_off_when_its_agent_ends(micro: Image, tmp_path: Path) -> None:
    with boot(micro, tmp_path, seed_of("kill -9 $PPID"), ram=128) as guest:
        assert guest.process.wait(180) == 0
        assert "vtorque: the agent ended with status 137" in guest.console.read_text()


@pytest.mark.releases
def test_micro_waits_for_a_missing_seed(micro: Image, tmp_path: Path) -> None:
    with boot(micro, tmp_path, None, ram=128) as guest:
        guest.status.settimeout(180)
        with guest.status.makefile("rb") as said:
            assert said.readline() == b"STEP seed\n"
        assert guest.process.poll() is None


@pytest.mark.releases
def test_micro_that_cannot_get_a_seed_reports_and_powers_off(micro: Image, tmp_path: Path) -> None:
    with boot(micro, tmp_path, None, ram=128, port="none") as guest:
        assert guest.process.wait(180) == 0
        assert "vtorque: no disk with the serial vtseed" in guest.console.read_text()


def test_debian_is_ready_and_locked(pool: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    image = build(DebianBuilder(), {"packages": "tree"}, pool, "debian")
    sys.stdout.write(f"debian built in {time.monotonic() - started:.0f} s\n")
    script = """
    exec >/dev/console 2>&1
    echo "kernel: $(uname -r)"
    echo "root: $(findmnt -no SOURCE,FSTYPE /)"
    echo "name: $(hostname)"
    echo "keys: $(ls /etc/ssh | grep -c '^ssh_host_.*key$')"
    echo "locked: $(grep -c '^root:[*!]' /etc/shadow)"
    echo "sshd: $(sshd -T 2>&1 | grep -c -E 'permitrootlogin no|passwordauthentication no')"
    echo "id: $(wc -c </etc/machine-id)"
    echo "tree: $(command -v tree)"
    modprobe virtiofs && echo "virtiofs: $(grep -c virtiofs /proc/filesystems)"
    echo "failed: $(systemctl list-units --failed --plain --no-legend | wc -l)"
    echo "done"
    """
    user_data = {"hostname": "vnode7", "users": [{"name": "root", "lock_passwd": True}]}
    # As written by the guest type: everything is done in the first stage, before READY.
    meta_data = {"instance-id": "t1", "local-hostname": "vnode7", "dsmode": "local"}
    seed = {
        **seed_of(script),
        "user-data": b"#cloud-config\n" + json.dumps(user_data).encode(),
        "meta-data": json.dumps(meta_data).encode(),
        "network-config": json.dumps({"version": 1, "config": "disabled"}).encode(),
    }
    with boot(image, tmp_path, seed, ram=image.min_ram_mib) as guest:
        sys.stdout.write(f"debian READY in {guest.wait_ready(600):.1f} s\n")
        said = guest.wait_console("done", 180)
    release = image.labels["kernel"].split()[0].removeprefix("linux-image-")
    for line in (
        f"kernel: {release}",
        "root: /dev/vdb ext4",
        "name: vnode7",
        "locked: 1",
        "sshd: 2",
        "id: 33",
        "tree: /usr/bin/tree",
        "virtiofs: 1",
        "failed: 0",
    ):
        assert line in said.replace("\r", ""), said[-3000:]
    assert re.search(r"keys: [1-9]", said), "cloud-init has not generated SSH host keys"
