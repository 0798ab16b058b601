"""Jobs that are checkpointed and restored as another job, with real guests."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import writing
from vtorque_core.resources import virtiofs_daemon

pytestmark = pytest.mark.e2e

saves = pytest.mark.skipif(
    not virtiofs_daemon.can_save(), reason="needs Debian 13: scripts/test --full debian13"
)
refuses = pytest.mark.skipif(
    virtiofs_daemon.can_save(), reason="needs Debian 12, whose virtiofsd cannot save its state"
)


@pytest.fixture
def place(node, scratch, config):
    config("plugin.survive", f'checkpoints = "{scratch}"')
    yield scratch
    shutil.rmtree(node.state / "survive", ignore_errors=True)


@pytest.fixture
def disk(guest):
    """A disk file of the user's: an ext4 file system."""
    path = guest.home / "data.raw"
    guest.as_user("/usr/bin/truncate", "-s", "64M", str(path))
    guest.as_user("/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", str(path))
    return path


@pytest.fixture
def writer(guest, place, config, disk):
    """A job of two guests with everything that may be lost: files, a pipe, a connection, a disk."""
    scripts = guest.config.parent / "in-guests"
    scripts.mkdir(mode=0o755)
    (scripts / "echoes").write_text(writing.ECHOES)
    config("plugin.linux-guest", f'prologue = "{scripts}"')
    asked = f"ram=384M,vms_per_node=2,disk={disk}"
    yield Writer(guest, asked, echoes=writing.OTHER_GUEST, also="/data/also")
    shutil.rmtree(scripts)


class Writer:
    """A job that writes in its guest; ``names`` are those of the jobs that it continued."""

    def __init__(self, node, asked="ram=384M", **words):
        self.node, self.names, self.id = node, [], ""
        self.asked = ("-vm", asked)
        self.text, self.memory = writing.script(**words), writing.give(node.home)

    def submit(self, *args, user=None):
        name = f"n{len(self.names)}"
        self.names.append(name)
        script = self.node.script(self.text)
        more = (*self.asked, "-N", name, "-o", f"{name}.out", "-e", f"{name}.err")
        self.id = self.node.as_user("vsub", *more, *args, script).stdout.decode().strip()
        return self

    @property
    def counted(self):
        return len(self.lines("counted"))

    def lines(self, name):
        file = self.node.home / name
        return file.read_text().split() if file.exists() else []

    def await_more(self, than=0):
        self.node.wait_for(lambda: self.counted > than, what=f"more than {than} lines")
        return self

    def checkpoint(self, *words, **more):
        return self.node.as_user("vmgr", "checkpoint", *(words or ("--stop",)), self.id, **more)

    def kept(self):
        """Save the job and return the checkpoint; the job continues."""
        name = self.node.as_user("vmgr", "checkpoint", self.id).stdout.decode().strip()
        assert self.node.state_of(self.id) is not None
        return name

    def saved(self):
        """Save it, and return the checkpoint when the job has ended."""
        name = self.checkpoint().stdout.decode().strip()
        log = self.ended()
        assert f"saved as checkpoint {name}" in log, log
        return name

    def ended(self):
        self.node.wait_for(lambda: self.node.state_of(self.id) is None, what="the job's end")
        return self.node.as_user("vmgr", "logs", self.id).stdout.decode()

    def check(self):
        """Let the job continue and end; check that no line was lost or duplicated."""
        self.await_more(self.counted + 5)
        self.node.script("", "enough")
        log = self.ended()
        errors = [(self.node.home / f"{name}.err").read_text() for name in self.names]
        counted = self.lines("counted")
        assert counted == [str(number) for number in range(1, len(counted) + 1)], (errors, log)
        said = [line for name in self.names for line in self.lines(f"{name}.out")]
        assert said == writing.expected_output(counted, self.memory), (errors, log)
        ended = self.node.home / "ended"
        late = ended.stat().st_mtime - int(ended.read_text())  # date prints whole seconds
        assert -1 <= late <= 2, "the guest's clock is wrong"
        assert all("the job was saved and ends now" in each for each in errors[:-1])


@saves
def test_checkpointed_job_is_restored_as_another_job(writer, guest, place, disk):
    """If the disk file has changed, the restore is refused, and can be repeated."""
    writer.submit().await_more()
    said = guest.as_user("vmgr", "checkpoint", writer.id, check=False)
    assert said.returncode != 0 and b"a job with disk= can only be saved with" in said.stderr
    resume = ("-vm", f"resume={writer.saved()}")
    assert all(path.stat().st_uid == 0 for path in place.rglob("*"))
    denied = guest.as_user("/bin/ls", str(place / str(place.stat().st_uid)), check=False)
    assert denied.returncode != 0
    was = disk.stat()
    os.utime(disk)
    changed = guest.job("true", *writer.asked, *resume)
    assert changed.code == 121 and b"was changed or replaced" in changed.err, changed.err
    os.utime(disk, ns=(was.st_atime_ns, was.st_mtime_ns))
    writer.submit(*resume).check()


def checkpoint_repeatedly(job, times):
    names = []
    for _ in range(times):
        job.await_more(job.counted + random.randrange(1, 20))  # noqa: S311
        names.append(job.kept())
    job.check()
    assert len({*names}) == times
    return names


@saves
def test_restored_job_can_be_restored_again_from_the_same_checkpoint(guest, place):
    """The guest's memory is reset to the checkpoint; the user's files are not."""
    job = Writer(guest).submit().await_more()
    (name,) = checkpoint_repeatedly(job, 1)
    first, at = job.lines("counted"), job.counted
    listed = json.loads(guest.as_user("vmgr", "checkpoints", "--json").stdout)
    assert [(each["id"], each["job"]) for each in listed] == [(name, job.id)]
    (guest.home / "enough").unlink()
    job.submit("-vm", f"resume={name}").await_more(at + 5)
    guest.script("", "enough")
    log = job.ended()
    later = job.lines("counted")[at:]
    assert later == [str(int(later[0]) + number) for number in range(len(later))], log
    assert later[0] in first[1:], "the job was not restored from the checkpoint"
    said = job.lines("n1.out")
    assert said == [*later, *job.lines("also"), *job.memory], log


@saves
def test_user_removes_a_checkpoint(guest, place):
    job = Writer(guest).submit().await_more()
    name = job.kept()
    other = guest.as_user("vmgr", "checkpoints", "remove", name, user="vte2e2", check=False)
    assert other.returncode != 0 and b"you have no checkpoint" in other.stderr
    guest.as_user("vmgr", "checkpoints", "remove", name)
    assert not any(path.is_file() for path in place.glob("*/**/*"))
    assert json.loads(guest.as_user("vmgr", "checkpoints", "--json").stdout) == []
    job.check()


@saves
def test_job_with_checkpoint_every_is_saved_periodically(guest, place, config):
    config("plugin.survive", "min_checkpoint_interval = 5\nkept_checkpoints = 1")
    job = Writer(guest).submit("-vm", "checkpoint=every:5s").await_more()
    guest.wait_for(
        lambda: guest.as_user("vmgr", "logs", job.id).stdout.count(b"saved as checkpoint") > 1,
        what="saved twice",
    )
    job.check()
    log = guest.as_user("vmgr", "logs", job.id).stdout.decode()
    made = re.findall(r"saved as checkpoint (\S+); the job continues", log)
    assert len(made) > 1, log
    listed = json.loads(guest.as_user("vmgr", "checkpoints", "--json").stdout)
    assert [each["id"] for each in listed] == made[-1:]


@saves
def test_job_is_saved_before_its_walltime_ends(guest, place, config):
    config("plugin.survive", "checkpoint_before_end = 40")
    job = Writer(guest)
    log = job.submit("-vm", "checkpoint=before-walltime", "-l", "walltime=60").ended()
    (name,) = re.findall(r"saved as checkpoint (\S+); the job ends", log)
    job.submit("-vm", f"resume={name}").check()


@saves
@pytest.mark.full
@pytest.mark.releases
def test_running_job_is_saved_twenty_times(guest, place):
    checkpoint_repeatedly(Writer(guest).submit(), 20)


@saves
def test_checkpoint_that_does_not_match_the_job_is_refused(guest, place):
    name = Writer(guest).submit().await_more().saved()
    resume = ("-vm", f"resume={name}")
    larger = guest.job("true", *resume, "-vm", "ram=512M")
    assert larger.code == 121 and b"memory in KiB is 393216, not 524288" in larger.err, larger.err
    (manifest,) = place.glob(f"*/{name}/manifest.json")
    text = manifest.read_text()
    manifest.write_text(text.replace('"QEMU": "', '"QEMU": "9.'))
    other = guest.job("true", *resume, "-vm", "ram=384M")
    assert other.code == 121 and b"made with QEMU 9." in other.err, other.err
    manifest.write_text(text)
    script = guest.script("true")
    (Path("/home/vte2e2") / script).write_text("true")
    words = ("vsub", "-W", "block=true", "-o", "out", "-e", "err", *resume, script)
    theirs = guest.as_user(*words, user="vte2e2", check=False)
    assert theirs.returncode == 121
    assert f"you have no checkpoint {name}" in Path("/home/vte2e2/err").read_text()
    unknown = guest.job("true", "-vm", "resume=77.vm.0")
    assert unknown.code == 121 and b"you have no checkpoint 77.vm.0" in unknown.err


@saves
def test_job_continues_without_room_for_a_checkpoint(guest, place):
    guest.root("/usr/bin/mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(place))
    try:
        job = Writer(guest).submit().await_more()
        said = job.checkpoint(check=False)
        assert said.returncode != 0 and b"the checkpoint needs up to" in said.stderr, said.stderr
        job.check()
        assert not any(path.is_file() for path in place.glob("*/**/*"))
    finally:
        guest.root("/usr/bin/umount", str(place))


@saves
@pytest.mark.full
@pytest.mark.releases
def test_job_is_saved_and_restored_twenty_times(writer):
    writer.submit()
    for _ in range(20):
        writer.await_more(writer.counted + random.randrange(1, 20))  # noqa: S311
        name = writer.saved()
        writer.submit("-vm", f"resume={name}").await_more(writer.counted)
        writer.node.as_user("vmgr", "checkpoints", "remove", name)
    writer.check()


def children(pid):
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def the_watcher(node):
    """Return its pid, once that of the job before has ended."""

    def found():
        pids = node.root("/usr/bin/pgrep", "-f", "vtorque_survive.watcher", check=False).stdout
        tops = {int(pid) for pid in pids.split()}
        tops -= {child for pid in tops for child in children(pid)}
        return tops.pop() if len(tops) == 1 else None

    return node.wait_for(found, what="the only watcher")


@saves
@pytest.mark.full
@pytest.mark.releases
@pytest.mark.parametrize("stop", [("--stop",), ()], ids=["ends", "continues"])
def test_saving_process_killed_at_any_moment_loses_nothing(guest, place, stop):
    """libvirt completes the request: the job is saved, or runs as before."""
    job, saved = Writer(guest).submit().await_more(), 0
    for seconds in (0.2, 0.5, 0.8, 1.1, 1.4):
        watcher = the_watcher(guest)
        before = set(children(watcher))  # the process that reads guests' messages
        asked = guest.command("vmgr", "checkpoint", *stop, job.id)
        until = time.monotonic() + seconds
        with subprocess.Popen(asked, stdout=subprocess.PIPE) as waits:
            while waits.poll() is None and (
                time.monotonic() < until or not set(children(watcher)) - before
            ):
                time.sleep(0.02)
            for child in set(children(watcher)) - before:
                os.kill(child, signal.SIGKILL)
            name = waits.communicate(timeout=120)[0].decode().strip()
        if waits.returncode == 0:
            if stop:
                job.ended()
                job.submit("-vm", f"resume={name}")
            saved += 1
        job.await_more(job.counted)
    assert saved
    job.check()


@pytest.mark.full
@pytest.mark.releases
@refuses
def test_job_continues_on_a_node_that_cannot_save_it(guest, place):
    job = Writer(guest).submit().await_more()
    said = job.checkpoint(check=False)
    assert said.returncode != 0 and b"this virtiofsd cannot save its state" in said.stderr
    job.check()


@refuses
def test_job_with_the_checkpoint_option_is_refused_by_a_node_that_cannot_save_it(guest, place):
    job = guest.job("true", "-vm", "checkpoint=every:1h")
    assert job.code == 121, job.err
    assert b"with shared directories (this virtiofsd cannot save its state" in job.err, job.err


def test_job_that_cannot_be_saved_is_refused_at_submission(guest, config):
    script = guest.script("true")
    asked = ("vsub", "-vm", "checkpoint=before-walltime")
    without = guest.as_user(*asked, script, check=False)
    assert without.returncode != 0 and b"checkpoints are disabled on this site" in without.stderr
    config("plugin.survive", 'checkpoints = "/srv"')
    shared = guest.as_user(*asked, "-vm", "unclot=true", script, check=False)
    assert shared.returncode != 0 and b"a job with unclot cannot be saved" in shared.stderr
    assert not guest.jobs()


def test_other_user_cannot_save_the_job(guest, place):
    job = Writer(guest).submit().await_more()
    other = job.checkpoint(user="vte2e2", check=False)
    assert other.returncode != 0 and b"belongs to another user" in other.stderr
    job.check()
