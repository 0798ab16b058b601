"""The follower: each line once, over restarts, kills, full disks and hanging sinks."""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from patience import eventually
from vtorque_core.api import JobAttempt, Paths, kept_records
from vtorque_core.config import plugins as site_plugins
from vtorque_joblog import follower, outlets
from vtorque_joblog.api import GROUP
from vtorque_joblog.follower import FollowerLoop, serve
from vtorque_joblog.node import Follower
from vtorque_joblog.outlets import JobLog, SinkThread
from vtorque_joblog.plugin import Settings
from vtorque_joblog.saved_offsets import SavedOffsets

pytestmark = pytest.mark.e2e


class LoggedJob:
    """A log as written by the core, and the journal of its job."""

    def __init__(self, paths, name="42.srv"):
        self.place = kept_records.place(paths, JobAttempt(name, 0, "u", os.getuid()))
        self.name = name
        self.journal = paths.journal / f"{self.place.key}.jsonl"
        self.journal.touch()
        self.file = self.place.append("log.jsonl")

    def say(self, message, level="INFO"):
        entry = {"t": 1790000000.5, "level": level, "logger": "vtorque_core.node.start.boot",
                 "plugin": "core", "phase": "boot", "guest": None, "node": "n1", "job": self.name,
                 "message": str(message)}  # fmt: skip
        os.write(self.file, json.dumps(entry).encode() + b"\n")

    def end(self, message="the end"):
        self.say(message)
        os.close(self.file)
        self.journal.unlink()

    @property
    def log(self):
        return JobLog(os.getuid(), self.place.key, self.place.directory / "log.jsonl")


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    found = Paths(tmp_path / "state", tmp_path / "run")
    for directory in (found.state, found.run, found.journal, found.kept):
        directory.mkdir(mode=0o711)
    return found


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "v.toml"
    path.write_text(f'[plugin.joblog]\nfile = "{tmp_path}/all.jsonl"\n')
    return path


@pytest.fixture
def process(paths, config):
    found = Follower.for_node(paths, config)
    yield found
    pids = {holder(found)}
    for journal in paths.journal.iterdir():  # otherwise it waits for further output of a job
        journal.unlink()
    found.release()
    eventually(lambda: not any(pid and Path(f"/proc/{pid}/exe").exists() for pid in pids))


def holder(process):
    try:
        with Path(process.lock).open("rb+") as lock:
            return process._holder(lock.fileno())
    except FileNotFoundError:
        return None


def lines(path):
    """Return the complete lines of a file that is being written; none if it does not exist."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def messages(path):
    return [json.loads(line)["message"] for line in lines(path)]


def has_messages(path, *texts):
    return lambda: messages(path) == [*texts]


# -- The process -----------------------------------------------------------------------------------


def test_lines_are_sent_while_jobs_run_and_after_the_last_has_ended(paths, process, tmp_path):
    job, sink = LoggedJob(paths), tmp_path / "all.jsonl"
    job.say("before it")
    process.create()
    eventually(has_messages(sink, "before it"))
    job.say("boots")
    eventually(has_messages(sink, "before it", "boots"))
    job.say("only its user has asked for this", "DEBUG")
    process.release()  # it is in the teardown of the last job
    job.end()
    eventually(has_messages(sink, "before it", "boots", "the end"))
    assert (paths.state / "joblog").stat().st_mode & 0o077 == 0
    assert (paths.state / "joblog" / "file").stat().st_mode & 0o077 == 0
    assert (paths.state / "joblog.log").read_text() == ""


def test_release_does_not_wait_for_the_follower(paths, process):
    """Neither the release nor the next start waits for a stopped (SIGSTOP) follower."""
    job = LoggedJob(paths)
    process.create()
    pid = holder(process)
    os.kill(pid, signal.SIGSTOP)
    process.release()
    assert Path(f"/proc/{pid}/exe").exists(), "the release has ended the stopped follower"
    process.create()
    assert not process.is_lost() and holder(process) != pid
    os.kill(pid, signal.SIGCONT)
    job.end()


def test_job_that_ended_before_the_follower_started_is_sent(paths, process, tmp_path):
    job = LoggedJob(paths)
    process.create()
    process.release()
    job.end()
    eventually(has_messages(tmp_path / "all.jsonl", "the end"))


def test_restarts_neither_lose_nor_repeat_lines(paths, process, tmp_path):
    """The next follower starts while the previous one sends its remaining lines."""
    job, sink = LoggedJob(paths), tmp_path / "all.jsonl"
    process.create()
    for number in range(40):
        job.say(number)
        if number % 8 == 7:
            process.release()
            job.say(f"{number} between")
            process.create()
    job.end()
    wanted = [m for n in range(40) for m in ([n, f"{n} between"] if n % 8 == 7 else [n])]
    eventually(lambda: sink.exists() and "the end" in sink.read_text())
    assert messages(sink) == [*map(str, wanted), "the end"]


def test_kills_neither_lose_nor_repeat_lines(paths, process, tmp_path):
    jobs, sink = [LoggedJob(paths), LoggedJob(paths, "43.srv")], tmp_path / "all.jsonl"
    said = []
    for number in range(600):
        if number % 100 == 0:
            if holder(process):
                os.kill(holder(process), signal.SIGKILL)
                eventually(process.is_lost)
            process.create()
            eventually(lambda: sink.exists() and len(messages(sink)) > 0 if said else True)
        for job in jobs:
            said.append(f"{job.name} {number}")
            job.say(said[-1])
        if number % 100 > 60:
            time.sleep(0.0005)  # so that the kill hits it at work
    eventually(lambda: len(messages(sink)) >= len(said))
    found = messages(sink)
    assert len(found) == len(set(found)), "lines were sent twice"
    for job in jobs:
        assert [m for m in found if m.startswith(job.name)] == [
            m for m in said if m.startswith(job.name)
        ]


def test_log_of_a_refused_job_is_sent_with_the_next_job(paths, process, tmp_path):
    sink = tmp_path / "all.jsonl"
    first = LoggedJob(paths)
    process.create()
    first.end("one")
    eventually(has_messages(sink, "one"))
    process.release()
    LoggedJob(paths, "43.srv").end("refused")  # no follower
    job = LoggedJob(paths, "44.srv")
    job.say("two")
    process.create()
    eventually(lambda: sorted(messages(sink)) == ["one", "refused", "two"])


def test_new_sink_does_not_get_logs_of_old_jobs(paths, process, tmp_path):
    old = LoggedJob(paths, "41.srv")
    old.end("long ago")
    os.utime(old.log.path, (1e9, 1e9))
    job = LoggedJob(paths)
    job.say("now")
    process.create()
    eventually(has_messages(tmp_path / "all.jsonl", "now"))


def test_broken_config_is_logged_and_ends_the_follower(paths, process, config):
    config.write_text("[plugin.joblog]\nsyslog = 'loud'\n")
    process.create()
    eventually(process.is_lost)
    assert "write one of kern, user" in (paths.state / "joblog.log").read_text()


# -- Slow, broken and full sinks -------------------------------------------------------------------


class Keeps(logging.Handler):
    """Keeps the records; raises the errors that it is given."""

    def __init__(self, *raises):
        super().__init__()
        self.raises = list(raises)
        self.got = []

    def emit(self, record):
        if self.raises:
            try:
                raise self.raises.pop(0)
            except Exception:
                self.handleError(record)
                return
        self.got.append(record.entry["message"])


class HangingSink(logging.Handler):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def emit(self, record):
        self.go.wait()


@pytest.fixture
def follow_logs(paths, monkeypatch):
    """Return a function that follows with some handlers, in a thread, until the test's end."""
    (paths.state / "joblog").mkdir()
    monkeypatch.setattr(follower, "END", 0.5)
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    ends, threads, loops = [], [], []

    def start(*handlers):
        opened = [
            SinkThread(f"s{n}", lambda h=h: h, SavedOffsets(paths.state / "joblog" / f"s{n}"),
                   lambda: os.eventfd_write(wake, 1)) for n, h in enumerate(handlers)
        ]  # fmt: skip
        loop = FollowerLoop(paths, opened)
        run = threading.Thread(target=serve, args=(loop, wake, lambda: bool(ends)))
        run.start()
        threads.append(run)
        loops.append(loop)
        return loop

    def stop():
        ends.append(True)
        os.eventfd_write(wake, 1)
        for each in threads:
            each.join(180)
            assert not each.is_alive()

    start.stop = stop
    yield start
    if not ends:
        stop()
    for outlet in [each for loop in loops for each in loop.outlets]:
        outlet.close(time.monotonic() + 30)
    for loop in loops:
        os.close(loop.events)
    os.close(wake)


def test_hanging_sink_does_not_delay_other_sinks(paths, follow_logs):
    job, hangs, keeps = LoggedJob(paths), HangingSink(), Keeps()
    follow_logs(hangs, keeps)
    for number in range(50):
        job.say(number)
    eventually(lambda: keeps.got == [str(n) for n in range(50)])
    job.end()
    follow_logs.stop()
    assert keeps.got[-1] == "the end"
    delivered = SavedOffsets(paths.state / "joblog" / "s0").offset_of(job.log.name)
    hangs.go.set()
    assert delivered == 0, "undelivered lines are recorded as delivered"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("refused")])
def test_sink_with_a_full_disk_gets_all_lines_later(paths, follow_logs, monkeypatch, caplog, error):
    caplog.set_level("INFO", "joblog")
    monkeypatch.setattr(outlets, "_FIRST_PAUSE", 0.01)
    job, keeps = LoggedJob(paths), Keeps(error, error, error)
    job.say("one")
    follow_logs(keeps)
    job.say("two")
    eventually(lambda: keeps.got == ["one", "two"])
    job.end()
    eventually(lambda: keeps.got == ["one", "two", "the end"])
    said = [f"sink s0: OSError: {error}", "sink s0 works again"]
    eventually(lambda: [r.message for r in caplog.records if r.name == "joblog"] == said)


def test_line_that_a_sink_rejects_is_skipped(paths, follow_logs, caplog):
    job, keeps = LoggedJob(paths), Keeps(RuntimeError("a defect"))
    job.say("one")
    os.write(job.file, b"torn\n\n[]\n{}\n")
    job.say("two")
    follow_logs(keeps)
    eventually(lambda: keeps.got == ["two"])
    assert "sink s0: RuntimeError: a defect; one line is lost" in caplog.text


def test_partial_line_is_sent_when_complete(paths, follow_logs):
    job, keeps = LoggedJob(paths), Keeps()
    job.say("one")
    whole = job.log.path.read_bytes()
    follow_logs(keeps)
    eventually(lambda: keeps.got == ["one"])
    os.write(job.file, whole[:20])
    os.write(job.file, whole[20:])
    eventually(lambda: keeps.got == ["one", "one"])


def test_torn_line_is_not_read_again(paths, follow_logs, monkeypatch):
    job, keeps, looked = LoggedJob(paths), Keeps(), []
    os.write(job.file, b'{"torn by a full disk')
    tell = SinkThread._deliver
    monkeypatch.setattr(
        SinkThread, "_deliver", lambda self, log: (looked.append(log), tell(self, log))
    )
    follow_logs(keeps)
    eventually(lambda: looked)
    other = LoggedJob(paths, "43.srv")
    for number in range(20):
        other.say(number)
    eventually(lambda: len(keeps.got) == 20)
    # a second time if it was replaced while it was read
    assert [log.key for log in looked].count(job.log.key) <= 2


# -- Positions -------------------------------------------------------------------------------------


def test_positions_survive_a_torn_line_and_a_full_disk(tmp_path, monkeypatch, caplog):
    told = SavedOffsets(tmp_path / "x")
    assert told.is_new
    told.keep(())
    told.mark("1/a", 100)
    told.mark("1/b", 7)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
        told.mark("1/a", 2000)
        told.mark("1/a", 3000)
    again = SavedOffsets(tmp_path / "x")
    assert (again.is_new, again.offset_of("1/a"), again.offset_of("1/b")) == (False, 100, 7)
    assert caplog.text.count("No space left") == 1
    told.mark("1/b", 8)
    assert (
        SavedOffsets(tmp_path / "x").offset_of("1/a"),
        SavedOffsets(tmp_path / "x").offset_of("1/b"),
    ) == (3000, 8)
    again = SavedOffsets(tmp_path / "x")
    again.keep({"1/a"})
    assert SavedOffsets(tmp_path / "x").offset_of("1/b") == 0


def test_positions_stay_small(tmp_path):
    told = SavedOffsets(tmp_path / "x")
    for number in range(100_000):
        told.mark("1000/42.srv.0", number)
    assert (tmp_path / "x").stat().st_size < 1.1 * (1 << 20)
    assert SavedOffsets(tmp_path / "x").offset_of("1000/42.srv.0") == 99_999


# -- Other authors' sinks --------------------------------------------------------------------------


def test_file_sink_continues_when_the_sinks_process_is_killed(paths, process, config, tmp_path):
    config.write_text(config.read_text() + 'sinks = ["nowhere"]\n')
    job, sink = LoggedJob(paths), tmp_path / "all.jsonl"
    process.create()
    said = [str(number) for number in range(20)]
    for number in said:
        job.say(number)
        eventually(lambda n=number: messages(sink)[-1:] == [n])
        for pid in children(holder(process), "vtorque_joblog.sinks_process"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job.end()
    process.release()
    eventually(has_messages(sink, *said, "the end"))
    assert SavedOffsets(paths.state / "joblog" / "nowhere").offset_of(job.log.name) == 0


def test_unknown_sink_is_reported(paths, process, config):
    config.write_text('[plugin.joblog]\nsinks = ["nowhere"]\n')
    LoggedJob(paths).say("one")
    process.create()
    words = (
        "sink nowhere: ConfigError: no installed distribution provides 'nowhere' in "
        f"{GROUP}; available: none"
    )
    said = paths.state / "joblog.log"
    eventually(lambda: said.exists() and words in said.read_text())


def test_sinks_process_ends_with_a_killed_follower(paths, process, config):
    config.write_text("[plugin.joblog]\njournald = true\n")
    LoggedJob(paths).say("one")
    process.create()
    found = []
    eventually(lambda: found or found.extend(children(holder(process), "sinks_process")))
    uid = Settings().uid if os.geteuid() == 0 else os.geteuid()
    (of_it,) = (Path(f"/proc/{pid}") for pid in found)
    eventually(lambda: f"Uid:\t{uid}\t" in (of_it / "status").read_text())
    os.kill(found[0], signal.SIGSTOP)  # it sees no end of the data
    os.kill(holder(process), signal.SIGKILL)
    eventually(lambda: not (of_it / "exe").exists())


def children(pid, word):
    """Return child processes with a word in their command."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in path.read_text().split():
                if word in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    return found


@pytest.mark.parametrize("disable", [(), ("joblog",)])
def test_joblog_loads_without_other_plugins_and_can_be_disabled(disable):
    found = site_plugins.Plugins.load(node=True, enable=("joblog",), disable=disable)
    assert found.broken == {}
    assert found.names == (("core",) if disable else ("core", "joblog"))
