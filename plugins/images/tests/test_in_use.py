"""Image versions in use by jobs are kept, and removed when free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vtorque_core.api import HostFault, JobAttempt, Paths, Refused
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.values import Image
from vtorque_core.base.locks import job_lock
from vtorque_core.cli import reap
from vtorque_core.images.pool import select
from vtorque_core.live.images import Plugins, listing, lookup, store
from vtorque_core.node.end.teardown import release_job
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_core.resources import netfilter
from vtorque_core.resources.lease import ImageUse
from vtorque_images import change as images
from vtorque_testing.planned import site as a_site

BUILT = BuiltImage("linux", "micro", "x86_64", 64, kernel="k")


def put(pool: Path, name: str, kernel: bytes, paths: Paths, keep: float = 0) -> Image:
    with store.staging(pool, paths) as staging:
        (staging / "k").write_bytes(kernel)
        options = images.CommitOptions(paths, keep)
        return images.commit(pool, name, staging, BUILT, "test", options=options)


def start(paths: Paths, job: str, image: Image) -> Path:
    """Begin a job that uses the image; return the version's directory."""
    assert image.kernel is not None
    with (
        job_lock(paths, job),
        Journal.start(paths, JobHeader(JobAttempt(job, 0, "u", 1), "local")) as journal,
    ):
        journal.acquire(ImageUse(str(image.kernel.parent)), plugin="core", phase="pre-boot")
    return image.kernel.parent


def end(paths: Paths, job: str) -> None:
    for report in release_job(paths, job, plugins_for=lambda _: Plugins(), deadline=20):
        assert report.clean, report.lines()


def expire(pool: Path) -> None:
    for note in pool.glob("*/*.old"):
        note.write_text("1")


def test_running_jobs_keep_the_old_version_and_new_jobs_get_the_new_one(
    pool: Path, paths: Paths
) -> None:
    one, two = "1.srv", "2.srv"
    old = start(paths, one, put(pool, "m", b"old", paths))
    start(paths, two, lookup(pool, "m"))
    new = put(pool, "m", b"new", paths)
    expire(pool)
    assert store.sweep(pool, paths) == []
    assert store.image_uses(paths) == {str(old): (one, two)}
    assert start(paths, "3.srv", lookup(pool, "m")) != old
    end(paths, one)
    assert old.is_dir(), "the version of the second job was removed"
    end(paths, two)
    assert not old.exists(), "the version is left after its last job"
    assert lookup(pool, "m") == new
    end(paths, "3.srv")
    assert lookup(pool, "m") == new, "a named version was removed"
    assert [p.name for p in pool.iterdir()] == ["m"]


def test_old_version_is_kept_for_other_nodes_for_the_set_time(pool: Path, paths: Paths) -> None:
    old = start(paths, "1", put(pool, "m", b"old", paths))
    put(pool, "m", b"new", paths, keep=3600)
    end(paths, "1")
    store.sweep(pool, paths)
    assert old.is_dir()
    expire(pool)
    assert store.sweep(pool, paths) == [f"m/{old.name}"]


def test_image_in_use_is_not_removed(pool: Path, paths: Paths) -> None:
    image = put(pool, "m", b"1", paths)
    start(paths, "7.srv", image)
    with pytest.raises(Refused, match=r"img=m: is in use by 7\.srv; .*--when-free"):
        images.remove(pool, "m", paths=paths)
    assert lookup(pool, "m") == image


def test_removal_when_free_waits_for_the_last_job(pool: Path, paths: Paths) -> None:
    version = start(paths, "7.srv", put(pool, "m", b"1", paths))
    left = images.remove(pool, "m", paths=paths, when_free=True)
    assert (left.used_by, left.kept) == (("7.srv",), (version.name,))
    with pytest.raises(Refused, match="no such image"):
        lookup(pool, "m")
    assert (version / "k").read_bytes() == b"1"
    end(paths, "7.srv")
    assert list(pool.iterdir()) == []


def test_removed_name_can_be_reused_while_old_files_are_in_use(pool: Path, paths: Paths) -> None:
    version = start(paths, "7", put(pool, "m", b"1", paths))
    images.remove(pool, "m", paths=paths, when_free=True)
    other = put(pool, "m", b"2", paths)
    assert version.is_dir()
    end(paths, "7")
    assert not version.exists()
    assert lookup(pool, "m") == other


def test_removed_image_is_kept_for_other_nodes_for_the_set_time(pool: Path, paths: Paths) -> None:
    put(pool, "m", b"1", paths)
    assert images.remove(pool, "m", paths=paths, keep=3600).kept
    store.sweep(pool, paths)
    assert list((pool / "m").glob("v*"))
    expire(pool)
    store.sweep(pool, paths)
    assert list(pool.iterdir()) == []


def test_job_that_starts_after_the_removal_fails_with_the_reason(pool: Path, paths: Paths) -> None:
    image = put(pool, "m", b"1", paths)
    images.remove(pool, "m", paths=paths)
    with pytest.raises(HostFault, match="was removed while the job was being started"):
        start(paths, "1", image)
    end(paths, "1")


def test_removal_waits_for_the_shared_lock_of_a_starting_job(pool: Path, paths: Paths) -> None:
    """Under a shared lock a job checks its version: no removal can happen at the same time."""
    put(pool, "m", b"1", paths)
    with (
        store.locked(pool, shared=True),
        store.locked(pool, shared=True),
        pytest.raises(HostFault, match="is being changed"),
        store.locked(pool, wait=0.05),
    ):
        pass


def test_unreadable_journal_keeps_all_versions(pool: Path, paths: Paths) -> None:
    old = start(paths, "1", put(pool, "m", b"old", paths))
    put(pool, "m", b"new", paths)
    expire(pool)
    journal = next(paths.journal.iterdir())
    journal.write_text('{"op":"job","schema":99}\n')
    assert store.sweep(pool, paths) == []
    assert old.is_dir()


def test_release_in_a_read_only_pool_is_not_an_error(
    pool: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = start(paths, "1", put(pool, "m", b"1", paths))
    images.remove(pool, "m", paths=paths, when_free=True)

    def readonly(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", readonly)
        end(paths, "1")
    assert version.is_dir()
    store.sweep(pool, paths)
    assert list(pool.iterdir()) == []


@pytest.mark.parametrize("again", [1, 2])
def test_release_is_idempotent_before_and_after_removal(
    pool: Path, paths: Paths, again: int
) -> None:
    image = put(pool, "m", b"1", paths)
    assert image.kernel is not None
    use = ImageUse(str(image.kernel.parent))
    for _ in range(again):
        use.release()
    assert lookup(pool, "m") == image
    images.remove(pool, "m", paths=paths)
    for _ in range(again):
        use.release()
    assert list(pool.iterdir()) == []


def test_reaper_removes_unused_versions(
    pool: Path,
    paths: Paths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(netfilter, "sweep", lambda _uri: ["vt-br9"])
    old = put(pool, "m", b"old", paths)
    new = put(pool, "m", b"new", paths)
    site = a_site(
        paths={"state": paths.state, "run": paths.run},
        images={"pool": pool, "cache": tmp_path / "none"},
    )
    assert old.kernel is not None
    for making in (pool / ".staging-x", pool / "m" / "v0"):
        making.mkdir()  # another host is making it now
    reap._sweep(site)
    tables = "removed nftables table inet vt-br9: its network is not active\n"
    assert capsys.readouterr().err == tables
    expire(pool)
    reap._sweep(site)
    gone = f"removed image version m/{old.kernel.parent.name}: no sidecar refers to it\n"
    assert capsys.readouterr().err == gone + tables
    assert not old.kernel.exists()
    assert (pool / ".staging-x").is_dir()
    assert (pool / "m" / "v0").is_dir()
    assert lookup(pool, "m") == new


# -- The node's cache ------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o755)
    return path


def damage(cache: Path, change: Callable[[Path], object]) -> None:
    change(next(cache.glob("m/v*/k")))


def test_copy_on_the_node_is_preferred_if_equal(pool: Path, cache: Path, paths: Paths) -> None:
    image = put(pool, "m", b"1", paths)
    assert lookup(pool, "m", cache) == image, "an empty cache has the image"
    put(cache, "m", b"1", paths)
    cached = lookup(pool, "m", cache)
    assert cached.kernel is not None
    assert cached.kernel.is_relative_to(cache)
    assert (cached.sha256, cached.labels) == (image.sha256, image.labels)
    assert select(pool, "m", "", "", cache) == cached
    assert select(pool, "", "micro", "", cache) == cached
    newer = put(pool, "m", b"2", paths)
    assert lookup(pool, "m", cache) == newer, "the outdated copy is used"


def test_labels_are_read_from_the_pool(pool: Path, cache: Path, paths: Paths) -> None:
    put(pool, "m", b"1", paths)
    put(cache, "m", b"1", paths)
    images.label(pool, "m", {"site": "x"}, paths)
    assert lookup(pool, "m", cache).labels == {"site": "x"}


@pytest.mark.parametrize(
    "change",
    [lambda k: k.write_bytes(b"x"), Path.unlink, lambda k: k.chmod(0o666)],
    ids=["changed", "missing", "writable"],
)
def test_damaged_copy_is_not_used(
    pool: Path, cache: Path, paths: Paths, change: Callable[[Path], object]
) -> None:
    image = put(pool, "m", b"1", paths)
    put(cache, "m", b"1", paths)
    damage(cache, change)
    assert lookup(pool, "m", cache) == image


def test_copies_are_used_without_a_pool(pool: Path, cache: Path, paths: Paths) -> None:
    put(cache, "m", b"1", paths)
    pool.rmdir()
    assert lookup(pool, "m", cache) == lookup(cache, "m")
    assert select(pool, "", "micro", "", cache).name == "m"
    with pytest.raises(HostFault, match="does not exist"):
        lookup(pool, "m")


def test_listing_an_empty_pool_starts_no_process(pool: Path, paths: Paths) -> None:
    assert listing(pool) == []
    assert store.sweep(pool, paths) == []
    assert os.listdir(pool) == []  # noqa: PTH208
