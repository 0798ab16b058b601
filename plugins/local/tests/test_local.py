"""Jobs of the embedded batch system, with real processes, as the user who runs the tests."""

import os
import pty
import pwd
import signal
import stat
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from local_site import HOST, SUBMIT, fresh_site
from patience import LONG, eventually, with_more_time
from terminal import CommandTerminal
from vtorque_core.api import UsageError, job_log, kept_records
from vtorque_core.config.request import Request
from vtorque_local.node import LocalNode
from vtorque_pbs import convention as pbs
from vtorque_testing.submit import run_in_child

pytestmark = pytest.mark.e2e


@pytest.fixture
def site():
    with fresh_site() as site:
        yield site


@pytest.mark.parametrize(("code", "seen"), [("exit 0", 0), ("exit 1", 1), ("exit 42", 42)])
def test_block_option_returns_the_exit_code_of_the_script(site, code, seen, capfd):
    job = site.script(f"#!/bin/sh\necho out; echo err >&2; {code}\n")
    assert site.submit("-W", "block=true", "-N", "t", "-o", "out", "-e", "err", job) == seen
    assert capfd.readouterr().out == f"1.{HOST}\n"
    assert (site.root / "out").read_bytes() == b"out\n"
    assert (site.root / "err").read_bytes() == b"err\n"
    assert site.hook("epilogue", f"1.{HOST}")[9] == str(seen)


@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        (">/dev/full", "standard output: No space left on device"),
        (">&-", "standard output: Bad file descriptor"),
        ("", "standard output has no reader"),
    ],
)
def test_unprintable_job_id_is_reported_on_standard_error(site, redirection, why):
    """The job is submitted, so exit status 1 would make a caller submit it twice."""
    config = site.root / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{site.paths.state}"\nrun = "{site.paths.run}"\n')
    reader, without_reader = os.pipe()
    os.close(reader)
    words = [Path(sys.executable).parent / "vsub", "--config", config, "-vm", "none"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *words, site.script("exit 0\n")],
        stdout=without_reader, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(without_reader)
    assert (done.returncode, done.stderr) == (3, f"vsub: job 1.{HOST} is submitted, but {why}\n")
    assert site.done("1") == 0


def test_interrupted_wait_reports_that_the_job_still_runs(site):
    (site.root / "prologue.hold").touch()
    config = site.root / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{site.paths.state}"\nrun = "{site.paths.run}"\n')
    vsub = subprocess.Popen(
        # A shell lets its background processes ignore SIGINT, maybe also that of these tests.
        ["env", "--default-signal=INT", Path(sys.executable).parent / "vsub", "--config", config,
         "-vm", "none", "-W", "block=true", site.script("exit 0\n")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert vsub.stdout is not None
    assert vsub.stdout.readline() == f"1.{HOST}\n"
    vsub.send_signal(signal.SIGINT)
    _, said = vsub.communicate(timeout=LONG)
    assert vsub.returncode == 130
    assert said == (
        f"\nvsub: interrupted; job 1.{HOST} is still queued or running. "
        f"To cancel it: vmgr cancel '1.{HOST}'\n"
    )
    (site.root / "prologue.hold").unlink()
    assert site.done("1") == 0


def test_killed_script_ends_with_its_signal(site):
    assert site.submit("-W", "block=true", "-S", "/bin/sh", site.script("kill -9 $$\n")) == 137


def test_hooks_get_torque_arguments_and_no_user_environment(site):
    job = site.script("#!/bin/sh\ntrue\n")
    blob = Request((("ram", "1G"),)).encode()
    resources = "nodes=1:ppn=2,walltime=1:00:00,mem=512mb"
    argv = ("-W", "block=true", "-v", "SECRET=1", "-l", resources, "-F", "a 'b c'", job)
    assert site.submit(*argv, blob=blob) == 0
    args = pbs.PrologueArgs.parse(site.hook("prologue", f"1.{HOST}"))
    me = pwd.getpwuid(os.getuid()).pw_name
    assert (args.job_id, args.user, args.job_name, args.queue) == (
        f"1.{HOST}",
        me,
        "job.sh",
        "local",
    )
    found = LocalNode(site.spool).job(args.argv(), {})
    assert (found.blob, found.cpu_count, found.mem_mib) == (blob, 2, 512)
    assert found.resource_list["walltime"] == "01:00:00"
    assert (found.node, found.nodes, found.owner, found.attempt) == (HOST, (HOST,), me, 0)
    assert (site.root / "wrapper.line").read_text() == f"{args.script} a 'b c'\n"
    assert "SECRET" not in (site.root / "prologue.env").read_text()
    end = pbs.EpilogueArgs.parse(site.hook("epilogue", f"1.{HOST}"))
    assert (end.exit_status, end.resources, end.script) == ("0", args.resources, args.script)
    assert int(end.session) > 1 and "walltime=00:0" in end.used
    assert not Path(args.script).exists()


def test_environment_and_surroundings_of_a_job(site):
    job = site.script('env -0 > env; pwd; umask; cat "$PBS_NODEFILE"; ls -ln "$0"\n')
    odd = "a'b\"c d\ne"
    os.environ["VT_ODD"] = odd
    argv = ("-d", str(site.root), "-v", "VT_ODD,TWO='x,y'", "-W", "block=true")
    assert site.submit(*argv, "-l", "nodes=1:ppn=2", "-o", "out", "-S", "/bin/sh", job) == 0
    pairs = (item.split(b"=", 1) for item in (site.root / "env").read_bytes().split(b"\0")[:-1])
    env = {k.decode(): v.decode() for k, v in pairs}
    assert env["VT_ODD"] == odd and env["TWO"] == "x,y"
    assert env["PBS_JOBID"] == f"1.{HOST}" and env["PBS_O_WORKDIR"] == str(site.root)
    assert env["PBS_ENVIRONMENT"] == "PBS_BATCH" and env["PBS_NUM_PPN"] == "2"
    assert env["PBS_O_PATH"] == os.environ["PATH"] and "PYTEST_CURRENT_TEST" not in env
    lines = (site.root / "out").read_text().splitlines()
    assert lines[:4] == [str(site.root), "0077", HOST, HOST]
    assert lines[4].startswith("-r-x------ 1 " + str(os.getuid()))
    assert stat.S_IMODE((site.root / "out").stat().st_mode) == 0o600
    del os.environ["VT_ODD"]


def test_job_has_no_ignored_signals(site):
    """Python ignores SIGPIPE, and its child processes would not notice a closed pipe."""
    job = site.script("#!/bin/sh\nyes | head -n 1; grep SigIgn /proc/self/status\n")
    assert site.submit("-W", "block=true", "-o", "out", "-e", "err", job) == 0
    assert (site.root / "out").read_text() == "y\nSigIgn:\t0000000000000000\n"
    assert (site.root / "err").read_bytes() == b""


def test_capital_v_passes_the_whole_environment(site, monkeypatch):
    monkeypatch.setenv("VT_MARK", "here")
    monkeypatch.setenv("PBS_JOBID", "forged")
    job = site.script('#!/bin/sh\necho "$VT_MARK $PBS_JOBID"\n')
    assert site.submit("-V", "-W", "block=true", "-o", "out", job) == 0
    assert (site.root / "out").read_text() == f"here 1.{HOST}\n"


def test_default_names_directives_and_joined_streams_are_used(site):
    text = (
        "#!/bin/sh\n#PBS -N first -j oe\n#PBS -W block=true\n#PBS -vm ram=1G\necho a; echo b >&2\n"
    )
    args = site.submitter.split((site.script(text),))
    assert args.directives == ("ram=1G",)
    assert site.submitter.submit(args, None, None) == 0
    assert (site.root / "first.o1").read_text() == "a\nb\n"
    assert not (site.root / "first.e1").exists()
    assert site.submit("-N", "second", site.script(text)) == 0, (
        "the directive overrides the command line"
    )
    assert (site.root / "second.o2").exists()


def test_options_of_workflow_tools_are_accepted(site):
    """The forms that dask-jobqueue, Parsl and PSI/J write for OpenPBS."""
    text = (
        "#!/bin/bash\n#PBS -m n\n#PBS -A project\n#PBS -r n\n#PBS -p 10\n#PBS -M me@example.org\n"
        "#PBS -l select=1:ncpus=2:mem=489MB:mpiprocs=2\n#PBS -l place=scatter:shared\n"
        "echo $PBS_NUM_PPN; cat $PBS_NODEFILE | wc -l\n"
    )
    args = site.submitter.split((site.script(text),))
    assert (args.vcpus_given, args.mib_given) == (2, 489)
    assert site.submit("-W", "block=true", "-o", "out", site.script(text)) == 0
    assert (site.root / "out").read_text() == "2\n2\n"


def test_script_from_standard_input_is_run(site):
    argv = [sys.executable, "-c", SUBMIT, str(site.paths.run), "-W", "block=true"]
    script = b"#!/bin/sh\necho hi; exit 3\n"
    done = subprocess.run(argv, input=script, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"1.{HOST}\n".encode(), b"")
    assert (site.root / "STDIN.o1").read_bytes() == b"hi\n"


def test_script_name_with_a_leading_digit_is_accepted(site):
    names = ["01_align.sh", "2nd", "_x.sh"]
    for number, name in enumerate(names, 1):
        assert site.submit("-W", "block=true", site.script("exit 0\n", name)) == 0
        assert (site.root / f"{name}.o{number}").exists()


def test_unusual_characters_in_names_are_kept(site, monkeypatch):
    where = site.root / "a 'quoted\" dir\nwith newline; $(id)"
    where.mkdir()
    monkeypatch.chdir(where)
    script = where / 'my job\'s "script".sh'
    script.write_text('#!/bin/sh\necho "$PBS_O_WORKDIR"; printf "<%s>" "$@"\n')
    blob = Request().encode()
    argv = ("-W", "block=true", "-o", "out put\n.txt", "-F", "'x y' \"z'\"", str(script))
    assert site.submit(*argv, blob=blob) == 0
    assert (where / "out put\n.txt").read_text() == f"{where}\n<x y><z'>"
    assert (where / 'my_job\'s_"script".sh.e1').read_text() == ""


def test_output_is_streamed(site):
    job = site.script("#!/bin/sh\necho first\nwhile [ ! -e go ]; do sleep 0.02; done\n")
    site.submit("-o", "out", "-d", str(site.root), job)
    site.wait_for(site.root / "out", "first\n")
    assert [j.state for j in site.submitter.jobs()] == ["R"]
    (site.root / "go").touch()
    assert site.done("1") == 0


@pytest.mark.parametrize("words", [("-o", "nodir/x.log"), ("-j", "eo", "-e", "/nonexistent/x")])
def test_output_in_a_missing_directory_is_refused(site, words):
    with pytest.raises(UsageError, match=r"output file .*: .* does not exist; give another place"):
        site.submit(*words, site.script("exit 0\n"))
    assert list(site.submitter.jobs()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dangling", "/nonexistent does not exist"),
        ("loop", "cannot be created: Too many levels of symbolic links"),
        ("y" * 300, "cannot be created: File name too long"),
        ("new/", "/new does not exist"),
        ("link", "is a symbolic link, which is not followed because a guest could have made it"),
    ],
)
def test_output_that_cannot_be_created_is_refused(site, name, why):
    (site.root / "dangling").symlink_to("/nonexistent/x")
    (site.root / "loop").symlink_to("loop")
    (site.root / "link").symlink_to("/dev/null")
    with pytest.raises(UsageError, match=f"output file .*{why}; give another place"):
        site.submit("-o", name, site.script("exit 0\n"))
    assert list(site.submitter.jobs()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write there")
def test_output_that_the_user_may_not_write_is_refused(site):
    site.root.chmod(0o755)
    (site.root / "x.log").touch(mode=0o644)
    (site.root / "private").mkdir(mode=0o700)
    job = site.script("exit 0\n")
    for words in ((), ("-o", "x.log", "-e", "/tmp"), ("-o", "private/", "-e", "/tmp")):

        def submit(words=words):
            os.setuid(65534)
            return site.submit(*words, job)

        ended = run_in_child(submit, b"", {}, site.root)
        assert ended.code == 2 and b"is not writable by you" in ended.stderr, (words, ended)
    assert (
        run_in_child(
            lambda: site.submit("-j", "oe", "-o", "/dev/null", job), b"", {}, site.root
        ).code
        == 0
    )


def test_output_directory_removed_before_the_start_is_the_reported_reason(site, capfd):
    """This error cannot be detected at submission. All places must show the reason."""
    (site.root / "prologue.hold").touch()
    (site.root / "logs").mkdir()
    job = site.script("#!/bin/sh\ntouch ran\n")
    argv = ("-o", "logs/x", "-e", "err", "-d", str(site.root), job)
    assert site.submit(*argv, blob=Request((("ram", "1G"),)).encode()) == 0
    site.hook("prologue", f"1.{HOST}")
    (site.root / "logs").rmdir()
    (site.root / "prologue.hold").unlink()
    site.done("1")
    why = f"{site.root}/logs/x: No such file or directory"
    (place,) = kept_records.find(site.paths, f"1.{HOST}", os.getuid())
    assert (place.facts()["reason"], place.facts()["status"]) == (why, "1")
    assert [entry["message"] for entry in job_log.entries(place)] == [f"ended: {why}"]
    assert why in (site.root / "err").read_text()
    assert not (site.root / "ran").exists()


def test_walltime_sends_term_then_kill_and_releases_everything():
    with_more_time(late_job, 1, 5, 20)


def late_job(walltime):
    with fresh_site(kill_after=0.4 * walltime) as site:
        job = site.script(
            "trap 'echo term' TERM\necho $$ > pid\n(while :; do sleep 0.1; done) &\n"
            "while :; do sleep 0.05; done\n"
        )
        argv = ("-l", f"walltime={walltime}", "-W", "block=true", "-S", "/bin/sh")
        assert site.submit(*argv, "-d", str(site.root), "-o", "out", "-e", "err", job) == 143
        assert "term\n" in (site.root / "out").read_text()
        limit = f"walltime exceeded limit 00:00:{walltime:02}"
        assert limit in (site.root / "err").read_text()
        assert site.hook("epilogue", f"1.{HOST}")[9] == "-11"
        session = int(site.hook("epilogue", f"1.{HOST}")[4])
        eventually(lambda: processes(session) == [])


def processes(session: int) -> list[str]:
    argv = ["ps", "-o", "stat=,args=", "-s", str(session)]
    found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in found if not line.startswith("Z")]


def test_cancel_while_queued_running_and_in_the_prologue(site):
    (site.root / "prologue.hold").touch()
    job = site.script("#!/bin/sh\ntouch ran\nsleep 30\n")
    for _ in range(3):
        site.submit("-d", str(site.root), "-S", "/bin/sh", job)
    site.hook("prologue", f"1.{HOST}")
    site.submitter.cancel("3")
    assert site.done("3") is None
    site.submitter.cancel(f"2.{HOST}")
    (site.root / "prologue.hold").unlink()
    assert site.done("2") == 143
    site.wait_for(site.root / "ran")
    site.submitter.cancel("1")
    assert site.done("1") == 143
    for number in (1, 2):
        assert site.hook("epilogue", f"{number}.{HOST}")[9] == "271"
    assert site.hook("epilogue", f"2.{HOST}")[4] == "0", "the script of a canceled start has run"
    assert not (site.root / f"epilogue.3.{HOST}").exists(), "the epilogue of a queued job has run"
    with pytest.raises(UsageError, match="no job with this id"):
        site.submitter.cancel("99")


def test_failing_and_killed_prologue(site, capfd):
    job = site.script("#!/bin/sh\ntouch ran\n")
    (site.root / "prologue.exit").write_text("2")
    assert site.submit("-W", "block=true", "-e", "err", "-d", str(site.root), job) == 254
    assert "prologue failed (exit 2)" in capfd.readouterr().err
    site.wait_for(site.root / "err", "prologue failed (exit 2)")
    assert not (site.root / "ran").exists()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-2"
    (site.root / "prologue").write_text("#!/bin/sh\nkill -9 $$\n")
    assert site.submit("-W", "block=true", "-d", str(site.root), job) == 0, (
        "not the exit status that Torque returns"
    )


def test_job_waits_for_resources_in_use_by_other_jobs(site):
    """The job is queued again with the reason, and retried when another job has ended."""
    (site.root / "prologue.says").write_text("n1: in use by other jobs: memory\n")
    (site.root / "prologue.exit").write_text("75")
    site.submit("-o", "out", site.script("echo ran\n"), blob=Request().encode())
    eventually(lambda: [job.reason for job in site.submitter.jobs()] != [""])
    (job,) = site.submitter.jobs()
    assert (job.state, job.reason) == ("Q", "n1: in use by other jobs: memory")
    assert not (site.root / f"epilogue.1.{HOST}").exists()
    (site.root / "prologue.exit").unlink()
    (site.root / "prologue.says").unlink()
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n", "other")) == 3
    assert site.done("1") == 0
    assert (site.root / "out").read_text() == "ran\n"


def test_job_that_waits_for_resources_can_be_canceled(site):
    (site.root / "prologue.exit").write_text("75")
    for number in ("1", "2"):
        site.submit(site.script("true\n"), blob=Request().encode())
        site.hook("prologue", f"{number}.{HOST}")
    for number in ("1", "2"):
        site.submitter.cancel(number)
        site.done(number)
    assert list(site.submitter.jobs()) == []


def test_first_in_first_out_with_slots(site):
    job = site.script(
        "#!/bin/sh\necho $PBS_JOBID >> order\nwhile [ ! -e go ]; do sleep 0.02; done\n"
    )
    for _ in range(4):
        site.submit("-d", str(site.root), job)
    site.wait_for(site.root / "order", "2.")
    full = "all slots are in use ([plugin.local] slots = 2)"
    assert sorted((j.state, j.reason) for j in site.submitter.jobs()) == [
        ("Q", full), ("Q", full), ("R", ""), ("R", ""),
    ]  # fmt: skip
    (site.root / "go").touch()
    assert [site.done(str(n)) for n in (1, 2, 3, 4)] == [0] * 4
    assert sorted((site.root / "order").read_text().split()) == [
        f"{n}.{HOST}" for n in (1, 2, 3, 4)
    ]


def test_reason_of_a_vm_job_that_never_ran_is_kept(site):
    """``vmgr ps --all`` did not show the reason, and scripts of an array waited for its task."""
    blob = Request((("ram", "1G"),)).encode()
    (site.root / "prologue.hold").touch()
    for words in ((), (), ("-N", "never", "-t", "1-2")):
        site.submit(*words, site.script("exit 0\n"), blob=blob)
    site.hook("prologue", f"2.{HOST}")
    site.submitter.cancel("3[2]")
    site.submitter.cancel("2")
    (site.root / "prologue.hold").unlink()
    for number in ("1", "2", "3-1", "3-2"):
        site.done(number)
    whose = os.getuid()
    (place,) = kept_records.find(site.paths, f"3[2].{HOST}", whose)
    facts = place.facts()
    assert facts["ended"] > 0
    assert {key: facts[key] for key in ("name", "reason", "status", "batch")} == {
        "name": "never", "reason": "job killed: cancelled", "status": "271", "batch": "local",
    }  # fmt: skip
    (entry,) = job_log.entries(place)
    assert (entry["message"], entry["plugin"]) == ("ended: job killed: cancelled", "local")
    assert kept_records.find(site.paths, f"1.{HOST}", whose) == [], (
        "a record of a job whose own hooks keep records"
    )
    (place,) = kept_records.find(site.paths, f"2.{HOST}", whose)
    assert place.facts()["reason"] == "job killed: cancelled"


def test_array_runs_as_separate_tasks(site, capfd):
    """Each task is a job with its own id and output files; the array ends with the last one."""
    job = site.script("#!/bin/sh\necho $PBS_ARRAYID $PBS_JOBID; exit $PBS_ARRAYID\n")
    assert site.submit("-W", "block=true", "-t", "1-2,5", "-N", "a", "-j", "oe", job) == 5
    assert capfd.readouterr().out == f"1[].{HOST}\n"
    for task in ("1", "2", "5"):
        assert (site.root / f"a.o1-{task}").read_text() == f"{task} 1[{task}].{HOST}\n"
        assert site.hook("prologue", f"1[{task}].{HOST}")[0] == f"1[{task}].{HOST}"
    assert site.submit("-W", "block=true", "-t", "0", "-o", "own", job) == 0
    assert site.submit("-W", "block=true", "-t", "0", "-j", "oe", "-o", "/dev/null", job) == 0
    assert not Path("/dev/null-0").exists()
    assert (site.root / "own-0").read_text() == f"0 2[0].{HOST}\n"


def test_array_runs_at_most_its_limit_and_can_be_canceled(site):
    """A restarted service, which has read the array from its spool, must do the same."""
    job = site.script("#!/bin/sh\necho $PBS_JOBID >> began; sleep 99\n")
    site.submit("-t", "0-2%1", "-d", str(site.root), job)
    site.submit("-d", str(site.root), job)
    site.wait_for(site.root / "began", "2.")  # both slots are taken, by the older job first
    assert [info.state for info in site.submitter.jobs()] == ["R", "Q", "Q", "R"]
    reason = list(site.submitter.jobs())[1].reason
    assert reason == "1 tasks of its array run already (-t ...%1)"
    site.stop()
    site.start()
    site.wait_for(site.root / "began", "1[1].")
    assert [info.id for info in site.submitter.jobs()] == [f"1[{task}].{HOST}" for task in (1, 2)]
    alive = LocalNode(site.spool).job_states([f"1[{task}].{HOST}" for task in (0, 1)])
    assert [life.name for life in alive.values()] == ["GONE", "ALIVE"]
    site.submitter.cancel("1[1]")
    site.wait_for(site.root / "began", "1[2].")
    site.submit("-t", "7-8", job)
    site.submitter.cancel("3[]")
    site.submitter.cancel(f"1[].{HOST}")
    eventually(lambda: not list(site.submitter.jobs()))


def test_interactive_job_has_the_terminal(site):
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["DISPLAY"] = ":7"
        os.execv(  # noqa: S606
            sys.executable,
            [sys.executable, "-c", SUBMIT, str(site.paths.run), "-I", "-X", "-S", "/bin/sh"],
        )
    os.write(terminal, b"echo mode-$PBS_ENVIRONMENT$DISPLAY; test -t 0 && exit 7\n")
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:
        pass  # EIO: the last process has closed the terminal
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert b"mode-PBS_INTERACTIVE:7\r\n" in seen and b"completed" in seen
    os.close(terminal)


@pytest.mark.parametrize("stage", ["queued", "prologue", "shell"])
def test_interrupted_interactive_job_is_canceled(site, stage):
    if stage == "queued":
        for _ in range(site.slots):
            site.submit(site.script("sleep 300\n"))
    elif stage == "prologue":
        (site.root / "prologue.hold").touch()
    config = site.root / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{site.paths.state}"\nrun = "{site.paths.run}"\n')
    vsub = Path(sys.executable).parent / "vsub"
    terminal = CommandTerminal([str(vsub), "--config", str(config), "-vm", "none", "-I"])
    before = termios.tcgetattr(terminal.fd)
    job = terminal.read(rb"waiting for job (\S+) to start\r\n")[1].decode()
    if stage == "shell":
        terminal.read(rb"[#$] ")
    terminal.write(b"\x03")
    terminal.read(b"\nvsub: interrupted; job %s is canceled\r\n" % job.encode())
    assert termios.tcgetattr(terminal.fd) == before
    assert terminal.code() == 130
    assert b"Traceback" not in terminal.seen
    (site.root / "prologue.hold").unlink(missing_ok=True)
    eventually(lambda: job not in [each.id for each in site.submitter.jobs()])
    for each in site.submitter.jobs():
        site.submitter.cancel(each.id)
    eventually(lambda: not list(site.submitter.jobs()))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("-t", "3-1"), "-t 3-1: an array has 1 to 200 tasks"),
        (("-t", "0-99999"), "-t 0-99999"),
        (("-t", "1,"), "-t 1,: write a list"),
        (("-t", "1%0"), "-t 1%0"),
        (("-t", "0-1", "-I"), "-t cannot be combined with -I"),
        (("-q", "batch"), "-q"),
        (("-W", "depend=afterok:1"), "-W depend"),
        (("-l", "gres=gpu"), "-l gres"),
        (("-l", "nodes=2"), "nodes=2"),
        (("-l", "select=2:ncpus=1"), "select=2:ncpus=1"),
        (("-l", "select=1:ngpus=1"), "select=1:ngpus=1"),
        (("-l", "select=1:ncpus=0"), "ncpus=0"),
        (("-l", "select=1:mem=lots"), "mem=lots"),
        (("-m", "abe"), "-m abe: this batch system sends no mail"),
        (("-l", "walltime=soon"), "walltime=soon"),
        (("-l", "mem=lots"), "mem=lots"),
        (("-N", "1x"), "-N 1x"),
        (("-N", "a b"), "-N a b"),
        (("-j", "both"), "-j both"),
        (("-o", "elsewhere.example:/x"), "elsewhere.example"),
        (("-S", "sh"), "-S sh"),
        (("-S", "/nosuch"), "^-S /nosuch: does not exist on this host$"),
        (("-S", "/etc"), "^-S /etc: is not a program that you may run$"),
        (("-S", "/etc/passwd"), "^-S /etc/passwd: is not a program that you may run$"),
        (("-d", "/nosuch"), "^-d /nosuch: does not exist on this host$"),
        (("-d", "no/such"), "^-d /.*/no/such: does not exist on this host$"),
        (("-d", "/etc/passwd"), "^-d /etc/passwd: is not a directory that you may enter$"),
        (("-p", "x"), "^-p x: is not between -1024 and 1023$"),
        (("-p", "1024"), "^-p 1024: is not between -1024 and 1023$"),
        (("-p", "-1025"), "^-p -1025: is not between -1024 and 1023$"),
        (("-p", ""), "^-p : is not between -1024 and 1023$"),
        (("-r", "x"), "^-r x: is not y or n$"),
        (("-l", "place=x"), "^-l place=x: is not free, pack, scatter or vscatter"),
        (("-l", "nodes="), "^-l nodes=: is not 1 or 1:ppn=N"),
        (("-F", "it's $HOME"), "-F it's .HOME: No closing quotation"),
        (("-F", "a\\"), "-F a"),
        (("-y",), "-y"),
        (("--version",), "--version"),
        (("-N",), "-N"),
    ],
)
def test_unsupported_and_wrong_options_are_named(site, argv, named):
    last = () if argv == ("-N",) else (site.script("true\n"),)
    with pytest.raises(UsageError, match=named) as caught:
        site.submit(*last, *argv)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert list(site.submitter.jobs()) == []


def test_options_without_effect_have_valid_values(site):
    argv = ("-p", "-1024", "-p", "+1023", "-r", "y", "-A", "x", "-M", "a@b", "-m", "n")
    for place in ("free", "pack:excl", "excl", "scatter:shared:group=host", "group=host"):
        job = site.script("true\n")
        assert site.submit("-W", "block=true", "-l", f"place={place}", *argv, job) == 0


def test_directory_and_shell_of_a_guest(site):
    """The guest's shells are not this host's; Torque's qsub requires the directory here, too."""
    blob = Request().encode()
    assert site.submit("-W", "block=true", "-S", "/nosuch", site.script("true\n"), blob=blob) == 0
    with pytest.raises(UsageError, match=r"^-d /nosuch: does not exist on this host$"):
        site.submit("-d", "/nosuch", site.script("true\n"), blob=blob)


def test_bad_scripts_are_refused(site):
    fifo = site.root / "fifo"
    os.mkfifo(fifo)
    for script, why in (("none", "No such file"), (".", "directory"), (str(fifo), "regular")):
        with pytest.raises(UsageError, match=why):
            site.submit(script)
    with pytest.raises(UsageError, match="only one script"):
        site.submit(site.script("true\n"), "argument")
    with pytest.raises(UsageError, match="terminal"):
        site.submit("-I")
