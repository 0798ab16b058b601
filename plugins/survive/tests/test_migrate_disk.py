"""Transfer of a guest's disk: real files, a pipe, and a double for QEMU."""

import io
import itertools
import os
import struct
import sys
import threading

import pytest

from vtorque_core.api import HostFault
from vtorque_survive import migrate_disk

MIB = 1 << 20


def part(at, data=b""):
    return struct.pack(">QQ", at, len(data)) + data


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "root.qcow2"


@pytest.fixture
def receive(disk, monkeypatch):
    """Return a function that receives a disk over an existing one; ``does``: the guest's state."""
    disk.touch()
    resumed = []
    monkeypatch.setattr(migrate_disk.guest_migration, "disks", lambda *_: {"7": disk})
    monkeypatch.setattr(
        migrate_disk.libvirt, "resume_domain", lambda *_: resumed.append(disk.read_bytes())
    )

    def received(*parts, uuid="7", does="", awaits=3):
        asked = itertools.chain([True] * awaits, itertools.repeat(False))
        monkeypatch.setattr(migrate_disk.domains, "domain_state", lambda *_: does)
        first = io.BytesIO()
        try:
            said = migrate_disk.receive(
                None, "", "42.0", uuid, lambda: next(asked), io.BytesIO(b"".join(parts)), first
            )
        except HostFault as error:
            said = str(error)
        return said, first.getvalue(), resumed

    return received


TWICE = (part(0, b"one"), part(MIB, b"two"), part(2 * MIB), part(MIB, b"2"), part(MIB + 2))


def test_guest_is_resumed_after_its_disk_is_complete(receive):
    assert receive(*TWICE, b"!") == ("here", b"\n\n", [b"one".ljust(MIB, b"\0") + b"2w"])


@pytest.mark.parametrize("count", range(6))
def test_disconnected_sender_resumes_nothing(receive, count):
    whole = b"".join(TWICE)
    said, _, resumed = receive(whole[: len(whole) * count // 5])
    assert (said, resumed) == ("the sender disconnected before the disk was complete", [])


@pytest.mark.parametrize(("uuid", "does"), [("8", ""), ("7", "still"), ("7", "runs")])
def test_disk_of_a_present_or_unexpected_guest_is_not_written(receive, disk, uuid, does):
    disk.write_bytes(b"has")
    assert receive(*TWICE, b"!", uuid=uuid, does=does) == (
        "no guest on this node waits for this disk",
        b"",
        [],
    )
    assert disk.read_bytes() == b"has"


def test_guest_that_is_no_longer_awaited_is_not_resumed(receive):
    """The owner may have paused the guest in the meantime."""
    assert receive(*TWICE, b"!", awaits=1) == (
        "the migration was canceled: the guest is not resumed",
        b"\n\n",
        [],
    )
    assert receive(*TWICE, b"!", awaits=0)[1:] == (b"", [])


@pytest.mark.parametrize("wrong", [struct.pack(">QQ", 0, MIB + 1), struct.pack(">QQ", 1 << 45, 0)])
def test_invalid_part_of_a_disk_is_refused(receive, wrong):
    assert receive(wrong)[0] == "received invalid data instead of a disk"


def test_disk_that_is_a_link_is_refused(receive, disk, tmp_path):
    disk.rename(tmp_path / "other")
    disk.symlink_to(tmp_path / "other")
    assert "Too many levels of symbolic links" in receive(part(0))[0]


def changed(file, had):
    return b"".join(migrate_disk._missing_parts(file.fileno(), had))


def test_only_changed_parts_and_new_holes_are_sent_again(disk):
    had = {}
    with disk.open("w+b") as file:
        file.write(b"a" * MIB)
        file.seek(3 * MIB)
        file.write(b"b" * MIB + b"c")
        file.flush()
        every = part(0, b"a" * MIB) + part(3 * MIB, b"b" * MIB) + part(4 * MIB, b"c")
        assert changed(file, had) == every + part(4 * MIB + 1)
        assert changed(file, had) == part(4 * MIB, b"c") + part(4 * MIB + 1)  # its last block
        said = list(migrate_disk._missing_parts(file.fileno(), had))
        assert said.count(b"") == 3, "no progress is reported for unchanged parts"
        os.pwrite(file.fileno(), b"d", 4 * MIB)
        os.truncate(file.fileno(), 3 * MIB)
        os.truncate(file.fileno(), 4 * MIB + 2)
        again = part(3 * MIB, bytes(MIB)) + part(4 * MIB, bytes(2))
        assert changed(file, had) == again + part(4 * MIB + 2)


ANSWERS = """
import sys, time
for answer in sys.argv[1:]:
    print(answer, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("answers", "still"), [((), False), (("",), True)])
def test_transfer_of_an_ending_job_does_not_wait_for_an_answer(disk, answers, still):
    disk.write_bytes(b"a")
    argv = [sys.executable, "-c", ANSWERS, *answers]
    stood, asked = threading.Event(), threading.Event()

    def stop():
        asked.set()
        return stood.is_set() == still

    with (
        pytest.raises(HostFault, match="cannot copy the guest's disk: no answer in time"),
        migrate_disk.send_disk(argv, {}, disk, stood.set, stop) as rest,
    ):
        rest()
        raise AssertionError
    assert asked.is_set()


def test_error_of_the_receiver_is_reported(disk):
    disk.write_bytes(b"a")
    argv = [sys.executable, "-c", "raise SystemExit('noise\\nno room')"]
    with (
        pytest.raises(HostFault, match="cannot copy the guest's disk: no room"),
        migrate_disk.send_disk(argv, {}, disk, lambda: None, lambda: False),
    ):
        raise AssertionError


def test_remote_script_is_killed_with_its_children(disk):
    disk.write_bytes(b"a")
    with (
        pytest.raises(HostFault, match="no answer in time"),
        migrate_disk.send_disk(["sh", "-c", "sleep 600; :"], {}, disk, lambda: None, lambda: True),
    ):
        raise AssertionError


def test_truncated_and_regrown_part_is_sent_again(disk):
    had = {}
    with disk.open("w+b") as file:
        file.write(b"a" * 2 * MIB)
        file.flush()
        changed(file, had)
        os.truncate(file.fileno(), MIB + 5)
        assert changed(file, had) == part(MIB, b"aaaaa") + part(MIB + 5)
        os.pwrite(file.fileno(), b"a" * MIB, MIB)
        assert changed(file, had) == part(MIB, b"a" * MIB) + part(2 * MIB)
