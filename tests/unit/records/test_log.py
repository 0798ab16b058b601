"""Log of a job: content, readers, full disks and hostile text."""

import json
import logging
import os
import re
import threading
import time
import types
from functools import partial

import pytest

from acme_card import AcmeCard, in_other_process, loaded, starter
from vtorque_core.api import job_log, kept_records
from vtorque_core.api.guest_driver import Streams
from vtorque_core.api.kept_records import Usage
from vtorque_core.api.log_levels import DEBUG, ERROR, NOTHING, QUIET, TRACE, WARN, parse, plugin_of
from vtorque_core.api.vm_options import LOG
from vtorque_core.base.errors import ConfigError, Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_core.node.end.teardown import teardown
from vtorque_core.node.shell.jobshell import ShownLog, _say
from vtorque_core.node.shell.proof import Proof
from vtorque_core.records import console, log, timeline
from vtorque_core.records.reading import PhaseMark

boot = logging.getLogger("vtorque_core.node.start.boot")
acme = logging.getLogger("vtorque_acme_fpga.cards")


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    return Paths(tmp_path / "state", tmp_path / "run")


@pytest.fixture(autouse=True)
def syslog(monkeypatch):
    """Collect the messages to the host's syslog in a list."""
    lines = []
    monkeypatch.setattr(log, "to_syslog", lines.append)
    return lines


def a_log(paths, level="INFO", job="42.srv", **more):
    paths.state.mkdir(exist_ok=True)
    handlers = logging.getLogger().handlers  # pytest's fail on invalid records
    handlers[:] = [each for each in handlers if isinstance(each, log._JobLogHandler)]
    return log.Log(paths, JobAttempt(job, 0, "ada", os.getuid(), "n1"), parse(level), **more)


def place(paths, job="42.srv"):
    return kept_records.place(paths, JobAttempt(job, 0, "u", os.getuid()))


def lines(paths, job="42.srv"):
    return [json.loads(line) for line in place(paths, job).read("log.jsonl").splitlines()]


def forked(work):
    os.waitpid(in_other_process(work), 0)


# -- levels ------------------------------------------------------------------------------------


def test_levels_of_phases_and_plugins():
    levels = parse("ALL:WARN, iocm:TRACE+boot:debug,render-domain:ERROR,scam:QUIET")
    assert levels.minimum("iocm", "boot") == levels.minimum("iocm", "plan") == TRACE
    assert levels.minimum("core", "boot") == levels.minimum("scam", "boot") == DEBUG
    assert levels.minimum("core", "plan") == levels.minimum("iocm2", "") == WARN
    assert levels.minimum("core", "render domain") == ERROR
    assert levels.minimum("scam", "plan") == QUIET
    assert parse(str(levels)).of == levels.of
    assert parse("debug").minimum("anything", "boot") == DEBUG
    assert NOTHING.minimum("anything", "boot") > logging.CRITICAL


def test_plugin_of_a_logger_is_its_package():
    assert plugin_of("vtorque_linux_guest.job.guest_logs") == "linux-guest"
    assert plugin_of("vtorque_core.timings") == "core"


def test_more_verbose_is_more():
    """So a site's max is the upper limit for users, for any component."""
    quiet, warn, one, trace = (parse(t) for t in ("quiet", "warn", "boot:TRACE", "trace"))
    assert NOTHING == quiet < warn < one == trace


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a log level"),
        (",", "is not a log level"),
        ("loud", "the unknown level 'loud': write one of trace, debug"),
        ("ALL:", "the unknown level ''"),
        (
            "vtorque_core.node:debug",
            "the unknown component 'vtorque_core.node': write ALL, core, a phase",
        ),
        ("boot:debug,boot:info", "boot twice"),
        ("x" * 2000 + ":debug", "is not a log level"),
        (",".join(f"plugin{n}:debug" for n in range(21)), "up to 20"),
        ("é:debug", "the unknown component"),
    ],
)
def test_invalid_log_level_is_refused(text, words):
    with pytest.raises(ValueError, match=r"level|component|twice|up to") as raised:
        parse(text)
    assert words in str(raised.value) and len(str(raised.value)) < 300


# -- records -----------------------------------------------------------------------------------


def test_log_entry_names_phase_plugin_guest_and_level(paths):
    with log.open_log(a_log(paths)) as one:
        one.phase = "boot"
        with log.log_context(guest=1, plugin="linux-guest"):
            boot.info("%d vCPUs", 4)
        acme.warning("hot", extra={"guest": 0})
        boot.info("all")
        logging.getLogger("urllib3").error("of a library")
        logging.getLogger().error("of nobody")
    first, second, third = lines(paths)
    assert first.pop("t") == pytest.approx(time.time(), abs=60)
    assert first == {
        "level": "INFO", "logger": "vtorque_core.node.start.boot", "plugin": "linux-guest", "phase":
        "boot", "guest": 1, "node": "n1", "job": "42.srv", "message": "4 vCPUs",
    }  # fmt: skip
    assert (second["plugin"], second["guest"], second["level"]) == ("acme-fpga", 0, "WARN")
    assert (third["plugin"], third["guest"]) == ("core", None)


def test_log_has_entries_for_levels_of_site_and_user(paths):
    with log.open_log(a_log(paths, "ALL:WARN,acme-fpga:INFO")):
        boot.info("no")
        acme.info("site's")
        acme.debug("no")
        log.apply_request(parse("post-boot:TRACE"))
        boot.log(TRACE, "of another phase")
        log.enter("post-boot")
        boot.log(TRACE, "user's")
        log.enter("run")
        acme.debug("no")
        acme.info("site's again")
    assert [e["message"] for e in lines(paths)] == ["site's", "user's", "site's again"]
    assert [e["level"] for e in lines(paths)] == ["INFO", "TRACE", "INFO"]


def test_inner_log_gets_all_entries_until_it_is_closed(paths):
    a_log(paths)
    root = logging.getLogger()
    before = (root.level, list(root.handlers), boot.level)
    with log.open_log(a_log(paths)):
        boot.info("one")
        with log.open_log(a_log(paths, "debug", job="7.srv")):
            boot.debug("inner")
            with log.open_log(a_log(paths, job="7.srv")):
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


def test_threads_and_forked_processes_write_to_the_log(paths):
    with log.open_log(a_log(paths)):
        thread = threading.Thread(target=lambda: boot.info("thread"))
        thread.start()
        thread.join()
        forked(lambda: boot.info("child"))
    assert [e["message"] for e in lines(paths)] == ["thread", "child"]


def test_forked_child_that_closed_the_log_can_reopen_it(paths):
    with log.open_log(a_log(paths)):

        def own_way():
            os.close(log._open[-1]._file)
            with log.reopen_log():
                boot.info("own")
            boot.info("lost")

        forked(own_way)
        boot.info("parent")
    assert [e["message"] for e in lines(paths)] == ["own", "parent"]


class BadSink:
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nline two\0 \u202e \udc80\udcff \x9b31m ü"


def test_hostile_text_is_harmless_and_bounded(paths):
    with log.open_log(a_log(paths)):
        boot.info("%s", HOSTILE)
        boot.info("x" * (1 << 20))
        boot.info("\x1b" * (1 << 20))
        boot.info("console", extra={"detail": [HOSTILE, "y" * (1 << 20)] * 100})
        boot.info("%d", "no number")
        boot.info("%s", BadSink())
        boot.info(BadSink())
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
    for entry in job_log.entries(place(paths)):
        assert all(c.isprintable() or c == "\n" for c in job_log.text(entry))


def test_defect_is_logged_with_traceback_and_sent_to_syslog(paths, syslog):
    with log.open_log(a_log(paths)):
        try:
            raise ValueError("odd \x1b[31m")
        except ValueError:
            log.log_defect("42.srv")
    (entry,) = lines(paths)
    assert entry["level"] == "ERROR" and "ValueError: odd \\x1b[31m" in entry["message"]
    assert any("test_defect" in line for line in entry["detail"])
    assert len(syslog) == 1 and "ValueError" in syslog[0]
    log.log_defect("43.srv")  # no log is open: of no known user
    assert syslog[1].startswith("43.srv: ")


# -- the disk ----------------------------------------------------------------------------------


def test_full_disk_is_reported_once_and_a_torn_line_loses_only_itself(paths, syslog, monkeypatch):
    write = os.write
    room = [300]

    def full(descriptor, data):
        done = data[: room[0]]
        room[0] -= len(done)
        return write(descriptor, done)

    with log.open_log(a_log(paths)):
        with monkeypatch.context() as patch:
            patch.setattr(log.os, "write", full)
            for _ in range(5):
                boot.info("while it fills")
        boot.info("there is room again")
    assert len(syslog) == 1 and "No space left" in syslog[0]
    found = [e["message"] for e in job_log.entries(place(paths))]
    assert found == ["while it fills", "there is room again"]


def test_log_that_cannot_be_opened_is_reported_once(paths, syslog):
    paths.state.mkdir()
    paths.kept.write_text("in the way")
    with log.open_log(a_log(paths)):
        boot.info("lost")
        boot.info("lost")
    assert len(syslog) == 1 and "log.jsonl" in syslog[0]


def test_log_size_is_bounded(paths):
    with log.open_log(a_log(paths)):
        for _ in range(1100):
            boot.info("z" * 4096)
        boot.error("an error")
        logging.getLogger("vtorque_core.timings").info("times: all")
        for _ in range(100):
            boot.error("e" * 4096)
    assert (place(paths).directory / "log.jsonl").stat().st_size < log.MAX_LOG + log._END + 16384
    found = [e["message"] for e in lines(paths)]
    assert sum("only errors and its end" in m for m in found) == 1
    assert "an error" in found and "times: all" in found


# -- start and end of a job --------------------------------------------------------------------


def test_last_line_of_a_log_stays_short(paths, caplog):
    """A job of 25 phases had a line of 25 parts, one of 1,000 suspensions one of 2,000."""
    marks = [PhaseMark(f"step {n}", None, float(n)) for n in range(5)]
    marks += [PhaseMark("ready", rank, 4.5) for rank in range(8)]
    for n in range(10):
        marks += [PhaseMark("run", None, 10.0 + n), PhaseMark("paused", None, 10.5 + n)]
    marks += [PhaseMark("run", None, 20.0), PhaseMark("teardown", None, 21.0)]
    marks += [PhaseMark("used", rank, 21.5, Usage(1.5, 200)) for rank in range(8)]
    marks += [PhaseMark("release", None, 22.0)]
    state = types.SimpleNamespace(phases=tuple(marks))
    with caplog.at_level("INFO", "vtorque_core.timings"):
        timeline.log_durations(state, 23.0)
    assert caplog.messages == ["times: start 10.0 s, run 6.0 s, paused 5.0 s, end 2.0 s"]


def test_teardown_logs_and_ends_with_a_sum_of_all_phases(paths, tmp_path):
    start = starter(paths)
    with start() as journal:
        for name in ("plan", "boot", "run"):
            journal.phase(name)
        journal.phase("ready", guest=0)
        journal.take(AcmeCard(str(tmp_path / "card")))
        facts = {"node": "n7", "log": ["ALL:DEBUG", ""]}
        kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000)).add_facts(**facts)
    assert teardown(journal.path, paths, loaded()).clean
    found = list(job_log.entries(kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000))))
    assert {e["node"] for e in found} == {"n7"}
    assert "1 resources released" in [e["message"] for e in found]
    last = found[-1]
    assert last["logger"] == "vtorque_core.timings"
    assert re.fullmatch(r"times: start \d+\.\d s, run \d+\.\d s, end \d+\.\d s", last["message"])
    assert "ended" in kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000)).facts()


def test_teardown_logs_resources_that_it_could_not_release(paths, tmp_path):
    with starter(paths)() as journal:
        journal.take(AcmeCard(str(tmp_path / "card")))
    (tmp_path / "card.mood").write_text("fail")
    teardown(journal.path, paths, loaded())
    found = list(job_log.entries(kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000))))
    assert [e["message"] for e in found if e["level"] == "WARN"] == [
        "42.srv:1 acme-card failed: card is busy (try 1)"
    ]


@pytest.mark.parametrize("known", [{}, {"log": "x"}, {"log": ["loud", 7]}, {"node": 3}])
def test_teardown_logs_without_valid_facts_from_the_start(paths, known):
    with starter(paths)() as journal:
        pass
    kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000)).add_facts(**known)
    teardown(journal.path, paths, Plugins())
    assert list(job_log.entries(kept_records.place(paths, JobAttempt("42.srv", 0, "u", 1000))))


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
def test_console_end_of_a_failed_guest_is_kept(paths, phases, dead, kept_):
    state = console_case(paths, *phases)
    with log.open_log(a_log(paths)) as one:
        console.collect(one.place, state, dead)
    if not kept_:
        with pytest.raises(FileNotFoundError):
            place(paths).read("console-g0.log")
        return
    text = place(paths).read("console-g0.log").decode()
    assert text.endswith("panic \ufffd\n") and "\x1b" not in text
    assert len(text) <= console.MAX_KEPT
    assert place(paths).read("cloud-init-g0.log") == b"stage failed\n"


def test_console_that_is_not_a_regular_file_is_not_kept(paths):
    state = console_case(paths, "plan")
    path = paths.job_state("42.srv.0") / "g0" / "console.log"
    path.unlink()
    os.mkfifo(path)
    path.with_name("cloud-init.log").unlink()
    path.with_name("cloud-init.log").symlink_to("/etc/passwd")
    with log.open_log(a_log(paths)) as one:
        console.collect(one.place, state, {0})
    assert [p.name for p in place(paths).directory.iterdir()] == ["log.jsonl"]


# -- readers -----------------------------------------------------------------------------------


def test_job_shell_shows_the_log(paths):
    reader, writer = os.pipe()
    shown = ShownLog(paths, partial(_say, Streams(None, writer, writer)))
    shown.start(Proof(JobAttempt("42.srv", 0, "u", os.getuid()), "starting"))
    assert shown._thread is None
    proof = Proof(JobAttempt("42.srv", 0, "u", os.getuid()), "starting", show_log=True)
    shown.start(proof)
    shown.start(proof)
    with log.open_log(a_log(paths)):
        boot.info("one")
        boot.info("two")
    shown.stop()
    text = os.read(reader, 9999).decode()
    assert [line[-3:] for line in text.splitlines()] == ["one", "two"]
    assert all(line.startswith("vtorque: ") for line in text.splitlines())


def test_job_shell_ends_if_its_standard_error_is_not_read(paths, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr("vtorque_core.node.shell.jobshell._LAST_LINES", 0.2)
    with log.open_log(a_log(paths)):
        for _ in range(100):
            boot.info("x" * 4000)
    shown = ShownLog(paths, partial(_say, Streams(None, writer, writer)))
    shown.start(Proof(JobAttempt("42.srv", 0, "u", os.getuid()), "starting", show_log=True))
    shown.stop()
    os.close(reader)  # the thread ends with EPIPE


# -- Accepted values of users and sites ------------------------------------------------------------


def granted(text, config=""):
    plugins = Plugins.load(node=False, only=())
    site = build(parse_toml(config.encode()), plugins)
    return decide(Request((("log", text),) if text else ()), site, plugins)[LOG]


def test_site_limits_the_log_level_of_users():
    assert granted("debug").of == {"ALL": DEBUG}
    assert granted("") == NOTHING
    assert granted("", '[options.log]\ndefault = "debug"').of == {"ALL": DEBUG}
    limits = '[options.log]\nmax = "info"'
    assert granted("warn", limits).minimum("core", "boot") == WARN
    for text in ("debug", "ALL:WARN+iocm:TRACE"):
        with pytest.raises(Refused, match="is more than allowed") as raised:
            granted(text, limits)
        assert "limit: ALL:INFO, set by [options.log] max" in str(raised.value)
    with pytest.raises(Refused, match="log=loud: has the unknown level 'loud'"):
        granted("loud")
    with pytest.raises(ConfigError, match=r"\[log\] level: has the unknown level 'loud'"):
        granted("", '[log]\nlevel = "ALL:loud"')
