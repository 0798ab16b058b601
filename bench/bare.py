"""Run a job's guests under QEMU alone: the baseline of many measurements.

They have the kernel, initramfs, seed, disks, shares and ports of a real job. Seed and virtiofsd
exist before the clock starts. The measured time therefore contains only QEMU, the guest's boot and
its setup.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from node import USER, BenchNode, wait

from vtorque_core.api.guest_plan import JobUser
from vtorque_core.resources.virtiofs_daemon import ServedDirectory, Virtiofsd
from vtorque_linux_guest.job.start_request import FileArg, GuestFileData, StartMode, StartRequest
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import Session

PORTS = ("org.vtorque.status", "org.vtorque.run")
FIRST = b"#!/bin/sh\necho first\n"
SUBORDINATE_ID = 100000


@dataclass(frozen=True)
class BareGuest:
    """Parameters of a guest, read from the domain of a real one."""

    vcpus: int
    ram_mib: int
    mac: str
    kernel: str
    initrd: str
    cmdline: str
    base: str | None
    seed: Path


@dataclass(frozen=True)
class Booted:
    """A running QEMU: its start time, and the directory of its two ports."""

    started: float
    place: Path

    def session(self) -> Session:
        """Wait until the guest is ready; return a session on its run port."""
        status, run = (self.place / port for port in PORTS)
        with _connect(status) as connection:
            list(StatusReader(connection).steps(time.monotonic() + 300))
        session = Session(_connect(run))
        session.hello(time.monotonic() + 60)
        return session


def capture(node: BenchNode, scratch: Path, *args: str) -> list[BareGuest]:
    """Start a job, read the parameters of its guests, and cancel it."""
    job = node.submit("#!/bin/sh\necho first >&2\nsleep 600\n", *args)
    try:
        err = node.home / "err"
        wait(lambda: err.exists() and err.read_bytes() == b"first\n", "the job's first line")
        tops = sorted((node.paths.state / "jobs").glob(f"{job}.*/g*"))
        return [_capture(top, scratch) for top in tops]
    finally:
        node.cancel(job)


def _capture(top: Path, scratch: Path) -> BareGuest:
    seed = scratch / f"{top.name}.iso"
    shutil.copyfile(top / "seed.iso", seed)
    for name in _virsh("list", "--name").split():
        root = ElementTree.fromstring(_virsh("dumpxml", name))
        sources = [e.get("file") for e in root.findall("./devices/disk/source")]
        if str(top / "seed.iso") in sources:
            break
    else:
        raise RuntimeError(f"no domain has {top}/seed.iso")
    if [e.get("dir") for e in root.findall("./devices/filesystem/target")] != ["home"]:
        raise RuntimeError("the bare guest can share the home and nothing else")
    base = root.find("./devices/disk/backingStore/source")
    mac = root.find("./devices/interface/mac")
    return BareGuest(
        vcpus=int(root.findtext("vcpu") or 0),
        ram_mib=int(root.findtext("memory") or 0) // 1024,
        mac="" if mac is None else str(mac.get("address")),
        kernel=root.findtext("os/kernel") or "",
        initrd=root.findtext("os/initrd") or "",
        cmdline=root.findtext("os/cmdline") or "",
        base=None if base is None else base.get("file"),
        seed=seed,
    )


def _virsh(*words: str) -> str:
    argv = ["virsh", "-q", "-c", "qemu:///system", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _argv(guest: BareGuest, at: Path) -> list[str]:
    memory = f"memory-backend-memfd,id=ram,size={guest.ram_mib}M,share=on"
    argv = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max,-erms,-fsrm", "-object", memory]
    argv += ["-machine", "q35,usb=off,memory-backend=ram", "-m", str(guest.ram_mib)]
    argv += ["-smp", str(guest.vcpus), "-nodefaults", "-no-user-config", "-display", "none"]
    argv += ["-no-reboot", "-serial", f"file:{at}/console", "-device", "pvpanic"]
    argv += ["-kernel", guest.kernel, "-initrd", guest.initrd, "-append", guest.cmdline]
    argv += ["-object", "rng-random,id=rng,filename=/dev/urandom"]
    argv += ["-device", "virtio-rng-pci,rng=rng", "-device", "virtio-serial-pci"]
    for name in PORTS:
        end = f"socket,id={name},path={at}/{name},server=on,wait=off"
        argv += ["-chardev", end, "-device", f"virtserialport,chardev={name},name={name}"]
    seed = f"file={guest.seed},if=none,id=seed,format=raw,readonly=on"
    argv += ["-drive", seed, "-device", "virtio-blk-pci,drive=seed,serial=vtseed"]
    if guest.base is not None:
        root = f"file={guest.base},if=none,id=root,format=qcow2,snapshot=on"
        # The image's initramfs finds its root disk by the serial (doc/images.md).
        argv += ["-drive", root, "-device", "virtio-blk-pci,drive=root,serial=vtroot"]
    argv += ["-chardev", f"socket,id=home,path={at}/home.sock"]
    argv += ["-device", "vhost-user-fs-pci,chardev=home,tag=home,queue-size=1024"]
    argv += ["-netdev", "user,id=net"]
    return [*argv, "-device", f"virtio-net-pci,netdev=net,mac={guest.mac},romfile="]


@contextmanager
def booted(
    guests: Sequence[BareGuest], scratch: Path, *, confined: bool = True
) -> Iterator[list[Booted]]:
    """Start all guests at once and yield them; they are killed at the end.

    If ``confined`` is false, virtiofsd runs as root without vTorque's restrictions.
    """
    with ExitStack() as stack:
        places = [scratch / f"bare{index}" for index in range(len(guests))]
        for place in places:
            place.mkdir()
            stack.callback(shutil.rmtree, place)
            if confined:
                home = Virtiofsd(_share(place))
                stack.callback(home.release)
                home.create()
            else:
                stack.enter_context(_plain_home(_share(place)))
        commands = [_argv(guest, place) for guest, place in zip(guests, places, strict=True)]
        started = time.monotonic()
        for argv in commands:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield [Booted(started, place) for place in places]


def _share(place: Path) -> ServedDirectory:
    of = pwd.getpwnam(USER)
    user = JobUser(USER, of.pw_uid, of.pw_gid, (), of.pw_dir, of.pw_shell)
    return ServedDirectory.at_stem(
        place / "home", user.home, user, 0, subordinate_id=SUBORDINATE_ID
    )


@contextmanager
def _plain_home(share: ServedDirectory) -> Iterator[None]:
    """Serve the home without a user namespace, a system call filter or limits."""
    source = str(share.source)
    words = ["--shared-dir", source] if share.user_is_root else ["-o", f"source={source}"]
    argv = [share.program, f"--socket-path={share.socket}", *words]
    daemon = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(Path(share.socket).exists, "virtiofsd's socket")
        yield
    finally:
        daemon.kill()
        daemon.wait()


def _connect(path: Path) -> socket.socket:
    """Connect to a port as soon as QEMU has created it."""
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + 30
    while True:
        try:
            connection.connect(str(path))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return connection


def first_lines(guests: Sequence[BareGuest], scratch: Path) -> float:
    """Boot all guests; return the seconds until each has printed its script's first line."""
    with booted(guests, scratch) as running:
        ends: list[float] = []

        def first(one: Booted) -> None:
            ends.append(timed_run(one.session(), script(FIRST)).first)

        threads = [threading.Thread(target=first, args=(one,)) for one in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(ends) < len(guests):
            raise RuntimeError("a bare guest has failed")
        return max(ends) - running[0].started


def script(content: bytes) -> StartRequest:
    """Return a job script for a login shell, as the job shell sends it."""
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    files = (GuestFileData("job", content),)
    return StartRequest(("", FileArg("job")), environ, files=files, mode=StartMode.LOGIN)


def program(content: bytes) -> StartRequest:
    """Return a script that runs without a login shell, as Slurm's job scripts do."""
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return StartRequest((FileArg("job"),), environ, files=(GuestFileData("job", content),))


@dataclass(frozen=True)
class ProgramRun:
    """One program run: monotonic times, and the number of bytes on stdout."""

    began: float
    first: float
    ended: float
    size: int


def timed_run(session: Session, start: StartRequest) -> ProgramRun:
    """Run a program in a guest, and record when its output arrives through a pipe."""
    read, write = os.pipe()
    seen: list[float] = []
    size = 0

    def drain() -> None:
        nonlocal size
        while data := os.read(read, 1 << 20):
            if not seen:
                seen.append(time.monotonic())
            size += len(data)

    reader = threading.Thread(target=drain)
    reader.start()
    began = time.monotonic()
    try:
        status = session.run(start, None, write, 2)
    finally:
        os.close(write)
        reader.join()
        os.close(read)
    if status.code or not seen:
        raise RuntimeError(f"the program ended with {status}")
    return ProgramRun(began, seen[0], time.monotonic(), size)
