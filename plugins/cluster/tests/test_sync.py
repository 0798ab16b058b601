"""Copies of images on nodes: pulled from the pool, pushed by rsync, resumed, checked."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vtorque_core import doctor_images, image_store, image_sync, images
from vtorque_core.api_image import BuiltImage
from vtorque_core.config import Site
from vtorque_core.config_schema import Images, Node
from vtorque_core.errors import HostFault, Refused
from vtorque_core.image_sync import Synced, pull, push, receive
from vtorque_core.names import Paths

MIB = 1 << 20


class Told:
    """Writes down what it is told; raises at a point of a test's choice."""

    def __init__(self, stop: int = 1 << 60) -> None:
        self.stop = stop
        self.most = 0

    def step(self, text: str) -> None:
        pass

    def told(self, done: int, total: int) -> None:
        self.most = max(self.most, done)
        if done >= self.stop:
            raise KeyboardInterrupt


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "node" / "cache"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "state", tmp_path / "run")


def put(pool: Path, name: str, content: bytes, holes: int = 0) -> str:
    built = BuiltImage("linux", "d", "x86_64", 64, kernel="k", initrd="i", labels={"a": "b"})
    with images.staging(pool) as staging:
        with (staging / "k").open("wb") as file:
            file.write(content)
            file.truncate(len(content) + holes)
        (staging / "i").write_bytes(b"initrd")
        return images.commit(pool, name, staging, built, "test").sha256


def test_all_images_are_copied_once(pool: Path, cache: Path, paths: Paths) -> None:
    put(pool, "a", os.urandom(100_000), holes=50 * MIB)
    put(pool, "b", b"b")
    assert pull(pool, cache, (), Told(), paths) == Synced(("a", "b"), (), ())
    assert pull(pool, cache, (), Told(), paths) == Synced((), ("a", "b"), ())
    for name in "ab":
        mine, theirs = images.describe(cache, name), images.describe(pool, name)
        assert (mine.sha256, mine.built) == (theirs.sha256, theirs.built)
        assert images.lookup(pool, name, cache) == images.lookup(cache, name)
    kernel = images.lookup(cache, "a").kernel
    assert kernel is not None
    assert kernel.stat().st_blocks * 512 < MIB, "holes stay holes"
    assert cache.stat().st_mode & 0o7777 == 0o755


def test_what_the_pool_has_no_more_goes_when_all_are_synchronised(
    pool: Path, cache: Path, paths: Paths
) -> None:
    for name in "abc":
        put(pool, name, name.encode())
    pull(pool, cache, (), Told(), paths)
    images.remove(pool, "a")
    put(pool, "b", b"newer")
    assert pull(pool, cache, ("c",), Told(), paths) == Synced((), ("c",), ())
    assert images.lookup(cache, "a").name == "a"
    assert pull(pool, cache, (), Told(), paths) == Synced(("b",), ("c",), ("a",))
    assert [i.name for i in images.list_images(cache)] == ["b", "c"]


def test_an_interrupted_copy_goes_on_where_it_was(
    pool: Path, cache: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(21 * MIB)
    put(pool, "a", content)
    with pytest.raises(KeyboardInterrupt):
        pull(pool, cache, (), Told(stop=13 * MIB), paths)
    assert images.list_images(cache) == []
    (part,) = (cache / image_sync.PARTIAL).glob("a/*/k")
    assert part.stat().st_size == 16 * MIB
    copied = []
    real = os.pwrite

    def watched(descriptor: int, data: bytes, at: int) -> int:
        copied.append(at)
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", watched)
    assert pull(pool, cache, (), Told(), paths).copied == ("a",)
    assert copied == [0, 16 * MIB, 20 * MIB], "the initramfs, and what was missing"
    kernel = images.lookup(cache, "a").kernel
    assert kernel is not None
    assert kernel.read_bytes() == content


def test_a_part_that_is_not_what_it_should_be_is_found_by_its_hash(
    pool: Path, cache: Path, paths: Paths
) -> None:
    put(pool, "a", os.urandom(9 * MIB))
    with pytest.raises(KeyboardInterrupt):
        pull(pool, cache, (), Told(stop=8 * MIB), paths)
    (part,) = (cache / image_sync.PARTIAL).glob("a/*/k")
    with part.open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(Refused, match=r"image a: its copy is v.*, not v"):
        pull(pool, cache, (), Told(), paths)
    assert images.list_images(cache) == []
    assert pull(pool, cache, (), Told(), paths).copied == ("a",), "the damaged part was thrown away"


def test_a_pool_that_is_not_what_it_says_is_not_copied(
    pool: Path, cache: Path, paths: Paths
) -> None:
    put(pool, "a", b"1234")
    kernel = images.lookup(pool, "a").kernel
    assert kernel is not None
    kernel.write_bytes(b"4321")
    with pytest.raises(Refused, match="its copy is"):
        pull(pool, cache, (), Told(), paths)
    kernel.write_bytes(b"12345")
    with pytest.raises(Refused, match="k has 5 bytes, not 4"):
        pull(pool, cache, (), Told(), paths)
    kernel.chmod(0o666)
    with pytest.raises(Refused, match="can be written by others"):
        pull(pool, cache, (), Told(), paths)
    assert images.list_images(cache) == []


def test_no_room_is_told_before_anything_is_copied(
    pool: Path, cache: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(pool, "a", os.urandom(3 * MIB))
    monkeypatch.setattr(image_sync, "free_bytes", lambda _: MIB)
    with pytest.raises(HostFault, match=r"has 1 MiB left; 3 MiB are needed"):
        pull(pool, cache, (), Told(), paths)
    assert list((cache / image_sync.PARTIAL).iterdir()) == []


def test_two_at_a_time_do_not_meet(pool: Path, cache: Path, paths: Paths) -> None:
    put(pool, "a", b"1")

    class Meddler(Told):
        """Starts another one in the midst of this."""

        def step(self, text: str) -> None:
            with pytest.raises(HostFault, match=r"image-sync\.lock is held by another process"):
                pull(pool, cache, (), Told(), paths)

    assert pull(pool, cache, (), Meddler(), paths).copied == ("a",)


def test_an_unknown_name_is_refused(pool: Path, cache: Path, paths: Paths) -> None:
    with pytest.raises(Refused, match="no such image"):
        pull(pool, cache, ("a",), Told(), paths)


FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift;; esac; shift; done
echo "$1" >> "$0.log"; shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Return an ssh that runs the command on this host."""
    fake = tmp_path / "ssh"
    fake.write_text(FAKE_SSH)
    fake.chmod(0o755)
    return str(fake)


def test_a_node_that_does_not_see_the_pool_is_sent_the_files(
    pool: Path, tmp_path: Path, paths: Paths, ssh: str
) -> None:
    cache = tmp_path / "it's a cache"
    content = os.urandom(MIB)
    put(pool, "a", content, holes=20 * MIB)
    put(pool, "b", b"b")
    push(pool, cache, (), "n1", ssh)
    assert Path(f"{ssh}.log").read_text() == "n1\n"
    assert receive(cache, ("a", "b"), Told(), paths) == Synced(("a", "b"), (), ())
    assert receive_again(pool, cache, paths, ssh) == Synced((), ("a", "b"), ())
    kernel = images.lookup(tmp_path / "no-pool", "a", cache).kernel
    assert kernel is not None
    assert kernel.read_bytes() == content + bytes(20 * MIB)
    assert kernel.stat().st_blocks * 512 < 2 * MIB
    assert images.verify(cache, "a").labels == {"a": "b"}
    assert list((cache / image_sync.PARTIAL).iterdir()) == []


def receive_again(pool: Path, cache: Path, paths: Paths, ssh: str) -> Synced:
    push(pool, cache, ("a", "b"), "n1", ssh)
    return receive(cache, ("a", "b"), Told(), paths)


def test_what_was_damaged_on_its_way_is_not_taken(
    pool: Path, cache: Path, paths: Paths, ssh: str
) -> None:
    put(pool, "a", b"1234")
    push(pool, cache, ("a",), "n1", ssh)
    (part,) = (cache / image_sync.PARTIAL).glob("a/*/k")
    part.write_bytes(b"4321")
    with pytest.raises(Refused, match="its copy is"):
        receive(cache, ("a",), Told(), paths)
    assert images.list_images(cache) == []
    push(pool, cache, ("a",), "n1", ssh)
    assert receive(cache, ("a",), Told(), paths).copied == ("a",)


def test_a_node_that_cannot_be_reached_is_told(pool: Path, cache: Path, tmp_path: Path) -> None:
    put(pool, "a", b"1")
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: No route to host' >&2\nexit 255\n")
    ssh.chmod(0o755)
    with pytest.raises(HostFault, match="No route to host"):
        push(pool, cache, (), "n1", str(ssh))


def test_rsync_is_there() -> None:
    assert subprocess.run(["rsync", "--version"], check=True, capture_output=True, timeout=20)


@pytest.fixture
def examined(pool: Path, cache: Path) -> Callable[[], list[tuple[str, str, str]]]:
    """Return what doctor says of the cache: status, message, fix."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    site = Site(images=Images(pool=pool, cache=str(cache)), node=Node(qemu_user=me))
    return lambda: [(r.status, r.message, r.fix) for r in doctor_images.check_cache(site)]


def test_doctor_has_nothing_against_a_good_cache(
    pool: Path, cache: Path, paths: Paths, examined: Callable[[], list[tuple[str, str, str]]]
) -> None:
    put(pool, "one", b"1")
    put(pool, "two", b"2")
    assert examined() == [
        ("warning", f"{cache} does not exist: no copies of images", "vmgr images sync")
    ]
    pull(pool, cache, ["one"], Told(), paths)
    assert examined()[0] == ("ok", f"1 whole copies in {cache}", "")
    off = list(doctor_images.check_cache(Site(images=Images(pool=pool))))
    assert [result.status for result in off] == ["ok"]


def test_doctor_names_broken_and_old_copies(
    pool: Path, cache: Path, paths: Paths, examined: Callable[[], list[tuple[str, str, str]]]
) -> None:
    for name in ("cut", "gone", "old", "whole"):
        put(pool, name, name.encode())
    pull(pool, cache, [], Told(), paths)
    versions = {name: images.describe(cache, name).version for name in ("cut", "gone")}
    (cache / "cut" / versions["cut"] / "k").write_bytes(b"")
    (cache / "gone" / versions["gone"] / "i").unlink()
    put(pool, "old", b"new")
    cut, gone, old, good = examined()
    for found, name, word in (
        (cut, "cut", "not the file that was hashed"),
        (gone, "gone", "No su"),
    ):
        assert found[0] == "warning", "jobs have the pool"
        assert found[1].startswith(f"copy of {name} ")
        assert word in found[1]
        assert found[2].startswith(f"vmgr images sync {name}")
    message = "copy of old is not what the pool has: jobs read the pool"
    assert old == ("warning", message, "vmgr images sync")
    assert good[:2] == ("ok", f"2 whole copies in {cache}")
    pool.rename(pool.with_name("away"))
    assert [status for status, _, _ in examined()] == ["failed", "failed", "ok"]


def test_doctor_fails_a_cache_that_others_can_write(
    pool: Path, cache: Path, paths: Paths, examined: Callable[[], list[tuple[str, str, str]]]
) -> None:
    put(pool, "one", b"1")
    pull(pool, cache, [], Told(), paths)
    cache.chmod(0o777)
    ((status, message, fix),) = examined()
    assert status == "failed"
    assert str(cache) in message
    assert fix.startswith("chown root: and chmod go-w")


def test_doctor_tells_of_a_full_disk_and_files_that_qemu_cannot_read(
    pool: Path,
    cache: Path,
    paths: Paths,
    examined: Callable[[], list[tuple[str, str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(pool, "one", b"1")
    pull(pool, cache, [], Told(), paths)
    monkeypatch.setattr(image_store, "free_bytes", lambda _: 5 * MIB)
    assert examined()[-1][:2] == ("warning", f"{cache}: 5 MiB free")
    nobody = Site(images=Images(pool=pool, cache=str(cache)), node=Node(qemu_user="nobody"))
    blocked = cache / "one"
    blocked.chmod(0o700)
    results = [r for r in doctor_images.check_cache(nobody) if r.status == "failed"]
    assert results, "a directory of the cache is closed"
    assert all("nobody cannot reach" in r.message for r in results)


def test_doctor_takes_a_node_that_has_only_the_cache(pool: Path, cache: Path, paths: Paths) -> None:
    put(pool, "one", b"1")
    pull(pool, cache, [], Told(), paths)
    away = pool.with_name("away")
    with_cache = Site(images=Images(pool=away, cache=str(cache)))
    assert [r.status for r in doctor_images.check_pool(with_cache)] == ["ok"]
    assert [r.status for r in doctor_images.check_pool(Site(images=Images(pool=away)))] == [
        "failed"
    ]
