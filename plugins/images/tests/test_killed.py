"""SIGKILL before every change that a command makes to the disk: the pool has the old image or the
new one, complete, and the next command removes all leftovers of the killed one.

The points are not listed anywhere: Python's audit events report each call that changes a file
(PEP 578, "Audit events table" of the library reference), and a child is killed before the n-th.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from added_disks import KNOWN, QuietProgress, add
from programs import fake_program
from reachable import reachable
from vtorque_cluster import sync
from vtorque_cluster.cache import ImagePlaces
from vtorque_core.api import Image, JobAttempt, Paths, Refused, confined_tool
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.base.locks import job_lock
from vtorque_core.live.images import BrokenImage, Plugins, describe, listing, lookup, store
from vtorque_core.node.end.teardown import release_job
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_core.resources.lease import ImageUse
from vtorque_images import change

pytestmark = pytest.mark.e2e

CHANGES = {
    *("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "os.chown", "os.truncate"),
    *("subprocess.Popen", "os.posix_spawn"),
}
BUILT = BuiltImage("linux", "micro", "x86_64", 64, kernel="k", initrd="i")
_WRITING = os.O_WRONLY | os.O_RDWR
MOST = 400  # points of one command


def usable(pool: Path) -> list[Image]:
    return [lookup(pool, item.name) for item in listing(pool) if not isinstance(item, BrokenImage)]


@dataclass
class PoolSite:
    """A pool, a cache, and a node's directories."""

    top: Path

    def __post_init__(self) -> None:
        self.pool, self.cache = self.top / "pool", self.top / "cache"
        self.paths = Paths(self.top / "state", self.top / "run")
        for path in (self.pool, self.cache):
            path.mkdir(mode=0o755, parents=True)

    def put(self, name: str, kernel: bytes, pool: Path | None = None) -> str:
        pool = pool or self.pool
        with store.staging(pool, self.paths) as staging:
            (staging / "k").write_bytes(kernel)
            (staging / "i").write_bytes(b"initrd")
            options = change.CommitOptions(self.paths)
            return change.commit(pool, name, staging, BUILT, "t", options=options).sha256

    def use(self, name: str) -> None:
        kernel = lookup(self.pool, name).kernel
        assert kernel is not None
        header = JobHeader(JobAttempt("1", 0, "u", 1), "local")
        with job_lock(self.paths, "1"), Journal.start(self.paths, header) as journal:
            journal.acquire(ImageUse(str(kernel.parent)), plugin="core", phase="pre-boot")

    def end(self) -> None:
        for report in release_job(self.paths, "1", plugins_for=lambda _: Plugins(), deadline=20):
            assert report.clean, report.lines()

    def there(self) -> dict[str, str]:
        """Return the content of every image of the pool, after hashing it."""
        found = listing(self.pool)
        assert not [item for item in found if isinstance(item, BrokenImage)]
        return {item.name: change.verify(self.pool, item.name).sha256 for item in found}

    def next_command(self) -> None:
        """Run another command on the pool, as an admin would later."""
        for note in self.top.glob("*/*/*.old"):
            note.write_text("0")
        self.put("next", b"next")
        change.remove(self.pool, "next", paths=self.paths)

    def leftovers(self, pool: Path) -> list[str]:
        """Return the pool's files and directories that belong to no complete image."""
        wanted = set()
        for image in usable(pool):
            assert image.disk is not None or image.kernel is not None
            files = [f for f in (image.disk, image.kernel, image.initrd) if f is not None]
            home = pool / image.name
            wanted |= {home, home / "image.json", files[0].parent, *files}
        return sorted(str(p.relative_to(pool)) for p in {*pool.rglob("*")} - wanted)


def killed_before(number: int, work: Callable[[], object], *, forks: bool = False) -> bool:
    """Run work in a child that is killed before its n-th change; return whether it got there.

    ``forks``: a child process of it may be killed instead, and reports that.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
            if event in CHANGES or writes:
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        code = 1
        try:
            sys.addaudithook(hook)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    code = os.waitstatus_to_exitcode(status)
    assert code == 0 or (forks and code == 1)
    return code == 1


@pytest.fixture(params=[17, pytest.param(1, marks=pytest.mark.full)], ids=["some", "each"])
def points(request: pytest.FixtureRequest) -> range:
    """Return the changes before which to kill: with --full each, otherwise each 17th."""
    return range(0, MOST, request.param)


def at_points(
    points: range,
    tmp_path: Path,
    prepare: Callable[[PoolSite], object],
    work: Callable[[PoolSite], object],
    good: Callable[[PoolSite], object],
) -> int:
    """Kill ``work`` at each point; ``good`` checks the state. Return the last point's number."""
    for number in points:
        site = PoolSite(tmp_path / str(number))
        prepare(site)
        got_there = killed_before(number, lambda at=site: work(at))  # type: ignore[misc]
        good(site)
        site.next_command()
        good(site)
        assert site.leftovers(site.pool) == [], f"killed before change {number}"
        if not got_there:
            return number
    raise AssertionError("the work never finished")


def one_of(*states: dict[str, bytes]) -> Callable[[PoolSite], None]:
    """Check that the pool is in one of some states, given as name to kernel."""

    def check(site: PoolSite) -> None:
        kernels = {}
        site.there()
        for image in usable(site.pool):
            assert image.kernel is not None
            kernels[image.name] = image.kernel.read_bytes()
        assert kernels in states

    return check


@pytest.mark.parametrize("there", ["other", "m"], ids=["new-image", "new-version"])
def test_killed_put_leaves_a_valid_pool(tmp_path: Path, points: range, there: str) -> None:
    last = at_points(
        points,
        tmp_path,
        lambda site: site.put(there, b"1"),
        lambda site: site.put("m", b"2"),
        one_of({there: b"1"}, {there: b"1", "m": b"2"}),
    )
    assert last > 12


def test_killed_return_to_an_old_version_leaves_a_valid_pool(tmp_path: Path, points: range) -> None:
    def prepare(site: PoolSite) -> None:
        site.put("m", b"1")
        site.put("m", b"2")

    at_points(
        points,
        tmp_path,
        prepare,
        lambda site: site.put("m", b"1"),
        one_of({"m": b"1"}, {"m": b"2"}),
    )


def test_killed_repair_never_marks_a_damaged_image_valid(tmp_path: Path, points: range) -> None:
    """The new files replace the old ones one by one: a partial repair is never accepted."""

    def prepare(site: PoolSite) -> None:
        site.put("m", b"1")
        kernel = lookup(site.pool, "m").kernel
        assert kernel is not None
        kernel.write_bytes(b"damaged")

    def good(site: PoolSite) -> None:
        for item in usable(site.pool):
            assert item.kernel is not None
            assert item.kernel.read_bytes() == b"1"
            change.verify(site.pool, item.name)

    for number in points:
        site = PoolSite(tmp_path / str(number))
        prepare(site)
        got_there = killed_before(number, lambda at=site: at.put("m", b"1"))  # type: ignore[misc]
        good(site)
        site.put("m", b"1")
        one_of({"m": b"1"})(site)
        assert site.leftovers(site.pool) == []
        if not got_there:
            return
    raise AssertionError("the work never finished")


def test_killed_removal_leaves_a_valid_pool(tmp_path: Path, points: range) -> None:
    at_points(
        points,
        tmp_path,
        lambda site: site.put("m", b"1"),
        lambda site: change.remove(site.pool, "m", paths=site.paths),
        one_of({"m": b"1"}, {}),
    )


def test_killed_removal_when_free_leaves_a_valid_pool(tmp_path: Path, points: range) -> None:
    def prepare(site: PoolSite) -> None:
        site.put("m", b"1")
        site.use("m")

    def work(site: PoolSite) -> None:
        change.remove(site.pool, "m", paths=site.paths, when_free=True, keep=1)

    for number in points:
        site = PoolSite(tmp_path / str(number))
        prepare(site)
        got_there = killed_before(number, lambda at=site: work(at))  # type: ignore[misc]
        one_of({"m": b"1"}, {})(site)
        assert next(site.pool.glob("m/v*/k")).read_bytes() == b"1", (
            "the version of a running job was removed"
        )
        site.next_command()
        assert next(site.pool.glob("m/v*/k")).read_bytes() == b"1", (
            "the version of a running job was removed"
        )
        site.end()
        site.next_command()
        assert site.leftovers(site.pool) == []
        if not got_there:
            assert list(site.pool.iterdir()) == []
            return
    raise AssertionError("the work never finished")


def test_killed_release_by_the_last_job_leaves_a_valid_pool(tmp_path: Path, points: range) -> None:
    """The epilogue removes an old version, is killed while doing so, and runs again."""

    def prepare(site: PoolSite) -> None:
        site.put("m", b"1")
        site.use("m")
        site.put("m", b"2")
        for note in site.pool.glob("*/*.old"):
            note.write_text("0")

    for number in points:
        site = PoolSite(tmp_path / str(number))
        prepare(site)
        got_there = killed_before(number, site.end, forks=True)
        one_of({"m": b"2"})(site)
        site.end()
        site.next_command()
        assert site.leftovers(site.pool) == []
        if not got_there:
            return
    raise AssertionError("the work never finished")


def test_killed_label_and_verify_leave_a_valid_pool(tmp_path: Path, points: range) -> None:
    def work(site: PoolSite) -> None:
        change.label(site.pool, "m", {"a": "b"}, site.paths)
        change.verify(site.pool, "m")

    at_points(points, tmp_path, lambda site: site.put("m", b"1"), work, one_of({"m": b"1"}))


def test_killed_sync_leaves_a_valid_cache(tmp_path: Path, points: range) -> None:
    """Copied files stay and are used; the cache never has an incomplete image."""

    def prepare(site: PoolSite) -> None:
        site.put("m", b"1", site.cache)
        site.put("gone", b"g", site.cache)
        site.put("m", b"2" * 100_000)
        site.put("n", b"n")
        send(site)

    def places(site: PoolSite) -> ImagePlaces:
        return ImagePlaces(site.pool, site.cache, site.paths)

    def send(site: PoolSite) -> None:
        text = '#!/bin/sh\nshift 3\nexec sh -c "$*"\n'  # -o BatchMode=yes NODE
        ssh = fake_program(site.top / "ssh", text)
        sync.push(places(site), (), "n1", str(ssh))

    def take(site: PoolSite) -> sync.SyncResult:
        return sync.receive(places(site), ("m", "n"), only=True)

    def again(site: PoolSite) -> None:
        send(site)
        take(site)

    for number in points:
        site = PoolSite(tmp_path / str(number))
        prepare(site)
        got_there = killed_before(number, lambda at=site: take(at))  # type: ignore[misc]
        for image in usable(site.cache):
            change.verify(site.cache, image.name)
        assert lookup(site.pool, "m", site.cache).sha256 == site.there()["m"]
        again(site)
        for note in site.cache.glob("*/*.old"):
            note.write_text("0")
        again(site)
        assert [i.name for i in usable(site.cache)] == ["m", "n"]
        assert lookup(site.pool, "m", site.cache).kernel == (
            site.cache / "m" / describe(site.pool, "m").version / "k"
        )
        assert site.leftovers(site.cache) == [".partial"]
        if not got_there:
            return
    raise AssertionError("the work never finished")


def disk(path: Path) -> Path:
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"]
    subprocess.run(argv, check=True, timeout=180)
    return path


def test_killed_add_and_update_leave_a_valid_pool(tmp_path: Path, points: range) -> None:
    """With the real tools."""
    file = disk(tmp_path / "disk")

    def work(site: PoolSite) -> None:
        add(site.pool, "m", file, KNOWN, QuietProgress(), paths=site.paths, update=True)

    def good(site: PoolSite) -> None:
        assert set(site.there()) == {"m"}

    last = at_points(points, tmp_path, lambda site: site.put("m", b"1"), work, good)
    assert last > 20


def test_tool_is_killed_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL during a conversion: qemu-img does not continue to write."""
    site = PoolSite(tmp_path / "site")
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "qemu-img"
    tool.write_text("#!/bin/sh\nexec sleep 1000.25\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    monkeypatch.setattr(confined_tool, "_PATH", f"{tools}:{confined_tool._PATH}")
    reachable(tool)  # accessible to nobody's processes
    file = disk(tmp_path / "disk")
    child = os.fork()
    if child == 0:
        try:
            add(site.pool, "m", file, KNOWN, QuietProgress())
        finally:
            os._exit(1)
    _until(lambda: _sleeping() == 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _until(lambda: _sleeping() == 0)
    site.next_command()
    assert list(site.pool.iterdir()) == []
    with pytest.raises(Refused):
        lookup(site.pool, "m")


def _sleeping() -> int:
    found = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += process.read_bytes() == b"sleep\0" + b"1000.25\0"
        except OSError:
            continue
    return found


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
