"""Unusual files and races in the user's paths: disk, share, output, scripts, proofs.

Root's privileges are dropped before any of these files is opened. Each attack runs with its guard
and without it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import types
from pathlib import Path

import pytest

from path_attacks import Attack, all_of, between, flags, plain, statement
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.base.run_tool import NOBODY
from vtorque_core.config import request
from vtorque_core.node.shell import proof
from vtorque_core.resources import _user_daemon_exec
from vtorque_local import become_job, qsub
from vtorque_pbs import convention as pbs

ME = os.getuid()
SECTORS = b"\1" * 1024


def a_plan(top: Path, name: str, **changes: object) -> _user_daemon_exec.DaemonPlan:
    fields = dict.fromkeys(_user_daemon_exec.DaemonPlan._fields, 0)
    fields |= {"uid": ME, "source": str(top / name), "disk": True, "readonly": False}
    return _user_daemon_exec.DaemonPlan(**(fields | changes))


def disk(name: str, **changes: object):
    """Open a disk file as its daemon does, and write to the file."""

    def act(top: Path) -> str:
        descriptor = _user_daemon_exec._open_disk(a_plan(top, name, **changes))
        try:
            if not changes.get("readonly"):
                os.pwrite(descriptor, b"x", 0)
        finally:
            os.close(descriptor)
        return "opened"

    return act


def share(name: str, **changes: object):
    """Open a shared directory as root's launcher does."""
    wanted = {"owner_check": True, "launched_by_root": True} | changes

    def act(top: Path) -> str:
        os.close(_user_daemon_exec._open_source(a_plan(top, name, **wanted)))
        return "opened"

    return act


def make_users_link(name: str, target: str):
    """Create a link; if this process is root, an unprivileged user owns the link."""

    def prepare(top: Path) -> None:
        (top / name).symlink_to(top / target)
        if ME == 0:
            os.lchown(top / name, NOBODY, NOBODY)

    return prepare


def opened(_: Path, done: object) -> bool:
    return done == "opened"


def victims_disk(top: Path) -> None:
    (top / "victim/file").write_bytes(SECTORS)


def linked_disk(top: Path) -> None:
    victims_disk(top)
    (top / "disk").symlink_to(top / "victim/file")


def written(top: Path, _: object) -> bool:
    return (top / "victim/file").read_bytes() != SECTORS


def by_descriptor(top: Path) -> object:
    """Open the victim's file by the path of a descriptor that the process has."""
    with (top / "victim/file").open("r+b") as file:
        return disk(f"/proc/self/fd/{file.fileno()}")(top)


def a_socket(top: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "disk"))


def locked(top: Path) -> object:
    (top / "disk").write_bytes(SECTORS)
    with (top / "disk").open("rb") as other:
        held = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, held)
        return disk("disk")(top)


def swapped_disk(top: Path) -> object:
    """Replace the user's file by a link just before the daemon opens it."""
    (top / "disk").write_bytes(SECTORS)

    def swap() -> None:
        (top / "disk").unlink()
        linked_disk(top)

    with between(_user_daemon_exec, "open", lambda path, *_: path == str(top / "disk"), swap):
        return disk("disk")(top)


def file(name: str, content: bytes = b""):
    return lambda top: (top / name).write_bytes(content)


def fifo(name: str):
    return lambda top: os.mkfifo(top / name)


def swap_share(top: Path) -> object:
    """Replace the user's directory by a link just before the daemon opens it."""
    (top / "home").mkdir()

    def swap() -> None:
        (top / "home").rmdir()
        (top / "home").symlink_to(top / "victim")

    with between(_user_daemon_exec, "open", lambda path, *_: path == str(top / "home"), swap):
        return share("home")(top)


def swap_parent(top: Path) -> object:
    """Replace a parent directory by a link just before the daemon opens the share."""
    (top / "way/home").mkdir(parents=True)

    def swap() -> None:
        (top / "way/home").rmdir()
        (top / "way").rmdir()
        (top / "victim/home").mkdir()
        (top / "way").symlink_to(top / "victim")

    with between(_user_daemon_exec, "open", lambda path, *_: path == str(top / "way/home"), swap):
        return share("way/home")(top)


NO_LINK = flags(_user_daemon_exec, "O_NOFOLLOW")
REPLACED = statement(_user_daemon_exec, "_open_source", "was replaced")
LINKS = statement(_user_daemon_exec, "_resolve", "users other than root can change")
REGULAR = statement(_user_daemon_exec, "_open_disk", "is not a regular file")
WHOSE = statement(_user_daemon_exec, "_open_disk", "not to you")
SIZE = statement(_user_daemon_exec, "_open_disk", "a raw disk must have")
LOCK = plain(
    _user_daemon_exec, "fcntl", types.SimpleNamespace(**{**vars(fcntl), "fcntl": lambda *_: 0})
)
DISKS = {
    "link to another user's file": Attack(linked_disk, disk("disk"), NO_LINK, written),
    "file replaced by a link just before the open": Attack(
        victims_disk, swapped_disk, NO_LINK, written
    ),
    "path of a descriptor in /proc/self/fd": Attack(victims_disk, by_descriptor, NO_LINK, written),
    "hard link to another user's file": Attack(
        lambda top: (victims_disk(top), os.link(top / "victim/file", top / "disk")),
        disk("disk", uid=ME + 1), WHOSE, written,
    ),
    "another user's file": Attack(
        victims_disk, disk("victim/file", uid=ME + 1), WHOSE, written
    ),
    "FIFO opened read-only": Attack(
        fifo("disk"), disk("disk", readonly=True), flags(_user_daemon_exec, "O_NONBLOCK"),
        hangs=True
    ),
    "FIFO": Attack(
        fifo("disk"), disk("disk", readonly=True), REGULAR,
        lambda _, done: "regular" not in str(done),
    ),
    "device": Attack(
        lambda top: None, disk("/dev/null", readonly=True), REGULAR,
        lambda _, done: "regular" not in str(done),
    ),
    "endless device": Attack(
        lambda top: None, disk("/dev/zero", readonly=True), REGULAR,
        lambda _, done: "regular" not in str(done),
    ),
    "directory": Attack(
        lambda top: None, disk("dir", readonly=True), REGULAR,
        lambda _, done: "regular" not in str(done),
    ),
    "file in use": Attack(lambda top: None, locked, LOCK, opened),
    "empty file": Attack(file("disk"), disk("disk"), SIZE, opened),
    "file of 700 bytes": Attack(file("disk", b"x" * 700), disk("disk"), SIZE, opened),
}  # fmt: skip
SHARES = {
    "link to another user's directory": Attack(
        make_users_link("home", "victim"), share("home"), LINKS, opened
    ),
    "link as parent": Attack(
        make_users_link("way", "."), share("way/victim"), LINKS, opened
    ),
    "directory replaced by a link just before the open": Attack(
        lambda top: None, swap_share, all_of(NO_LINK, REPLACED), opened
    ),
    "parent replaced by a link just before the open": Attack(
        lambda top: None, swap_parent, REPLACED, opened
    ),
    "file in place of a directory": Attack(
        file("home"), share("home"), flags(_user_daemon_exec, "O_DIRECTORY"), opened
    ),
    "another user's directory": Attack(
        lambda top: None, share("victim", uid=ME + 1),
        statement(_user_daemon_exec, "_open_source", "belongs to uid"), opened,
    ),
}  # fmt: skip


# -- Files that the wrapper trusts -----------------------------------------------------------------


def paths(top: Path) -> Paths:
    return Paths(top, top)


READY = proof.Proof(
    JobAttempt("1.s", 0, "u", ME), "ready", files={"vm_prologue": proof.digest(b"echo\n")}
)


def proven(top: Path) -> None:
    """Write a valid proof to the victim's file."""
    (top / "proof").mkdir(mode=0o755)
    (top / "victim/file").write_bytes(READY.encode())


def with_proof(make):
    def prepare(top: Path) -> None:
        proven(top)
        make(top, top / "proof/1.s.json")

    return prepare


def read_proof(top: Path) -> object:
    return proof.read(paths(top), "1.s", ME, owner_uid=ME)


def is_accepted(_: Path, done: object) -> bool:
    return isinstance(done, proof.Proof | bytes)


def open_directory(top: Path, at: Path) -> None:
    at.write_bytes(READY.encode())
    at.parent.chmod(0o777)


def linked_directory(top: Path, at: Path) -> None:
    (top / "away").mkdir(mode=0o755)
    (top / "away/1.s.json").write_bytes(READY.encode())
    at.parent.rmdir()
    at.parent.symlink_to(top / "away")


def script(make):
    def prepare(top: Path) -> None:
        at = proof.user_file_path(paths(top), READY.job, "vm_prologue")
        at.parent.mkdir(parents=True)
        make(top, at)

    return prepare


def read_script(top: Path) -> object:
    return proof.user_file(paths(top), READY, "vm_prologue")


OWNER = statement(proof, "_check_owner", "can be written by others")
KIND = statement(proof, "_check_owner", "has the wrong type")
PROOFS = {
    "link to another proof": Attack(
        with_proof(lambda top, at: at.symlink_to(top / "victim/file")), read_proof,
        flags(proof, "O_NOFOLLOW"), is_accepted,
    ),
    "FIFO without a writer": Attack(
        with_proof(lambda top, at: os.mkfifo(at)), read_proof, flags(proof, "O_NONBLOCK"),
        hangs=True,
    ),
    "world-writable proof": Attack(
        with_proof(lambda top, at: (at.write_bytes(READY.encode()), at.chmod(0o666))), read_proof,
        OWNER, is_accepted,
    ),
    "world-writable directory": Attack(
        with_proof(open_directory), read_proof, OWNER, is_accepted
    ),
    "link in place of the directory": Attack(
        with_proof(linked_directory), read_proof,
        plain(proof, "_check_owner", lambda *_: None), is_accepted,
    ),
    "changed script": Attack(
        script(lambda top, at: at.write_bytes(b"evil\n")), read_script,
        statement(proof, "user_file", "was changed"), is_accepted,
    ),
    "link in place of a script": Attack(
        script(lambda top, at: (file("s", b"echo\n")(top), at.symlink_to(top / "s"))),
        read_script, flags(proof, "O_NOFOLLOW"), is_accepted,
    ),
    "FIFO in place of a script": Attack(
        script(lambda top, at: os.mkfifo(at)), read_script, flags(proof, "O_NONBLOCK"),
        hangs=True,
    ),
}  # fmt: skip

# -- Files that vsub and a job read and write, as the user -----------------------------------------


def named(name: str):
    return lambda top: request.read_user_file(str(top / name))


def sparse(top: Path) -> None:
    (top / "f").touch()
    os.truncate(top / "f", 1 << 40)


def output(top: Path) -> None:
    os.close(become_job.open_output(str(top / "out"), "x", os.O_TRUNC))


def linked_output(top: Path) -> None:
    victims_disk(top)
    (top / "out").symlink_to(top / "victim/file")


def read_job_script(name: str):
    def act(top: Path) -> object:
        return qsub.read_script(pbs.split_qsub([str(top / name)]))

    return act


def endless(act, module, function):
    """Return an attack with a device that can be read forever."""
    return Attack(
        lambda top: None, act, statement(module, function, "is not a regular file"),
        lambda _, done: "regular" not in str(done),
    )  # fmt: skip


FILES = {
    "FIFO as vm_prologue": Attack(
        fifo("f"), named("f"), flags(request, "O_NONBLOCK"), hangs=True
    ),
    "endless device as vm_prologue": endless(named("/dev/zero"), request, "read_user_file"),
    "sparse file of 1 TiB as vm_prologue": Attack(
        sparse, named("f"), statement(request, "read_user_file", "is longer than"),
        lambda _, done: not isinstance(done, ValueError),
    ),
    "FIFO as job script": Attack(
        fifo("f"), read_job_script("f"), flags(qsub, "O_NONBLOCK"), hangs=True
    ),
    "endless device as job script": endless(read_job_script("/dev/zero"), qsub, "read_script"),
    "FIFO at the path of the output": Attack(
        fifo("out"), output, flags(become_job, "O_NONBLOCK"), hangs=True
    ),
    "link at the path of the output": Attack(
        linked_output, output, flags(become_job, "O_NOFOLLOW"), written
    ),
}  # fmt: skip

ALL = {
    f"{kind}: {name}": attack
    for kind, attacks in (
        ("disk", DISKS), ("share", SHARES), ("proof", PROOFS), ("file", FILES),
    )
    for name, attack in attacks.items()
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_path_attack_fails_only_with_its_guard(name, tmp_path, monkeypatch):
    assert ALL[name].both(tmp_path, monkeypatch) == (False, True)


def test_sparse_user_disk_costs_no_space(tmp_path):
    (tmp_path / "disk").touch()
    os.truncate(tmp_path / "disk", 8 << 40)
    assert disk("disk")(tmp_path) == "opened"
    assert (tmp_path / "disk").stat().st_blocks < 64


def test_socket_as_user_disk_is_denied_as_not_a_regular_file(tmp_path):
    """open(2) of a socket fails before the check of the file type."""
    a_socket(tmp_path)
    with pytest.raises(_user_daemon_exec._Denied, match="is not a regular file"):
        disk("disk")(tmp_path)
