"""Copies of images on nodes: pushed by rsync, resumed, checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from programs import fake_program
from vtorque_cluster import sync
from vtorque_cluster.cache import ImagePlaces
from vtorque_cluster.sync import SyncResult, push, receive
from vtorque_core.api import HostFault, Refused, take_lock
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.live.images import describe, listing, lookup, store
from vtorque_core.live.images import names as names_in
from vtorque_images import change
from vtorque_images import health as doctor_images
from vtorque_testing.planned import site

MIB = 1 << 20
Send = Callable[..., SyncResult]
Examine = Callable[[], list[tuple[str, str, str]]]  # status, message, fix of each result


@pytest.fixture
def pool(places: ImagePlaces) -> Path:
    return places.pool


@pytest.fixture
def cache(places: ImagePlaces) -> Path:
    return places.cache


def put(pool: Path, name: str, content: bytes, holes: int = 0) -> str:
    built = BuiltImage("linux", "d", "x86_64", 64, kernel="k", initrd="i", labels={"a": "b"})
    with store.staging(pool) as staging:
        with (staging / "k").open("wb") as file:
            file.write(content)
            file.truncate(len(content) + holes)
        (staging / "i").write_bytes(b"initrd")
        return change.commit(pool, name, staging, built, "test").sha256


FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift;; esac; shift; done
echo "$1" >> "$0.log"; shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Return an ssh that runs the command on this host."""
    return str(fake_program(tmp_path / "ssh", FAKE_SSH))


@pytest.fixture
def send_images(places: ImagePlaces, ssh: str) -> Send:
    """Return a function that sends images to the cache and has them accepted; none named: all."""

    def do(*names: str) -> SyncResult:
        push(places, names, "n1", ssh)
        wanted = names or tuple(names_in(places.pool))
        return receive(places, wanted, only=not names)

    return do


def test_all_images_are_copied_once(
    pool: Path, cache: Path, places: ImagePlaces, send_images: Send, ssh: str
) -> None:
    put(pool, "a", os.urandom(100_000), holes=50 * MIB)
    put(pool, "b", b"b")
    assert send_images() == SyncResult(("a", "b"), (), ())
    push(places, (), "n1", ssh)
    assert not list((cache / sync.PARTIAL).glob("*/*/k")), "files that the node has were sent again"
    assert send_images() == SyncResult((), ("a", "b"), ())
    for name in "ab":
        mine, theirs = describe(cache, name), describe(pool, name)
        assert (mine.sha256, mine.built) == (theirs.sha256, theirs.built)
        assert lookup(pool, name, cache) == lookup(cache, name)
    kernel = lookup(cache, "a").kernel
    assert kernel is not None
    assert kernel.stat().st_blocks * 512 < MIB, "holes are not preserved"
    assert cache.stat().st_mode & 0o7777 == 0o755


def test_images_removed_from_the_pool_are_removed_by_a_full_sync(
    pool: Path, cache: Path, send_images: Send
) -> None:
    for name in "abc":
        put(pool, name, name.encode())
    send_images()
    change.remove(pool, "a")
    put(pool, "b", b"newer")
    assert send_images("c") == SyncResult((), ("c",), ())
    assert lookup(cache, "a").name == "a"
    assert send_images() == SyncResult(("b",), ("c",), ("a",))
    assert [i.name for i in listing(cache)] == ["b", "c"]


def test_interrupted_copy_is_continued(pool: Path, cache: Path, send_images: Send) -> None:
    content = os.urandom(3 * MIB)
    put(pool, "a", content)
    part = cache / sync.PARTIAL / "a" / describe(pool, "a").version
    part.mkdir(parents=True)
    (part / "k").write_bytes(content[:MIB])
    inode = (part / "k").stat().st_ino
    assert listing(cache) == []
    assert send_images().copied == ("a",)
    kernel = lookup(cache, "a").kernel
    assert kernel is not None
    assert kernel.read_bytes() == content
    assert kernel.stat().st_ino == inode, "the partial file was replaced instead of continued"


def test_damaged_copy_is_sent_again(pool: Path, cache: Path, send_images: Send) -> None:
    put(pool, "a", b"1234")
    send_images()
    kernel = lookup(cache, "a").kernel
    assert kernel is not None
    kernel.write_bytes(b"")
    assert send_images().copied == ("a",)
    assert change.verify(cache, "a").name == "a"
    status = kernel.stat()
    kernel.write_bytes(b"4321")
    kernel.chmod(0o600)
    os.utime(kernel, ns=(status.st_atime_ns, status.st_mtime_ns))
    (cache / "a/image.json").unlink()
    with pytest.raises(Refused, match="the copy is version"):  # size and time were right
        send_images()
    assert send_images().copied == ("a",)
    assert change.verify(cache, "a").name == "a"


def test_image_that_does_not_match_its_version_is_not_copied(
    pool: Path, cache: Path, send_images: Send
) -> None:
    put(pool, "a", b"1234")
    kernel = lookup(pool, "a").kernel
    assert kernel is not None
    for content in (b"4321", b"12345"):
        kernel.write_bytes(content)
        with pytest.raises(Refused, match="the copy is version"):
            send_images()
    assert listing(cache) == []


def test_concurrent_syncs_do_not_conflict(places: ImagePlaces, send_images: Send) -> None:
    put(places.pool, "a", b"1")
    lock = take_lock(places.paths.run / "image-sync.lock", 0)
    with pytest.raises(HostFault, match=r"image-sync\.lock is held by another process"):
        send_images()
    assert listing(places.cache) == []
    os.close(lock)
    assert send_images().copied == ("a",)


@pytest.mark.parametrize("names", [[], ["a"]])
def test_cache_that_others_can_write_is_not_used(
    places: ImagePlaces, send_images: Send, tmp_path: Path, names: list[str]
) -> None:
    """Users could replace parts of the cache by links."""
    send_images()
    theirs = tmp_path / "theirs"
    (theirs / "work").mkdir(parents=True)
    shutil.rmtree(places.cache / sync.PARTIAL, ignore_errors=True)
    (places.cache / sync.PARTIAL).symlink_to(theirs)
    places.cache.chmod(0o777)
    with pytest.raises(Refused, match="others than root"):
        receive(places, names, only=True)
    assert (theirs / "work").is_dir()


def test_unknown_image_name_is_refused(send_images: Send) -> None:
    with pytest.raises(Refused, match="no such image"):
        send_images("a")


def test_files_are_sent_to_a_node_without_the_pool(
    pool: Path, tmp_path: Path, places: ImagePlaces, ssh: str
) -> None:
    cache = tmp_path / "it's a cache"
    places = replace(places, cache=cache)
    content = os.urandom(MIB)
    put(pool, "a", content, holes=20 * MIB)
    put(pool, "b", b"b")
    push(places, (), "n1", ssh)
    assert Path(f"{ssh}.log").read_text() == "n1\n"
    assert receive(places, ("a", "b")) == SyncResult(("a", "b"), (), ())
    push(places, ("a", "b"), "n1", ssh)
    assert receive(places, ("a", "b")) == SyncResult((), ("a", "b"), ())
    kernel = lookup(tmp_path / "no-pool", "a", cache).kernel
    assert kernel is not None
    assert kernel.read_bytes() == content + bytes(20 * MIB)
    assert kernel.stat().st_blocks * 512 < 2 * MIB
    assert change.verify(cache, "a").labels == {"a": "b"}
    assert list((cache / sync.PARTIAL).iterdir()) == []


def test_copy_damaged_in_transfer_is_rejected(
    pool: Path, cache: Path, places: ImagePlaces, ssh: str
) -> None:
    put(pool, "a", b"1234")
    push(places, ("a",), "n1", ssh)
    (part,) = (cache / sync.PARTIAL).glob("a/*/k")
    part.write_bytes(b"4321")
    with pytest.raises(Refused, match="the copy is version"):
        receive(places, ("a",))
    assert listing(cache) == []
    push(places, ("a",), "n1", ssh)
    assert receive(places, ("a",)).copied == ("a",)


def test_unreachable_node_is_reported(places: ImagePlaces, tmp_path: Path) -> None:
    put(places.pool, "a", b"1")
    text = "#!/bin/sh\necho 'ssh: No route to host' >&2\nexit 255\n"
    ssh = fake_program(tmp_path / "ssh", text)
    with pytest.raises(HostFault, match="No route to host"):
        push(places, (), "n1", str(ssh))


@pytest.fixture
def examine_cache(pool: Path, cache: Path) -> Examine:
    """Return what doctor reports about the cache: status, message, fix."""
    config = site(images={"pool": pool, "cache": str(cache)})
    return lambda: [(r.status, r.message, r.fix) for r in doctor_images.check_cache(config)]


def test_doctor_accepts_a_complete_cache(
    pool: Path, cache: Path, send_images: Send, examine_cache: Examine
) -> None:
    put(pool, "one", b"1")
    put(pool, "two", b"2")
    assert examine_cache() == [
        ("warning", f"{cache} does not exist, so images are not cached", doctor_images._SYNC)
    ]
    send_images("one")
    assert examine_cache()[0] == ("ok", f"1 complete copies in {cache}", "")
    off = list(doctor_images.check_cache(site(images={"pool": pool})))
    assert [result.status for result in off] == ["ok"]


def test_doctor_names_broken_and_old_copies(
    pool: Path, cache: Path, send_images: Send, examine_cache: Examine
) -> None:
    for name in ("cut", "gone", "old", "whole"):
        put(pool, name, name.encode())
    send_images()
    versions = {name: describe(cache, name).version for name in ("cut", "gone")}
    (cache / "cut" / versions["cut"] / "k").write_bytes(b"")
    (cache / "gone" / versions["gone"] / "i").unlink()
    put(pool, "old", b"new")
    cut, gone, old, good = examine_cache()
    for found, name, word in (
        (cut, "cut", "not the file that was hashed"),
        (gone, "gone", "No su"),
    ):
        assert found[0] == "warning", "not a warning, although jobs can use the pool"
        assert found[1].startswith(f"copy of {name} ")
        assert word in found[1]
        assert found[2] == doctor_images._SYNC
    message = "the copy of old differs from the pool: jobs use the pool"
    assert old == ("warning", message, doctor_images._SYNC)
    assert good[:2] == ("ok", f"2 complete copies in {cache}")
    pool.rename(pool.with_name("away"))
    assert [status for status, _, _ in examine_cache()] == ["failed", "failed", "ok"]


def test_doctor_fails_a_cache_that_others_can_write(
    pool: Path, cache: Path, send_images: Send, examine_cache: Examine
) -> None:
    put(pool, "one", b"1")
    send_images()
    cache.chmod(0o777)
    ((status, message, fix),) = examine_cache()
    assert status == "failed"
    assert str(cache) in message
    assert fix.startswith("chown root: and chmod go-w")


def test_doctor_reports_a_full_disk_and_files_that_qemu_cannot_read(
    pool: Path,
    cache: Path,
    send_images: Send,
    examine_cache: Examine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(pool, "one", b"1")
    send_images()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * MIB))
    assert examine_cache()[-1][:2] == ("warning", f"{cache}: 5 MiB free")
    blocked = cache / "one"
    blocked.chmod(0o700)
    results = [found for found in examine_cache() if found[0] == "failed"]
    assert len(results) == 2
    for status, message, fix in results:
        assert message.startswith("QEMU cannot reach ")
        assert message.endswith(f": {blocked} has mode drwx------")
        assert (status, fix) == ("failed", f"chmod o+rX {blocked}")


def test_doctor_accepts_a_node_with_only_the_cache(
    pool: Path, cache: Path, send_images: Send
) -> None:
    put(pool, "one", b"1")
    send_images()
    away = pool.with_name("away")
    with_cache = site(images={"pool": away, "cache": str(cache)})
    assert [r.status for r in doctor_images.check_pool(with_cache)] == ["ok"]
    assert [r.status for r in doctor_images.check_pool(site(images={"pool": away}))] == ["failed"]
