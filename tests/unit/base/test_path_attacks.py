"""Links, races and unusual files in paths where root creates or removes files.

Each attack runs with its guard and without it. For users' files that root opens, see
``test_path_attacks_users.py``.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from path_attacks import Attack, all_of, between, flags, plain, statement
from vtorque_core.api import kept_records
from vtorque_core.base import errors, locks, safefs, trust
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config import directories
from vtorque_core.node.shell import proof
from vtorque_core.plan import job_context
from vtorque_core.records import reading
from vtorque_iocm import irqs
from vtorque_unclot import shm as shared_memory
from vtorque_unclot.shm import Shm

ME = os.getuid()
NO_LINK = flags(safefs, "O_NOFOLLOW")
FRESH = flags(safefs, "O_EXCL", "O_NOFOLLOW")
SHM = f"vtorque-test-{os.getpid()}"


def link(name: str, target: str = "victim/file"):
    return lambda top: (top / name).symlink_to(top / target)


def hard_link(name: str):
    return lambda top: os.link(top / "victim/file", top / name)


def write(name: str):
    return lambda top: safefs.write_new(str(top / name), b"x", mode=0o644)


def mode(name: str, bits: int):
    return lambda top: (top / name).chmod(bits)


def swap(top: Path) -> None:
    """Replace root's directory by a link to the victim's."""
    (top / "dir").rename(top / "away")
    (top / "dir").symlink_to(top / "victim")


def racing(call: str, name: str, act, *, after: bool = False):
    """Return ``act`` with a swap during root's system call ``call`` on ``name``."""

    def run(top: Path) -> object:
        with between(safefs, call, lambda path, *_: path == name, lambda: swap(top), after=after):
            return act(top)

    return run


def naive_write(path: str, content: bytes, **_) -> None:
    Path(path).write_bytes(content)


def naive_tree(path: str) -> None:
    shutil.rmtree(os.path.realpath(path))


def naive_directory(path: str, *, mode: int, **_) -> None:
    Path(path).mkdir(exist_ok=True)
    Path(path).chmod(mode)


def made(name: str):
    return lambda top, _: (top / name).exists()


def in_tree(top: Path) -> None:
    (top / "dir/below").mkdir()
    (top / "dir/below/x").touch()


def tree_race(top: Path) -> None:
    """Replace a directory in a tree by a link between root's check and open."""

    def exchange() -> None:
        (top / "dir/below").rename(top / "away")
        (top / "dir/below").symlink_to(top / "victim")

    with between(safefs, "open", lambda path, *_: path == "below", exchange):
        safefs.remove_tree(str(top / "dir"))


def mounted(below: bool):
    """Simulate a mount: mount(8) needs root, and is limited in a container."""

    def run(top: Path) -> None:
        target = (top / "dir/below" if below else top / "dir").stat().st_ino
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                safefs, "_mount_id", lambda fd: "1" if os.fstat(fd).st_ino == target else "0"
            )
            safefs.remove_tree(str(top / "dir"))

    return run


def new_job_state(top: Path) -> None:
    """Replace a new directory by a link before root sets the owner of the directory."""

    def exchange() -> None:
        (top / "new").rmdir()
        (top / "new").symlink_to(top / "victim")

    with between(safefs, "mkdir", lambda path, *_: path == "new", exchange, after=True):
        safefs.make_directory(str(top / "new"), mode=0o711)


def setting(top: Path) -> None:
    irqs._set(str(top / "link"), "evil")


def shm_link(top: Path) -> None:
    Path("/dev/shm", SHM).unlink(missing_ok=True)
    Path("/dev/shm", SHM).symlink_to(top / "victim/file")


def shm(top: Path) -> None:
    try:
        Shm(SHM, size=4096).create()
    finally:
        Path("/dev/shm", SHM).unlink(missing_ok=True)


def paths(top: Path) -> Paths:
    return Paths(top, top)


def ready_proof(top: Path) -> proof.Proof:
    (top / "proof").mkdir(exist_ok=True)
    return proof.Proof(JobAttempt("1.s", 0, "u", ME), "ready")


def proof_link(name: str):
    def prepare(top: Path) -> None:
        ready_proof(top)
        (top / "proof" / name).symlink_to(top / "victim/file")

    return prepare


def kept_link(top: Path) -> None:
    place = kept_records.place(paths(top), JobAttempt("1.s", 0, "u", ME))
    place.directory.mkdir(parents=True)
    (place.directory / "log").symlink_to(top / "victim/file")


def keep(top: Path) -> None:
    descriptor = kept_records.place(paths(top), JobAttempt("1.s", 0, "u", ME)).append("log")
    os.write(descriptor, b"x")
    os.close(descriptor)


def secret(top: Path) -> None:
    (top / "victim/file").write_bytes(b"s" * 32)
    (top / "victim/file").chmod(0o600)
    (top / "secret").symlink_to(top / "victim/file")


def lock(top: Path) -> None:
    os.close(locks.take_lock(top / "lock", 0))


OTHERS = "can be written by others"
ATTACKS = {
    # creating
    "link at the path of a new file": Attack(link("f"), write("f"), FRESH),
    "hard link at the path of a new file": Attack(hard_link("f"), write("f"), FRESH),
    "dangling link": Attack(link("f", "victim/new"), write("f"), FRESH),
    "link to a link": Attack(
        lambda top: (link("g")(top), (top / "f").symlink_to("g")), write("f"), FRESH
    ),
    "FIFO at the path of a new file": Attack(
        lambda top: os.mkfifo(top / "f"), write("f"), FRESH, hangs=True
    ),
    "world-writable directory": Attack(
        mode("dir", 0o777), write("dir/f"), statement(safefs, "_check", OTHERS), made("dir/f")
    ),
    "group-writable directory": Attack(
        mode("dir", 0o775), write("dir/f"), statement(safefs, "_check", OTHERS), made("dir/f")
    ),
    "world-writable parent directory": Attack(
        lambda top: ((top / "dir/own").mkdir(0o755), mode("dir", 0o777)(top)),
        write("dir/own/f"), statement(safefs, "_check", OTHERS), made("dir/own/f"),
    ),
    ".. in the path": Attack(
        lambda top: None, write("dir/../victim/f"),
        statement(safefs, "parent_of", "is not an absolute path"),
    ),
    "directory replaced after it was opened": Attack(
        lambda top: None,
        racing("open", "f", write("dir/f")),
        plain(safefs, "write_new", lambda path, *_, **__: os.close(
            os.open("f", os.O_CREAT | os.O_RDWR, dir_fd=os.open(Path(path).parents[1], os.O_PATH))
        ) or Path(path).touch()),
    ),
    # replacing
    "link at the path of a temporary file": Attack(
        link(".f.new"), lambda top: safefs.replace(str(top / "f"), b"x", mode=0o600),
        all_of(FRESH, plain(safefs, "remove_file", lambda path: None)),
    ),
    "link at the path of a replaced file": Attack(
        link("f"), lambda top: safefs.replace(str(top / "f"), b"x", mode=0o600),
        plain(safefs, "replace", naive_write),
    ),
    # directories
    "link at the path of a new directory": Attack(
        link("new", "victim"), lambda top: safefs.make_directory(str(top / "new"), mode=0o777),
        plain(safefs, "make_directory", naive_directory),
    ),
    "new directory replaced": Attack(
        lambda top: None, new_job_state,
        plain(safefs, "_READ", os.O_RDONLY),
    ),
    # removing
    "link at the path of a removed file": Attack(
        link("f"), lambda top: safefs.remove_file(str(top / "f")),
        plain(safefs, "remove_file", lambda path: Path(path).resolve().unlink()),
    ),
    "directory replaced before a removal": Attack(
        lambda top: (top / "dir/file").touch(),
        racing("unlink", "file", lambda top: safefs.remove_file(str(top / "dir/file"))),
        plain(safefs, "remove_file", lambda path: (
            os.unlink("file", dir_fd=os.open(Path(path).parent, os.O_PATH)), Path(path).unlink()
        )),
    ),
    "link at the path of a removed tree": Attack(
        link("tree", "victim"), lambda top: safefs.remove_tree(str(top / "tree")),
        plain(safefs, "remove_tree", naive_tree),
    ),
    "link in a removed tree": Attack(
        link("dir/l", "victim"), lambda top: safefs.remove_tree(str(top / "dir")),
        plain(safefs, "remove_tree", lambda path: [
            shutil.rmtree(os.path.realpath(entry)) for entry in Path(path).iterdir()
        ]),
    ),
    "directory replaced in a removed tree": Attack(
        in_tree, tree_race, plain(safefs, "_READ", os.O_RDONLY)
    ),
    "mount in a removed tree": Attack(
        in_tree, mounted(below=True), statement(safefs, "_empty", "is a mount point"),
        lambda top, _: not (top / "dir/below/x").exists(),
    ),
    "mount at the path of a removed tree": Attack(
        lambda top: (top / "dir/x").touch(), mounted(below=False),
        statement(safefs, "remove_tree", "is a mount point"),
        lambda top, _: not (top / "dir/x").exists(),
    ),
    # kept by root
    "link at the path of a kernel setting": Attack(
        link("link"), setting, flags(irqs, "O_NOFOLLOW")
    ),
    "link in /dev/shm": Attack(
        shm_link, shm, flags(shared_memory, "O_EXCL", "O_NOFOLLOW")
    ),
    ".. in a name in /dev/shm": Attack(
        lambda top: None, lambda top: Shm(f"../..{top}/victim/new", size=1).create(),
        plain(Shm, "path", property(lambda self: f"/dev/shm/{self.name}")),
    ),
    "link at the path of a proof's temporary file": Attack(
        proof_link(".1.s.json.new"), lambda top: proof.write(paths(top), ready_proof(top)),
        all_of(FRESH, plain(safefs, "remove_file", lambda path: None)),
    ),
    "link at the path of a lock": Attack(
        link("lock"), lock, flags(locks, "O_NOFOLLOW"), hangs=True
    ),
    "link at the path of a kept record": Attack(kept_link, keep, flags(kept_records, "O_NOFOLLOW")),
    "link at the path of a journal": Attack(
        link("1.s.0.jsonl"), lambda top: reading.read(top / "1.s.0.jsonl"),
        flags(reading, "O_NOFOLLOW"),
        lambda _, done: "symbolic link" not in str(done),
    ),
    "link at the path of the site secret": Attack(
        secret, lambda top: job_context.load_secret(top / "secret"),
        flags(job_context, "O_NOFOLLOW"),
        lambda _, done: isinstance(done, bytes),
    ),
    "group-readable site secret": Attack(
        lambda top: ((top / "s").write_bytes(b"s" * 32), (top / "s").chmod(0o640)),
        lambda top: job_context.load_secret(top / "s"),
        statement(trust, "require_secret", "users other than root can access it"),
        lambda _, done: isinstance(done, bytes),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_path_attack_fails_only_with_its_guard(name, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getegid", lambda: 100)  # no private group
    assert ATTACKS[name].both(tmp_path, monkeypatch) == (False, True)


def users_link(top: Path) -> None:
    """Replace a directory by another user's link, as any user can in /tmp."""
    top.chmod(0o1777)
    (top / "dir").rmdir()
    (top / "dir").symlink_to(top / "victim")
    os.lchown(top / "dir", 65534, 65534)


def users_swap(top: Path) -> object:
    """Replace the directory by another user's link between two steps of root."""
    with between(safefs, "open", lambda path, *_: path == "dir", lambda: users_link(top)):
        return write("dir/f")(top)


FOREIGN = statement(safefs, "_check", "belongs to uid")
BY_OTHERS = {
    "link at the path of root's directory": Attack(
        link("run", "victim"),
        lambda top: directories.make(top / "run", 0o755),
        statement(directories, "make", "is not a directory: move it"),
    ),
    "user's link in the path": Attack(users_link, write("dir/f"), FOREIGN),
    "directory replaced by a user's link": Attack(lambda top: None, users_swap, FOREIGN),
    "user's directory in the path": Attack(
        lambda top: os.chown(top / "dir", 65534, 65534), write("dir/f"), FOREIGN, made("dir/f")
    ),
}


@pytest.mark.skipif(ME != 0, reason="needs root, to act as another user")
@pytest.mark.parametrize("name", BY_OTHERS)
def test_path_attack_by_another_user_fails_only_with_its_guard(name, tmp_path, monkeypatch):
    assert BY_OTHERS[name].both(tmp_path, monkeypatch) == (False, True)


def test_circular_links_are_rejected(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(errors.HostFault, match="too many symbolic links"):
        safefs.write_new(str(tmp_path / "a/f"), b"x", mode=0o600)
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        safefs.write_new(str(tmp_path / "file/f"), b"x", mode=0o600)


def test_relative_links_are_resolved_as_by_the_kernel(tmp_path):
    (tmp_path / "x/y").mkdir(parents=True)
    (tmp_path / "to").mkdir()
    (tmp_path / "x/y/l").symlink_to("../../to")
    safefs.write_new(str(tmp_path / "x/y/l/f"), b"x", mode=0o600)
    assert stat.S_IMODE((tmp_path / "to/f").stat().st_mode) == 0o600
