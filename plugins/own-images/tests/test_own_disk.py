"""A user's own disk with its own kernel: its value, its image, its overlay and its domain."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import eventually
from personal_site import PersonalSite
from vtorque_core.api import Image, JobRequest, Refused
from vtorque_core.api.guest_context import RootCommand
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Disk, find_forbidding
from vtorque_own_images import own_disk, pull
from vtorque_own_images.node import vtorque_guest_context, vtorque_plan, vtorque_render_domain
from vtorque_own_images.own_disk import OwnOverlay, export_size
from vtorque_own_images.plugin import FIRMWARE, is_disk, vtorque_parse_args
from vtorque_own_images.submitted_disk import SubmittedDisk, examine, parse_value
from vtorque_own_images.submitted_image import image
from vtorque_testing import planned

MIB = 1 << 20
SITE: Any = PersonalSite()
VALUE = "/home/ada/d.qcow2#196616:1700000000000000000:12"
IN_OPEN = 0x20  # linux/inotify.h


def request(value: str, *, root: str = "", firmware: str = "bios", **more: Any) -> JobRequest:
    values = {"img": value, "root": root, "work": "home", "firmware": firmware, "fs_type": "disk"}
    return JobRequest(values | more, given=frozenset({"img", *more}))


def pool(_: str) -> Image:
    raise AssertionError("a disk with its own kernel needs no image of the pool")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return a qcow2 file of 4 MiB."""
    path = tmp_path / "d.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "4M"], check=True)
    return path


# -- On the submit host ----------------------------------------------------------------------------


def test_submitted_value_names_the_file_and_its_state(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "link.qcow2").symlink_to(disk)
    status = disk.stat()
    found = examine(str(tmp_path / "link.qcow2"), 4)
    assert found == SubmittedDisk(str(disk), status.st_size, status.st_ctime_ns, status.st_ino)
    assert parse_value(found.value) == found
    assert is_disk(found.value)


def test_submission_replaces_disk_by_its_value(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    submitted = pull.resolve_request(request("./d.qcow2"), SITE, False)
    assert submitted == {"img": examine(str(disk), 4).value, "work": "home"}


def _patched(at: int, content: bytes) -> Callable[[Path], None]:
    def patch(disk: Path) -> None:
        with disk.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return patch


def _replaced(replace_by: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(disk: Path) -> None:
        disk.unlink()
        replace_by(disk)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_patched(8, b"\0\0\0\0\0\0\2\0"), "has a backing file"),
        (_patched(79, b"\4"), "has an external data file"),
        (_patched(35, b"\1"), "is encrypted"),
        (_patched(24, b"\x7f"), "tables do not fit its size"),  # nearly 8 EiB
        (_patched(0, b"QFJ"), "is not in qcow2 format"),
        (_patched(24, b"\0\0\0\0\0\x50\0\0"), "has 5242880 bytes; the limit is 4M"),
        (lambda disk: os.truncate(disk, 100), "truncated qcow2"),
        (lambda disk: os.truncate(disk, 5 * MIB), "the limit is 4M"),
        (_replaced(os.mkfifo), "is not a regular file"),
        (_replaced(Path.mkdir), "Is a directory"),
        (_replaced(lambda disk: None), "No such file"),
        (_replaced(lambda disk: disk.symlink_to(disk)), "img="),
    ],
)
def test_unsuitable_file_is_refused_at_submission(
    disk: Path, change: Callable[[Path], None], why: str
) -> None:
    change(disk)
    with pytest.raises(Refused, match=why) as refused:
        examine(str(disk), 4)
    assert str(refused.value).startswith(f"img={disk}: ")


def test_raw_disk_is_accepted_unless_it_is_a_qcow2(disk: Path, tmp_path: Path) -> None:
    raw = tmp_path / "d.raw"
    raw.write_bytes(bytes(MIB))
    assert examine(str(raw), 1).size == MIB
    raw.write_bytes(disk.read_bytes())
    with pytest.raises(Refused, match=r"qcow2 file whose name ends with \.raw"):
        examine(str(raw), 4)
    raw.write_bytes(b"")
    with pytest.raises(Refused, match="has 0 bytes"):
        examine(str(raw), 4)


def test_file_of_another_user_is_refused(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Refused, match="belongs to uid"):
        examine(str(disk), 4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("./d.qcow2", True), ("/d.raw", True), (VALUE, True),
        ("docker://r/d.qcow2", False), ("oci:./d.raw", False), ("docker-archive:d.raw", False),
        ("./d.img", False), ("./d.vmdk", False), ("./d.qcow2.sif", False),
    ],
)  # fmt: skip
def test_disk_is_recognized_by_its_name(value: str, expected: bool) -> None:
    assert is_disk(value) == expected


# -- The untrusted value on the node ---------------------------------------------------------------


def test_image_of_disk_has_a_closed_set_of_labels_and_no_file_of_the_pool() -> None:
    found = image(request(VALUE), SITE, pool)
    assert found == Image(
        "own:d.qcow2", "linux", "disk", os.uname().machine, "", 256,
        labels={"init": "cloud-init", "firmware": "bios"}, source="/home/ada/d.qcow2",
    )  # fmt: skip
    assert image(request(VALUE, firmware="efi"), SITE, pool).labels["firmware"] == "efi"
    for root, script in (("script", "root"), ("true", "sudo")):
        labels = image(request(VALUE, root=root), SITE, pool).labels
        assert labels == {"init": "cloud-init", "firmware": "bios", "script": script}


def test_name_of_image_shows_root_after_any_file_name() -> None:
    """The user chooses the file name, and listings cut off long names."""
    value = VALUE.replace("d.qcow2", "n" * 200 + ".qcow2")
    name = image(request(value, root="script"), SITE, pool).name
    assert name.startswith("own:nnn") and name.endswith(",root=script") and len(name) < 100


@pytest.mark.parametrize(
    "value",
    [
        "/home/ada/d.qcow2",
        "home/ada/d.qcow2#1:2:3",
        "/home/ada/../eve/d.qcow2#1:2:3",
        "/home/a\tda/d.qcow2#1:2:3",
        "/home/ada/d.qcow2#1:2",
        "/home/ada/d.qcow2#1:2:3:4",
        "/home/ada/d.qcow2#-1:2:3",
        "/home/ada/d.qcow2#1:2:3#1:2:3",
        f"/home/ada/d.qcow2#{'9' * 21}:2:3",
        f"/{'x' * 1024}/d.qcow2#1:2:3",
    ],
)
def test_other_value_on_node_is_refused(value: str) -> None:
    with pytest.raises(Refused):
        image(request(value), SITE, pool)


@given(st.text(max_size=60), st.sampled_from(["", ".qcow2", ".raw", ".qcow2#1:2:3"]))
def test_any_value_gives_a_path_without_dots_or_is_refused(text: str, end: str) -> None:
    try:
        found = parse_value(f"/{text}{end}")
    except Refused:
        return
    assert found.path.startswith("/") and ".." not in found.path.split("/")
    assert found.path.isprintable() and parse_value(found.value) == found


def test_disk_on_site_with_administrator_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PersonalSite, "owner", 0)
    for value in ("./d.qcow2", VALUE):
        (refused,) = vtorque_parse_args(request(value), SITE)
        assert "which this site does not accept" in refused.message
    with pytest.raises(Refused, match="which this site does not accept"):
        image(request(VALUE), SITE, pool)
    with pytest.raises(Refused, match="which this site does not accept"):
        pull.resolve_request(request("./d.qcow2"), SITE, True)


@pytest.mark.parametrize("value", ["", "BIOS", "uefi", "efi,bios", "none"])
def test_other_firmware_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="write bios or efi"):
        FIRMWARE.parse(value)


@pytest.mark.parametrize(("value", "count"), [(VALUE, 0), ("docker://debian", 1), ("micro", 1)])
def test_firmware_applies_only_to_disks(value: str, count: int) -> None:
    wanted = replace(request(value, firmware="efi"), given=frozenset({"firmware"}))
    refused = list(vtorque_parse_args(wanted, SITE))
    assert [each.key for each in refused] == ["firmware"] * count


@pytest.mark.parametrize("key", ["pci", "vrdma", "unclot", "cloud_config", "of_site"])
def test_disk_gets_no_device_and_no_unknown_option(key: str) -> None:
    (refused,) = vtorque_parse_args(request(VALUE, **{key: "x"}), SITE)
    assert refused.key == key


# -- The domain ------------------------------------------------------------------------------------


def guest(tmp_path: Path = Path("/s"), **changes: Any) -> GuestPlan:
    wanted = changes.pop("request", request(VALUE))
    places = {"state_dir": tmp_path, "run_dir": tmp_path}
    of_request = {"image": image(wanted, SITE, pool), "request": wanted}
    return planned.guest_plan(**places | of_request | changes)


def domain(plan: GuestPlan) -> str:
    more = Disk("seed", "/s/seed.iso", "raw", readonly=True, serial="vtseed")
    uefi = "/usr/share/OVMF/OVMF_CODE.fd"
    return planned.domain(plan, [more, *vtorque_render_domain(plan, SITE)], uefi=uefi)


def test_domain_names_the_overlay_and_the_users_process_but_not_the_file() -> None:
    xml = domain(guest())
    planned.check_schema(xml)
    assert "/home/ada" not in xml
    assert "<kernel>" not in xml and "<loader" not in xml
    assert xml.count("<boot order=") == 1
    assert xml.index('<source file="/s/root.qcow2"/>') < xml.index('socket="/r/disk.sock"')
    assert len({part[:3] for part in xml.split('target dev="')[1:]}) == 2
    by_uefi = domain(guest(request=request(VALUE, firmware="efi")))
    planned.check_schema(by_uefi)
    assert ('stateless="yes">/usr/share/OVMF' in by_uefi) == (os.uname().machine == "x86_64")


def test_users_process_serves_the_file_read_only() -> None:
    (element,) = vtorque_render_domain(guest(), SITE)
    assert (element.path, element.format) == ("/home/ada/d.qcow2", "raw")
    assert element.user_owned and element.readonly


def test_guest_of_disk_cannot_be_saved_or_migrated() -> None:
    found = list(vtorque_render_domain(guest(), SITE))
    assert find_forbidding("save", found) == find_forbidding("migrate", found) == ["OwnDisk"]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an installation's agent, which exists."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    found = tmp_path / f"lib/vtorque-agent.{os.uname().machine}"
    found.touch()
    return found


@pytest.mark.usefixtures("agent")
def test_disk_in_memory_is_refused() -> None:
    assert list(vtorque_plan(guest(), SITE)) == []
    (refused,) = vtorque_plan(guest(request=request(VALUE, fs_type="ramdisk")), SITE)
    assert refused.key == "fs_type"


def test_missing_agent_is_refused_with_the_command_that_builds_it(agent: Path) -> None:
    agent.unlink()
    (refused,) = vtorque_plan(guest(), SITE)
    assert refused.fix and refused.fix.endswith(f" -m vtorque_linux_guest.agent.build {agent}")


def test_sudo_of_disk_is_checked_in_the_guest() -> None:
    (command,) = vtorque_guest_context(guest(request=request(VALUE, root="true")))
    assert command == RootCommand(("sudo", "-nu", "ada", "sudo", "-n", "true"))
    assert list(vtorque_guest_context(guest(request=request(VALUE, root="script")))) == []


# -- The overlay -----------------------------------------------------------------------------------


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        yield listener


@pytest.fixture
def overlay(disk: Path, tmp_path: Path) -> Iterator[OwnOverlay]:
    """Return the overlay of a disk that a real storage daemon serves."""
    lock = os.open(tmp_path / "disk-root.lock", os.O_RDWR | os.O_CREAT, 0o600)
    file = os.open(disk, os.O_RDONLY)
    opened = f"driver=file,node-name=file,filename=/proc/self/fd/{file},locking=off,read-only=on"
    with listening(tmp_path / "disk-root.sock") as listener:
        daemon = subprocess.Popen(
            [
                "qemu-storage-daemon",
                *("--blockdev", opened),
                *("--blockdev", "driver=qcow2,node-name=disk,file=file,read-only=on"),
                *("--nbd-server", f"addr.type=fd,addr.str={listener.fileno()}"),
                *("--export", "type=nbd,id=disk,node-name=disk,name=,writable=off"),
            ],
            pass_fds=(listener.fileno(), lock, file),
            preexec_fn=lambda: fcntl.lockf(lock, fcntl.LOCK_SH),  # noqa: PLW1509 - no threads
        )
    os.close(file)
    value = examine(str(disk), 4).value
    plan = guest(tmp_path, request=request(value), qemu_uid=os.geteuid())
    yield own_disk.overlay(plan, 4)
    daemon.kill()
    daemon.wait()
    os.close(lock)


def test_overlay_is_empty_and_as_large_as_the_disk(overlay: OwnOverlay) -> None:
    overlay.create()
    argv = ["qemu-img", "info", "--output=json", overlay.path]
    info = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    assert (info["format"], info["virtual-size"]) == ("qcow2", 4 * MIB)
    assert "backing-filename" not in info
    assert Path(overlay.path).stat().st_mode & 0o777 == 0o600
    overlay.release()
    overlay.release()
    assert not os.path.lexists(overlay.path)


class OpenWatch:
    """The opens of one file by any process, from inotify(7)."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._queue, os.fsencode(path), IN_OPEN) >= 0

    def count(self) -> int:
        try:
            return len(os.read(self._queue, 65536)) // struct.calcsize("iIII")
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._queue)


def test_node_does_not_open_the_users_file(overlay: OwnOverlay, disk: Path) -> None:
    """Neither does a tool that it runs."""
    eventually(lambda: export_size(f"{overlay.run_dir}/disk-root.sock") == 4 * MIB)
    watch = OpenWatch(disk)
    overlay.create()
    assert watch.count() == 0
    disk.read_bytes()
    assert watch.count() > 0
    watch.close()


def _change_unnoticed(disk: Path) -> None:
    """Change the content but not the mtime, as code in a guest that shares the file can."""
    before = disk.stat()
    while disk.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of the file system is coarse
        _patched(8, b"\0\0\0\0\0\0\2\0")(disk)
        os.utime(disk, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        _change_unnoticed,
        lambda disk: os.utime(disk, ns=(1, 1)),
        lambda disk: os.truncate(disk, disk.stat().st_size + 1),
    ],
)
def test_disk_changed_after_submission_is_refused(
    overlay: OwnOverlay, disk: Path, change: Callable[[Path], None]
) -> None:
    change(disk)
    with pytest.raises(Refused, match="changed or replaced after the submission"):
        overlay.create()
    assert not os.path.lexists(overlay.path)


def test_disk_replaced_after_submission_is_refused(
    overlay: OwnOverlay, disk: Path, tmp_path: Path
) -> None:
    """The new file has the same size and time, but another inode."""
    assert overlay.disk is not None
    other = replace(overlay, disk=replace(overlay.disk, inode=overlay.disk.inode + 1))
    with pytest.raises(Refused, match="changed or replaced"):
        other.create()


def test_larger_disk_than_the_limit_is_refused(overlay: OwnOverlay) -> None:
    with pytest.raises(Refused, match="has 4194304 bytes; the limit is 3M"):
        replace(overlay, most=3).create()
    assert not os.path.lexists(overlay.path)


GREETING = b"NBDMAGICIHAVEOPT\0\3"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "no NBD server"),
        (GREETING, "closed the connection"),
        (GREETING + struct.pack("!QH", 0, 0), "has 0 bytes"),
        (GREETING + struct.pack("!QH", 1 << 63, 0), "has 9223372036854775808 bytes"),
        (None, "timed out"),
    ],
)
def test_hostile_server_is_the_jobs_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    """The user may be able to change or to stop the process."""
    monkeypatch.setattr(own_disk, "_SECONDS", 0.5 if answer is None else 30.0)
    monkeypatch.setattr(OwnOverlay, "_require_unchanged", lambda *_: None)
    made = own_disk.overlay(guest(tmp_path, qemu_uid=os.geteuid()), 4)
    with listening(tmp_path / "disk-root.sock") as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the client may leave first
                connection.sendall(answer or b"")
                if answer is None:
                    connection.recv(1)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(100)  # what it sends, so that it gets no error

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(Refused, match=why):
            made.create()
        server.join()
    assert not os.path.lexists(made.path)


def test_disk_without_a_process_is_refused(tmp_path: Path) -> None:
    made = own_disk.overlay(guest(tmp_path), 4)
    with pytest.raises(Refused, match=r"img=/home/ada/d\.qcow2: "):
        made.create()
    (tmp_path / "disk-root.lock").touch()
    with pytest.raises(Refused, match=r"img=/home/ada/d\.qcow2: "):
        made.create()
