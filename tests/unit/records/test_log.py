"""A job's log: what is in it, for whom; neither disk nor sink nor hostile text can hurt."""

import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from acme_card import Card, in_other_process, loaded, starter
from patience import eventually, with_more_time
from vtorque_core import job_log, kept, log, log_read, log_sinks
from vtorque_core.api import hookimpl
from vtorque_core.api_log import LogJob, entry_of, one_line
from vtorque_core.api_options import LOG
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.config import Site, build, parse_toml
from vtorque_core.errors import ConfigError, Refused
from vtorque_core.log_levels import DEBUG, NOTHING, TRACE, WARN, parse
from vtorque_core.log_shown import ShownLog
from vtorque_core.names import Paths
from vtorque_core.plugins import Plugins
from vtorque_core.policy import decide
from vtorque_core.proof import Proof
from vtorque_core.request import Request
from vtorque_core.teardown import teardown

boot = logging.getLogger("vtorque_core.boot")
acme = logging.getLogger("vtorque_acme_fpga.cards")


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    return Paths(tmp_path / "state", tmp_path / "run")


@pytest.fixture(autouse=True)
def syslog(monkeypatch):
    """Have what would go to the host's syslog in a list; no sink counts as broken from before."""
    lines = []
    monkeypatch.setattr(log, "to_syslog", lines.append)
    log_sinks._missed.clear()
    return lines


def a_log(paths, level="INFO", job="42.srv", **more):
    paths.state.mkdir(exist_ok=True)
    handlers = logging.getLogger().handlers  # without pytest's, which stumble over what is bad
    handlers[:] = [each for each in handlers if isinstance(each, log._Handler)]
    return log.Log(paths, job, 0, os.getuid(), "n1", parse(level), **more)


def place(paths, job="42.srv"):
    return kept.place(paths, os.getuid(), job, 0)


def lines(paths, job="42.srv"):
    return [json.loads(line) for line in place(paths, job).read("log.jsonl").splitlines()]


def forked(work):
    os.waitpid(in_other_process(work), 0)


# -- levels ------------------------------------------------------------------------------------


def test_levels_of_components():
    levels = parse("ALL:WARN, vtorque_iocm:TRACE+vtorque_core.boot:debug")
    assert levels.level("vtorque_iocm.manager") == TRACE
    assert levels.level("vtorque_core.boot") == DEBUG
    assert levels.level("vtorque_core.start") == levels.level("vtorque_iocm2") == WARN
    assert parse(str(levels)).of == levels.of
    assert parse("debug").level("anything") == DEBUG
    assert NOTHING.level("anything") > logging.CRITICAL


def test_more_verbose_is_more():
    """So a site's max is the most that a user may ask for, of any component."""
    quiet, warn, one, trace = (parse(t) for t in ("quiet", "warn", "vtorque_x:TRACE", "trace"))
    assert NOTHING == quiet < warn < one == trace


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no log level"),
        (",", "is no log level"),
        ("loud", "the level 'loud': there are trace, debug"),
        ("ALL:", "the level ''"),
        ("urllib3:debug", "the component 'urllib3'"),
        ("vtorque_x:debug,vtorque_x:info", "vtorque_x twice"),
        ("vtorque_" + "x" * 2000 + ":debug", "is no log level"),
        (",".join(f"vtorque_{n}:debug" for n in range(21)), "up to 20"),
        ("vtorque_é:debug", "the component"),
    ],
)
def test_what_is_no_level(text, words):
    with pytest.raises(ValueError, match=r"level|component|twice|up to") as raised:
        parse(text)
    assert words in str(raised.value) and len(str(raised.value)) < 300


# -- records -----------------------------------------------------------------------------------


def test_a_record_says_whose_it_is(paths):
    with log.opened(a_log(paths)) as one:
        one.phase = "boot"
        with log.about(guest=1, plugin="linux-guest"):
            boot.info("%d vCPUs", 4)
        acme.warning("hot", extra={"guest": 0})
        boot.info("all")
        logging.getLogger("urllib3").error("of a library")
        logging.getLogger().error("of nobody")
    first, second, third = lines(paths)
    assert first.pop("t") == pytest.approx(time.time(), abs=60)
    assert first == {
        "level": "INFO", "logger": "vtorque_core.boot", "plugin": "linux-guest", "phase": "boot",
        "guest": 1, "node": "n1", "job": "42.srv", "message": "4 vCPUs",
    }  # fmt: skip
    assert (second["plugin"], second["guest"], second["level"]) == ("acme-fpga", 0, "WARN")
    assert (third["plugin"], third["guest"]) == ("core", None)


def test_site_and_user_each_have_what_they_want(paths):
    with log.opened(a_log(paths, "ALL:WARN,vtorque_acme_fpga:INFO")):
        boot.info("no")
        acme.info("site's")
        acme.debug("no")
        log.ask(parse("vtorque_core.boot:TRACE"))
        boot.log(TRACE, "user's")
        acme.debug("no")
        acme.info("site's again")
    assert [e["message"] for e in lines(paths)] == ["site's", "user's", "site's again"]
    assert [e["level"] for e in lines(paths)] == ["INFO", "TRACE", "INFO"]


def test_an_inner_log_has_all_until_it_ends(paths):
    a_log(paths)
    root = logging.getLogger()
    before = (root.level, list(root.handlers), boot.level)
    with log.opened(a_log(paths)):
        boot.info("one")
        with log.opened(a_log(paths, "debug", job="7.srv")):
            boot.debug("inner")
            with log.opened(a_log(paths, job="7.srv")):
                boot.debug("the same job's")
            boot.debug("still open")
        boot.debug("no")
        boot.info("two")
    assert [e["message"] for e in lines(paths)] == ["one", "two"]
    assert [e["message"] for e in lines(paths, "7.srv")] == [
        "inner",
        "the same job's",
        "still open",
    ]
    assert (root.level, list(root.handlers), boot.level) == before


def test_threads_and_forked_processes_write_to_it(paths):
    with log.opened(a_log(paths)):
        thread = threading.Thread(target=lambda: boot.info("thread"))
        thread.start()
        thread.join()
        forked(lambda: boot.info("child"))
    assert [e["message"] for e in lines(paths)] == ["thread", "child"]


def test_a_process_that_goes_its_own_way_opens_its_own(paths):
    with log.opened(a_log(paths)) as one:
        again = one.again()

        def own_way():
            log.forget()
            boot.info("lost")
            with log.opened(again):
                boot.info("own")

        forked(own_way)
        boot.info("parent")
    assert [e["message"] for e in lines(paths)] == ["own", "parent"]


class Bad:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nline two\0 \u202e \udc80\udcff \x9b31m ü"


def test_hostile_text_is_harmless_and_bounded(paths):
    with log.opened(a_log(paths)):
        boot.info("%s", HOSTILE)
        boot.info("x" * (1 << 20))
        boot.info("\x1b" * (1 << 20))
        boot.info("console", extra={"detail": [HOSTILE, "y" * (1 << 20)] * 100})
        boot.info("%d", "no number")
        boot.info("%s", Bad())
        boot.info(Bad())
        logging.getLogger("vtorque_\x1b[31m" + "n" * 5000).info("name")
    raw = place(paths).read("log.jsonl")
    assert all(len(line) < 64 << 10 for line in raw.splitlines())
    text = raw.decode()  # valid UTF-8
    assert all(c.isprintable() or c == "\n" for c in text)
    found = lines(paths)
    assert found[0]["message"].startswith("\\x1b]0;owned\\x07") and "ü" in found[0]["message"]
    assert "(1048576 characters)" in found[1]["message"]
    assert len(found[3]["detail"]) == log.MAX_DETAIL
    assert "cannot be shown (TypeError): %d" in found[4]["message"]
    for entry in log_read.entries(place(paths)):
        assert all(c.isprintable() or c == "\n" for c in log_read.text(entry))


def test_a_defect_has_its_traceback_and_goes_to_syslog(paths, syslog):
    with log.opened(a_log(paths)):
        try:
            raise ValueError("odd \x1b[31m")
        except ValueError:
            log.defect("42.srv")
    (entry,) = lines(paths)
    assert entry["level"] == "ERROR" and "ValueError: odd \\x1b[31m" in entry["message"]
    assert any("test_a_defect" in line for line in entry["detail"])
    assert len(syslog) == 1 and "ValueError" in syslog[0]
    log.defect("43.srv")  # no log is open: of no known user
    assert syslog[1].startswith("43.srv: ")


# -- the disk ----------------------------------------------------------------------------------


def test_a_full_disk_is_told_once_and_a_torn_line_costs_no_other(paths, syslog, monkeypatch):
    write = os.write
    room = [300]

    def full(descriptor, data):
        done = data[: room[0]]
        room[0] -= len(done)
        return write(descriptor, done)

    with log.opened(a_log(paths)):
        with monkeypatch.context() as patch:
            patch.setattr(log.os, "write", full)
            for _ in range(5):
                boot.info("while it fills")
        boot.info("there is room again")
    assert len(syslog) == 1 and "No space left" in syslog[0]
    found = [e["message"] for e in log_read.entries(place(paths))]
    assert found == ["while it fills", "there is room again"]


def test_a_log_that_cannot_be_opened_is_told_once(paths, syslog):
    paths.state.mkdir()
    paths.kept.write_text("in the way")
    with log.opened(a_log(paths)):
        boot.info("lost")
        boot.info("lost")
    assert len(syslog) == 1 and "log.jsonl" in syslog[0]


def test_a_log_is_bounded(paths):
    with log.opened(a_log(paths)):
        for _ in range(1100):
            boot.info("z" * 4096)
        boot.error("an error")
        logging.getLogger("vtorque_core.timings").info("phases: all")
        for _ in range(100):
            boot.error("e" * 4096)
    assert (place(paths).directory / "log.jsonl").stat().st_size < log.MAX_LOG + log._END + 16384
    found = [e["message"] for e in lines(paths)]
    assert sum("only errors and its end" in m for m in found) == 1
    assert "an error" in found and "phases: all" in found


# -- sinks -------------------------------------------------------------------------------------


class ToFile(logging.Handler):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def emit(self, record):
        with self.path.open("a") as file:
            line = {
                "asked": record.asked,
                "guest": record.guest,
                "line": one_line(entry_of(record)),
            }
            file.write(json.dumps(line | {"message": record.getMessage()}) + "\n")

    def close(self):
        with self.path.open("a") as file:
            file.write('"closed"\n')
        super().close()


class Hangs(logging.Handler):
    def emit(self, record):
        time.sleep(3600)


class HangsAtItsEnd(logging.Handler):
    def emit(self, record):
        pass

    def close(self):
        time.sleep(3600)


class Fails(logging.Handler):
    def emit(self, record):
        raise ConnectionRefusedError("refused\x1b[31m")


class FailsQuietly(logging.Handler):
    """As the standard library's handlers do it."""

    def emit(self, record):
        try:
            raise OSError("disk full")
        except OSError:
            self.handleError(record)


class Dies(logging.Handler):
    def emit(self, record):
        os._exit(3)


def plugins_with(*hooks):
    plugins = Plugins()
    for number, hook in enumerate(hooks):
        module = types.ModuleType(f"sink{number}")
        module.vtorque_log_handlers = hookimpl(hook)
        plugins.register(f"sink{number}", module, "vtorque-sink 1.0")
    return plugins


def with_sinks(paths, plugins, level="INFO"):
    job = LogJob("42.srv", 0, "42.srv.0", "n1", "ada", os.getuid(), Site(), paths.kept)
    one = a_log(paths, level)
    one.sinks = lambda: log_sinks.start(lambda: (plugins, job))
    return one


def test_sinks_get_what_is_logged(paths, tmp_path):
    there = tmp_path / "sink"
    plugins = plugins_with(lambda job: [ToFile(there)])
    assert log_sinks.wanted(plugins) and not log_sinks.wanted(Plugins())
    with log.opened(with_sinks(paths, plugins)):
        boot.info("one", extra={"guest": 1})
        log.ask(parse("debug"))
        boot.debug(HOSTILE)
        forked(lambda: boot.warning("child"))
    *found, last = [json.loads(line) for line in there.read_text().splitlines()]
    assert last == "closed"
    assert [(e["asked"], e["guest"]) for e in found] == [(False, 1), (True, None), (False, None)]
    assert found[0]["line"] == "INFO [- g1] vtorque_core.boot: one"
    assert found[1]["message"].isprintable() and found[2]["message"] == "child"


def raising(job):
    raise RuntimeError("no sink today")


def children():
    """Return the processes that this one has to wait for."""
    found = Path("/proc/self/task").glob("*/children")
    return {pid for text in found for pid in text.read_text().split()}


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda job: [Hangs()], "Hangs of sink0: no end after {own:g} s; 3 records lost"),
        (lambda job: [HangsAtItsEnd()], "HangsAtItsEnd of sink0: no end after {own:g} s; 0 rec"),
        (lambda job: [Fails()], "Fails of sink0: ConnectionRefusedError: refused\\x1b[31m; 3 rec"),
        (lambda job: [FailsQuietly()], "FailsQuietly of sink0: OSError: disk full; 3 records lost"),
        (lambda job: [Dies()], "no answer"),
        (raising, "plugin sink0, vtorque_log_handlers: RuntimeError: no sink today"),
        (lambda job: time.sleep(3600), "vtorque_log_handlers has not returned"),
    ],
    ids=[
        "hangs",
        "hangs at its end",
        "fails",
        "fails quietly",
        "dies",
        "hook raises",
        "hook hangs",
    ],
)
def test_a_bad_sink_costs_a_second_at_most_and_is_told_once(
    paths, tmp_path, syslog, hook, words, monkeypatch
):
    """On a machine that is too busy for a good sink's second, of a longer one."""
    assert log_sinks._OWN_END < log_sinks.END <= 1
    there = tmp_path / "sink"
    plugins = plugins_with(hook, lambda job: [ToFile(there)])
    before = children()

    def attempt(more):
        for name, seconds in (("END", 1.0), ("_OWN_END", 0.8)):
            monkeypatch.setattr(log_sinks, name, more * seconds)
        for text in (there, place(paths).directory / "log.jsonl"):
            text.unlink(missing_ok=True)
        log_sinks._missed.clear()
        syslog.clear()
        try:
            bad_sink(more)
        finally:
            eventually(lambda: log_sinks._reap() or not log_sinks._ended)
        assert children() <= before

    def bad_sink(more):
        said = words.format(own=more * 0.8)
        with log.opened(with_sinks(paths, plugins)):
            begun = time.monotonic()
            for number in range(3):
                boot.info("%d", number)
            assert time.monotonic() - begun < more / 2
            begun = time.monotonic()
        assert time.monotonic() - begun < more * 1.2
        assert [e["message"] for e in lines(paths)][:3] == ["0", "1", "2"]
        (told,) = [e["message"] for e in lines(paths)[3:]]
        assert said in told, told
        assert len(syslog) == 1 and said in syslog[0]
        if "no answer" not in words:
            kept_by_the_other = [json.loads(line) for line in there.read_text().splitlines()]
            assert [e["message"] for e in kept_by_the_other[:3]] == ["0", "1", "2"]

    with_more_time(attempt, 1, 1, 5, 20)


def test_after_a_late_sink_a_process_starts_no_other(paths, syslog):
    with log.opened(with_sinks(paths, plugins_with(lambda job: [Hangs()]))):
        boot.info("x")
    assert log_sinks.start(lambda: None) is None


def test_a_flood_never_waits_for_a_sink(paths, syslog):
    """The socket and the queues are bounded: what does not fit is counted."""
    with log.opened(with_sinks(paths, plugins_with(lambda job: [Hangs()]))):
        used = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(5000):
            boot.info("f" * 1000)
        now = resource.getrusage(resource.RUSAGE_SELF)
        assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 5
    assert any("records lost" in line for line in syslog)


def test_sinks_end_with_a_writer_that_is_killed(paths, tmp_path):
    there = tmp_path / "sink"

    def writer():
        with log.opened(with_sinks(paths, plugins_with(lambda job: [ToFile(there)]))):
            boot.info("last words")
            os.kill(os.getpid(), 9)

    forked(writer)
    eventually(lambda: there.exists() and '"closed"' in there.read_text())
    assert "last words" in there.read_text()


# -- start and end of a job --------------------------------------------------------------------


def test_a_teardown_logs_and_ends_with_all_phases(paths, tmp_path):
    start = starter(paths)
    with start() as journal:
        for name in ("plan", "boot", "run"):
            journal.phase(name)
        journal.phase("ready", guest=0)
        journal.take(Card(str(tmp_path / "card")))
        facts = {"node": "n7", "log": ["ALL:DEBUG", ""], "config": "/nonexistent/vtorque.toml"}
        kept.place(paths, 1000, "42.srv", 0).add_facts(**facts)
    assert teardown(journal.path, paths, loaded()).clean
    found = list(log_read.entries(kept.place(paths, 1000, "42.srv", 0)))
    assert {e["node"] for e in found} == {"n7"}
    assert "1 resources released" in [e["message"] for e in found]
    last = found[-1]
    assert last["logger"] == "vtorque_core.timings"
    for phase in ("plan", "boot", "run", "(guest 0 ready", "teardown", "release"):
        assert f"{phase} " in last["message"]
    assert log_read.ended(kept.place(paths, 1000, "42.srv", 0))


def test_a_teardown_says_what_it_could_not_release(paths, tmp_path):
    with starter(paths)() as journal:
        journal.take(Card(str(tmp_path / "card")))
    (tmp_path / "card.mood").write_text("fail")
    teardown(journal.path, paths, loaded())
    found = list(log_read.entries(kept.place(paths, 1000, "42.srv", 0)))
    assert [e["message"] for e in found if e["level"] == "WARN"] == [
        "42.srv:1 acme-card failed: card is busy (try 1)"
    ]


@pytest.mark.parametrize("known", [{}, {"log": "x"}, {"log": ["loud", 7]}, {"node": 3}])
def test_an_end_without_what_the_start_has_kept(paths, known):
    with starter(paths)() as journal:
        pass
    kept.place(paths, 1000, "42.srv", 0).add_facts(**known)
    teardown(journal.path, paths, Plugins())
    assert list(log_read.entries(kept.place(paths, 1000, "42.srv", 0)))


def console_case(paths, *phases):
    state = types.SimpleNamespace(
        key="42.srv.0",
        phases=[types.SimpleNamespace(name=name, guest=None) for name in phases],
        open=[types.SimpleNamespace(kind="domain", guest=0, args={})],
    )
    directory = paths.job_state("42.srv.0") / "g0"
    directory.mkdir(parents=True)
    (directory / "console.log").write_bytes(b"old\n" * 200000 + b"\x1b[2Jpanic \xff\n" * 3)
    (directory / "cloud-init.log").write_bytes(b"stage failed\n")
    return state


@pytest.mark.parametrize(
    ("phases", "dead", "kept_"),
    [
        (("plan", "boot"), set(), True),
        (("plan", "boot", "run"), {0}, True),
        (("plan", "boot", "run"), set(), False),
    ],
)
def test_the_end_of_a_failed_guests_console_is_kept(paths, phases, dead, kept_):
    state = console_case(paths, *phases)
    with log.opened(a_log(paths)) as one:
        job_log.collect_consoles(one, state, dead)
    if not kept_:
        with pytest.raises(FileNotFoundError):
            place(paths).read("console-g0.log")
        return
    text = place(paths).read("console-g0.log").decode()
    assert text.endswith("panic \ufffd\n") and "\x1b" not in text
    assert len(text) <= job_log.MAX_CONSOLE
    assert place(paths).read("cloud-init-g0.log") == b"stage failed\n"


def test_a_console_that_is_no_file_is_left_alone(paths):
    state = console_case(paths, "plan")
    path = paths.job_state("42.srv.0") / "g0" / "console.log"
    path.unlink()
    os.mkfifo(path)
    path.with_name("cloud-init.log").unlink()
    path.with_name("cloud-init.log").symlink_to("/etc/passwd")
    with log.opened(a_log(paths)) as one:
        job_log.collect_consoles(one, state, {0})
    assert [p.name for p in place(paths).directory.iterdir()] == ["log.jsonl"]


# -- readers -----------------------------------------------------------------------------------


def test_a_reader_believes_nothing(paths):
    paths.state.mkdir()
    descriptor = place(paths).append("log.jsonl")
    bad = [
        *(b"{", b"[]", b"\xff", b'{"t": "x"}', b'{"t": 1e400, "guest": "g"}', b"[" * 9999),
        *(b'{"t": %s}' % word for word in (b"NaN", b"-Infinity", b"-1e400", b"1" * 400)),
        json.dumps({"t": 1, "level": "\x1b[31m", "message": "\x1b" * 9999, "detail": 7}).encode(),
        json.dumps({"t": -1e18, "detail": ["\x1b[2J"] * 999, "phase": None}).encode(),
        b"q" * (1 << 21),
    ]
    os.write(descriptor, b"\n".join([*bad, b'{"t": 2, "message": "good"}', b'{"torn": ']))
    os.close(descriptor)
    found = [log_read.text(e) for e in log_read.entries(place(paths))]
    assert "good" in found[-1]
    json.dumps(list(log_read.entries(place(paths))), allow_nan=False)
    assert all(c.isprintable() or c == "\n" for text in found for c in text)


def cli(paths, tmp_path, *argv):
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    return CliRunner().invoke(vmgr, ["--config", str(config), "logs", *argv])


def test_vmgr_logs_shows_and_chooses(paths, tmp_path):
    with log.opened(a_log(paths, "debug")):
        log.enter("boot")
        boot.info("of guest 1", extra={"guest": 1})
        log.enter("run")
        boot.debug("little")
        boot.error("broken \x1b[31m", extra={"detail": ["said \x1b"]})
    shown = cli(paths, tmp_path, "42.srv")
    assert shown.exit_code == 0 and len(shown.output.splitlines()) == 4
    assert shown.output.splitlines()[-1] == "    | said \\x1b"
    assert cli(paths, tmp_path, "--phase", "boot", "42.srv").output.count("\n") == 1
    assert "of guest 1" in cli(paths, tmp_path, "--guest", "1", "42.srv").output
    assert cli(paths, tmp_path, "--level", "info", "42.srv").output.count("\n") == 3
    (one,) = cli(paths, tmp_path, "--level", "error", "--json", "42.srv").output.splitlines()
    assert json.loads(one)["message"] == "broken \\x1b[31m"
    place(paths).write("console-g0.log", b"panic\x1b[2J\n")
    assert cli(paths, tmp_path, "--console", "42.srv").output == "panic\\x1b[2J\n"
    assert "nothing is kept here of a job 43.srv" in str(cli(paths, tmp_path, "43.srv").exception)
    assert "there are trace" in str(cli(paths, tmp_path, "--level", "loud", "42.srv").exception)


def test_vmgr_logs_follows_to_the_end(paths, tmp_path):
    def job():
        with log.opened(a_log(paths)):
            for number in range(3):
                boot.info("%d", number)
                time.sleep(0.1)
        place(paths).add_facts(ended=time.time())

    with log.opened(a_log(paths)):
        boot.info("first")
    pid = in_other_process(job)
    shown = cli(paths, tmp_path, "-f", "42.srv")
    os.waitpid(pid, 0)
    assert [line[-1] for line in shown.output.splitlines()] == ["t", "0", "1", "2"]


def test_the_job_shell_shows_the_log(paths):
    reader, writer = os.pipe()
    shown = ShownLog(paths, writer)
    shown.start(Proof("42.srv", 0, os.getuid(), "starting"))
    assert shown._thread is None
    proof = Proof("42.srv", 0, os.getuid(), "starting", show_log=True)
    shown.start(proof)
    shown.start(proof)
    with log.opened(a_log(paths)):
        boot.info("one")
        boot.info("two")
    shown.stop()
    text = os.read(reader, 9999).decode()
    assert [line[-3:] for line in text.splitlines()] == ["one", "two"]
    assert all(line.startswith("vtorque: ") for line in text.splitlines())


def test_a_job_shell_whose_error_output_nobody_reads_ends(paths, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr("vtorque_core.log_shown._LAST", 0.2)
    with log.opened(a_log(paths)):
        for _ in range(100):
            boot.info("x" * 4000)
    shown = ShownLog(paths, writer)
    shown.start(Proof("42.srv", 0, os.getuid(), "starting", show_log=True))
    shown.stop()
    os.close(reader)  # the thread ends with EPIPE


# -- vsub --------------------------------------------------------------------------------------


VSUB = """
import os, sys
from vtorque_core.cli import follow
from vtorque_core.api_batch import JobInfo
from vtorque_core.config import Site, build, parse_toml
from vtorque_core.names import Paths
from dataclasses import replace
from pathlib import Path

class Submitter:
    def submit(self, args, blob, needs):
        os.write(1, {text!r}); return {code}
    def jobs(self):
        return {jobs}

follow._ASK = 0.05
site = replace(Site(), paths=Paths(Path({state!r}), Path({run!r})))
sys.exit(follow.submit_and_follow(Submitter(), None, b"", None, site))
"""


def vsub(paths, text=b"Submitted batch job 42\n", code=0, jobs="[]"):
    program = VSUB.format(
        text=text, code=code, jobs=jobs, state=str(paths.state), run=str(paths.run)
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "text", [b"42\n", b"Submitted batch job 42\n", b"42;cluster\n", b"42\nmore\n"]
)
def test_vsub_follows_the_log_of_what_it_has_submitted(paths, text):
    with log.opened(a_log(paths, job="42")):
        boot.info("of the job")
    place(paths, "42").add_facts(ended=1.0)
    done = vsub(paths, text, code=7)
    assert (done.stdout, done.returncode) == (text.decode(), 7)
    assert done.stderr.endswith("boot: of the job\n")


def test_vsub_says_where_the_log_is_elsewhere(paths):
    done = vsub(paths, jobs='[JobInfo("42", "t", "ada", "RUNNING", "n77")]')
    assert "job 42 runs on n77: its log is in the job's error output" in done.stderr
    assert done.returncode == 0


def test_vsub_ends_with_a_job_that_is_gone_and_with_a_refusal(paths):
    assert vsub(paths).returncode == 0
    assert vsub(paths, jobs='[JobInfo("42", "t", "ada", "C", "")]').returncode == 0
    assert vsub(paths, text=b"", code=3).returncode == 3


@pytest.mark.parametrize(("value", "shown"), [("debug", True), ("vtorque_core.vsub:info", False)])
def test_the_variable_has_a_users_command_say_more(value, shown):
    program = "from vtorque_core.log_stderr import debug; debug('vsub', 'a %s', '\\x1b')"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "VTORQUE_LOG": value},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ("DEBUG vtorque_core.vsub: a \\x1b\n" if shown else "")


def granted(text, config=""):
    plugins = Plugins.load(node=False, only=())
    site = build(parse_toml(config.encode()), plugins)
    return decide(Request((("log", text),) if text else ()), site, plugins)[LOG]


def test_a_site_says_how_much_its_users_may_have_logged():
    assert granted("debug").of == {"ALL": DEBUG}
    assert granted("") == NOTHING
    assert granted("", '[options.log]\ndefault = "debug"').of == {"ALL": DEBUG}
    limits = '[options.log]\nmax = "info"'
    assert granted("warn", limits).level("vtorque_x") == WARN
    for text in ("debug", "ALL:WARN+vtorque_iocm:TRACE"):
        with pytest.raises(Refused, match="is more than allowed") as raised:
            granted(text, limits)
        assert "limit: ALL:INFO, set by [options.log] max" in str(raised.value)
    with pytest.raises(Refused, match="log=loud: has the level 'loud'"):
        granted("loud")
    with pytest.raises(ConfigError, match=r"\[log\] level: has the level 'loud'"):
        granted("", '[log]\nlevel = "ALL:loud"')
