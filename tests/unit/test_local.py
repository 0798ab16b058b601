"""The embedded batch system, end to end with real processes, as the user who runs the tests.

Doubles: the hooks (shell scripts that record their arguments) and the wrapper (runs the script
here). Jobs without a request blob are bare metal and need no double.
"""

import contextlib
import json
import multiprocessing
import os
import pty
import pwd
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vtorque_core.api_batch import Life
from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.batch.mom import Programs
from vtorque_core.errors import UsageError, VtorqueError
from vtorque_core.local.node import LocalNode
from vtorque_core.local.service import Service, Setup
from vtorque_core.local.submitter import LocalSubmitter
from vtorque_core.locks import Busy
from vtorque_core.names import Paths
from vtorque_core.request import Request

HOST = socket.gethostname()
SUBMIT = """
import sys; from pathlib import Path; from vtorque_core.locks import Busy
from vtorque_core.names import Paths
from vtorque_core.local.submitter import LocalSubmitter
s = LocalSubmitter(Paths(run=Path(sys.argv[1])))
sys.exit(s.submit(s.split(sys.argv[2:]), None, None))
"""
HOOK = """#!/bin/sh
# records its arguments and environment; slow or failing if the test says so
for a; do printf '%s\\n' "$a"; done > "{dir}/{name}.$1.new"
env > "{dir}/{name}.env"
mv "{dir}/{name}.$1.new" "{dir}/{name}.$1"
[ ! -e "{dir}/{name}.sleep" ] || sleep "$(cat "{dir}/{name}.sleep")"
[ ! -e "{dir}/{name}.exit" ] || exit "$(cat "{dir}/{name}.exit")"
"""
WRAPPER = """#!/bin/sh
# a double of the job shell: reads Torque's line, runs the script here
read -r line
printf '%s\\n' "$line" > "{dir}/wrapper.line"
eval "set -- $line"
exec sh "$@"
"""


def serve(config: dict, tell: int, log: int) -> None:
    """Be the service, in a process of its own."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    service = Service(
        Setup(
            Path(config["run"]),
            Path(config["spool"]),
            Programs(**config["programs"]),
            ["true"],
            slots=config["slots"],
            root_jobs=True,
            poll=0.01,
        )
    )
    service.open()
    os.write(tell, b"up\n")
    os.close(tell)
    service.serve()


class Site:
    """A service in a directory of its own, and a submitter for it."""

    def __init__(self, root: Path, slots: int = 2) -> None:
        self.root = root
        self.paths = Paths(state=root / "state", run=root / "run")
        self.spool = root / "state" / "local"
        self.submitter = LocalSubmitter(self.paths)
        self.slots = slots
        commands = {}
        for name, text in (("prologue", HOOK), ("epilogue", HOOK), ("wrapper", WRAPPER)):
            path = root / name
            path.write_text(text.format(dir=root, name=name))
            path.chmod(0o755)
            commands[name] = [str(path)]
        self.config = {
            "run": str(self.paths.run),
            "spool": str(self.spool),
            "slots": slots,
            "programs": commands | {"kill_after": 0.4, "hook_timeout": 5.0},
        }
        self.start()

    def start(self) -> None:
        self.log = (self.root / "log").open("ab")
        told, tell = os.pipe()
        arguments = self.config, tell, self.log.fileno()
        # Forked: a Python of its own would spend most of the test's time on its imports.
        self.process = multiprocessing.get_context("fork").Process(target=serve, args=arguments)
        self.process.start()
        os.close(tell)
        with os.fdopen(told, "rb") as up:
            assert up.read() == b"up\n", (self.root / "log").read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return self.ended()

    def ended(self) -> int | None:
        self.process.join(10)
        self.log.close()
        return self.process.exitcode

    def script(self, text: str, name: str = "job.sh") -> str:
        path = self.root / name
        path.write_text(text)
        return str(path)

    def submit(self, *argv: str, blob: bytes | None = None) -> int:
        return self.submitter.submit(self.submitter.split(argv), blob, None)

    def hook(self, name: str, job_id: str) -> list[str]:
        return self.wait_for(self.root / f"{name}.{job_id}").read_text().split("\n")[:-1]

    def wait_for(self, path: Path, text: str = "") -> Path:
        for _ in range(400):
            if path.exists() and text in path.read_text():
                return path
            time.sleep(0.01)
        raise AssertionError(f"{path} never had {text!r}; log: {(self.root / 'log').read_text()}")

    def done(self, number: str) -> int | None:
        """Wait until the job is no more; return its exit code, None if it never got a slot."""
        for _ in range(400):
            if not (self.spool / "jobs" / number).exists():
                ended = self.root / f"epilogue.{number}.{HOST}"
                status = ended.read_text().split("\n")[9] if ended.exists() else None
                return None if status is None else pbs.shell_code(int(status))
            time.sleep(0.01)
        raise AssertionError(f"job {number} never ended; log: {(self.root / 'log').read_text()}")


@pytest.fixture
def site(monkeypatch):
    root = Path(tempfile.mkdtemp(prefix="vtl"))
    site = Site(root)
    monkeypatch.chdir(root)
    yield site
    if site.process.exitcode is None:
        assert site.stop() == 0, (root / "log").read_text()
    shutil.rmtree(root)


@pytest.mark.parametrize(("code", "seen"), [("exit 0", 0), ("exit 1", 1), ("exit 42", 42)])
def test_block_ends_with_the_scripts_code(site, code, seen, capfd):
    job = site.script(f"#!/bin/sh\necho out; echo err >&2; {code}\n")
    assert site.submit("-W", "block=true", "-N", "t", "-o", "out", "-e", "err", job) == seen
    assert capfd.readouterr().out == f"1.{HOST}\n"
    assert (site.root / "out").read_bytes() == b"out\n"
    assert (site.root / "err").read_bytes() == b"err\n"
    assert site.hook("epilogue", f"1.{HOST}")[9] == str(seen)


def test_a_killed_script_ends_with_its_signal(site):
    assert site.submit("-W", "block=true", "-S", "/bin/sh", site.script("kill -9 $$\n")) == 137


def test_hooks_get_torques_arguments_and_no_user_environment(site):
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
    assert int(end.session) > 1 and "walltime=00:00:0" in end.used
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


def test_a_job_has_no_signals_ignored(site):
    """Python ignores SIGPIPE, and what it starts would not notice that nobody reads."""
    job = site.script("#!/bin/sh\nyes | head -n 1; grep SigIgn /proc/self/status\n")
    assert site.submit("-W", "block=true", "-o", "out", "-e", "err", job) == 0
    assert (site.root / "out").read_text() == "y\nSigIgn:\t0000000000000000\n"
    assert (site.root / "err").read_bytes() == b""


def test_whole_environment_with_capital_v(site, monkeypatch):
    monkeypatch.setenv("VT_MARK", "here")
    monkeypatch.setenv("PBS_JOBID", "forged")
    job = site.script('#!/bin/sh\necho "$VT_MARK $PBS_JOBID"\n')
    assert site.submit("-V", "-W", "block=true", "-o", "out", job) == 0
    assert (site.root / "out").read_text() == f"here 1.{HOST}\n"


def test_default_names_directives_and_one_stream(site):
    text = (
        "#!/bin/sh\n#PBS -N first -j oe\n#PBS -W block=true\n#PBS -vm ram=1G\necho a; echo b >&2\n"
    )
    args = site.submitter.split((site.script(text),))
    assert args.directives == ("ram=1G",)
    assert site.submitter.submit(args, None, None) == 0
    assert (site.root / "first.o1").read_text() == "a\nb\n"
    assert not (site.root / "first.e1").exists()
    assert site.submit("-N", "second", site.script(text)) == 0, "the command line wins"
    assert (site.root / "second.o2").exists()


def test_script_from_standard_input(site):
    argv = [sys.executable, "-c", SUBMIT, str(site.paths.run), "-W", "block=true"]
    script = b"#!/bin/sh\necho hi; exit 3\n"
    done = subprocess.run(argv, input=script, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"1.{HOST}\n".encode(), b"")
    assert (site.root / "STDIN.o1").read_bytes() == b"hi\n"


def test_odd_names(site, monkeypatch):
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


def test_output_is_streamed_as_it_comes(site):
    job = site.script("#!/bin/sh\necho first\nsleep 0.5\nwhile [ ! -e go ]; do sleep 0.02; done\n")
    site.submit("-o", "out", "-d", str(site.root), job)
    site.wait_for(site.root / "out", "first\n")
    assert [j.state for j in site.submitter.jobs()] == ["R"]
    (site.root / "go").touch()
    assert site.done("1") == 0


def test_output_that_cannot_be_opened_is_said(site, capfd):
    job = site.script("#!/bin/sh\ntouch ran\n")
    argv = ("-W", "block=true", "-o", "/nonexistent/dir/x", "-d", str(site.root), job)
    assert site.submit(*argv) == 1
    assert "/nonexistent/dir/x: No such file" in capfd.readouterr().err
    assert not (site.root / "ran").exists()


def test_walltime_sends_term_then_kill_and_frees_everything(site):
    job = site.script(
        "trap 'echo term' TERM\necho $$ > pid\n(while :; do sleep 0.1; done) &\n"
        "while :; do sleep 0.05; done\n"
    )
    argv = ("-l", "walltime=1", "-W", "block=true", "-S", "/bin/sh", "-d", str(site.root))
    assert site.submit(*argv, "-o", "out", "-e", "err", job) == 143
    assert "term\n" in (site.root / "out").read_text()
    assert "walltime exceeded limit 00:00:01" in (site.root / "err").read_text()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-11"
    session = int(site.hook("epilogue", f"1.{HOST}")[4])
    assert processes(session) == []


def processes(session: int) -> list[str]:
    argv = ["ps", "-o", "stat=,args=", "-s", str(session)]
    found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in found if not line.startswith("Z")]


def test_cancel_while_queued_running_and_in_the_prologue(site):
    (site.root / "prologue.sleep").write_text("0.5")
    job = site.script("#!/bin/sh\ntouch ran\nsleep 30\n")
    for _ in range(3):
        site.submit("-d", str(site.root), "-S", "/bin/sh", job)
    site.hook("prologue", f"1.{HOST}")
    site.submitter.cancel("3")
    assert site.done("3") is None
    site.submitter.cancel(f"2.{HOST}")
    assert site.done("2") == 143
    site.wait_for(site.root / "ran")
    site.submitter.cancel("1")
    assert site.done("1") == 143
    for number in (1, 2):
        assert site.hook("epilogue", f"{number}.{HOST}")[9] == "271"
    assert site.hook("epilogue", f"2.{HOST}")[4] == "0", "the cancelled start ran no job"
    assert not (site.root / f"epilogue.3.{HOST}").exists(), "nothing runs for a queued job"
    with pytest.raises(UsageError, match="no job of that id"):
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
    assert site.submit("-W", "block=true", "-d", str(site.root), job) == 0, "as Torque does"


def test_first_in_first_out_with_slots(site):
    job = site.script(
        "#!/bin/sh\necho $PBS_JOBID >> order\nwhile [ ! -e go ]; do sleep 0.02; done\n"
    )
    for _ in range(4):
        site.submit("-d", str(site.root), job)
    site.wait_for(site.root / "order", "2.")
    assert sorted(j.state for j in site.submitter.jobs()) == ["Q", "Q", "R", "R"]
    (site.root / "go").touch()
    assert [site.done(str(n)) for n in (1, 2, 3, 4)] == [0] * 4
    assert sorted((site.root / "order").read_text().split()) == [
        f"{n}.{HOST}" for n in (1, 2, 3, 4)
    ]


def test_killed_service_loses_what_ran_and_keeps_what_was_queued(site):
    loop = site.script("echo $$ >> pids\nsleep 300 &\nsetsid sleep 300 &\nwait\n")
    common = ("-S", "/bin/sh", "-d", str(site.root), "-o", "out", "-j", "oe")
    argv = [sys.executable, "-c", SUBMIT, str(site.paths.run), "-W", "block=true", *common, loop]
    waiting = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    site.wait_for(site.root / "pids", "\n")
    site.submit(*common, loop)
    while len((site.root / "pids").read_text().split()) < 2:
        time.sleep(0.01)
    site.submit("-d", str(site.root), "-o", "third", site.script("#!/bin/sh\necho third\n", "t"))
    marks = [job["environ"]["PBS_JOBCOOKIE"] for job in spooled(site)[:2]]
    assert [len(marked(mark)) >= 3 for mark in marks] == [True, True]
    site.stop(signal.SIGKILL)
    _, said = waiting.communicate(timeout=10)
    assert (waiting.returncode, b"lost" in said) == (252, True)
    node = LocalNode(site.spool)
    assert node.alive([f"1.{HOST}", "9.x"]) == {f"1.{HOST}": Life.ALIVE, "9.x": Life.GONE}
    site.start()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-4"
    assert site.hook("epilogue", f"2.{HOST}")[9] == "-4"
    assert (
        "lost: the batch system was restarted"
        in site.wait_for(site.root / "out", "lost").read_text()
    )
    assert site.done("3") == 0
    assert (site.root / "third").read_text() == "third\n"
    assert (site.done("1"), site.done("2")) == (252, 252)
    assert not any(marked(mark) for mark in marks), "not even what has left the session"
    assert node.alive([f"1.{HOST}"]) == {f"1.{HOST}": Life.GONE}
    site.submit(site.script("#!/bin/sh\n"))
    assert site.hook("epilogue", f"4.{HOST}"), "the counter survives"


def test_the_kernel_ends_hook_and_job_with_the_service(site):
    """Even when nobody starts the service again."""
    (site.root / "prologue").write_text(HOOK.format(dir=site.root, name="prologue"))
    site.submit("-d", str(site.root), site.script("exec sleep 300\n"), blob=Request().encode())
    mark = spooled(site)[0]["environ"]["PBS_JOBCOOKIE"]
    while not marked(mark):
        time.sleep(0.01)
    site.stop(signal.SIGKILL)
    for _ in range(100):
        if not marked(mark):
            return
        time.sleep(0.01)
    raise AssertionError(marked(mark))


def marked(cookie: str) -> list[int]:
    """Return the processes that have a job's cookie in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if cookie.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def spooled(site: Site) -> list[dict]:
    files = sorted((site.spool / "jobs").glob("*/job"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in files]


def test_killed_service_in_prologue_ends_it_before_the_epilogue(site):
    (site.root / "prologue.sleep").write_text("60")
    site.submit("-e", "err", site.script("#!/bin/sh\ntouch ran\n"))
    site.hook("prologue", f"1.{HOST}")
    site.stop(signal.SIGKILL)
    site.start()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-4"
    assert not (site.root / "ran").exists()


def test_shutdown_ends_running_jobs_and_keeps_queued_ones(site):
    job = site.script("sleep 60\n")
    for _ in range(3):
        site.submit("-S", "/bin/sh", job)
    site.hook("prologue", f"2.{HOST}")
    site.submitter.shut_down()
    assert site.ended() == 0
    assert [j["state"] for j in spooled(site)] == ["Q"]
    with pytest.raises(VtorqueError, match="vtorque local serve"):
        list(site.submitter.jobs())
    site.start()
    site.hook("prologue", f"3.{HOST}")
    site.submitter.cancel("3")


def test_a_second_service_is_refused(site):
    run, spool = Path(site.config["run"]), Path(site.config["spool"])
    second = Service(Setup(run, spool, Programs((), (), ()), (), lock_wait=0.3))
    before, mask = (run / "local.sock").stat(), os.umask(0o022)
    with pytest.raises(Busy, match="held by another process"):
        second.open()
    os.umask(mask)
    assert (run / "local.sock").stat() == before, "the first one's socket is not touched"


def test_interactive_job_has_the_terminal(site):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(  # noqa: S606
            sys.executable,
            [sys.executable, "-c", SUBMIT, str(site.paths.run), "-I", "-S", "/bin/sh"],
        )
    os.write(terminal, b"echo mode-$PBS_ENVIRONMENT; test -t 0 && exit 7\n")
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:
        pass  # EIO: the last process has closed the terminal
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert b"mode-PBS_INTERACTIVE\r\n" in seen and b"completed" in seen
    os.close(terminal)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("-t", "0-3"), "-t"),
        (("-q", "batch"), "-q"),
        (("-W", "depend=afterok:1"), "-W depend"),
        (("-l", "gres=gpu"), "-l gres"),
        (("-l", "nodes=2"), "nodes=2"),
        (("-l", "walltime=soon"), "walltime=soon"),
        (("-l", "mem=lots"), "mem=lots"),
        (("-N", "1x"), "-N 1x"),
        (("-N", "a b"), "-N a b"),
        (("-j", "both"), "-j both"),
        (("-o", "elsewhere.example:/x"), "elsewhere.example"),
        (("-S", "sh"), "-S sh"),
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


def ask(site: Site, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(site.paths.run / "local.sock"))
        try:
            sock.sendall(data)
            return sock.makefile("rb").readline()
        except OSError:
            return b"closed"


def test_hostile_clients_are_answered_and_harm_nobody(site):
    good = {
        "op": "submit",
        "argv": ["-N", "x"],
        "script": "",
        "environ": {},
        "cwd": "/",
        "token": "",
    }
    bad = [
        {"token": "vt1:x,nodes=9"},
        {"token": "vt1:" + "A" * 200_000},
        {"token": "x"},
        {"token": None},
        {"argv": ["-l", "mem=1gb,other=vt1:x"]},
        {"argv": ["-N", "a\nb"]},
        {"argv": ["-F", "x" * 20_000]},
        {"argv": ["-I"]},
        {"argv": 1},
        {"environ": []},
        {"script": "%%%"},
    ]
    for change in bad:
        answer = json.loads(ask(site, json.dumps(good | change).encode() + b"\n"))
        assert "error" in answer, change
    for line in (b"[]\n", b"1\n", b"{\n", b"\xff\n", b'{"op":"nope"}\n', b"[" * 100_000 + b"\n"):
        assert b"error" in ask(site, line)
    ask(site, b"x" * (9 << 20))
    assert spooled(site) == [], "nothing was created"
    odd = [
        {"environ": {"A=B": "c"}},
        {"environ": {"A": "b\0c"}},
        {"cwd": "/a\0b"},
        {"cwd": "/\ud800"},
        {"argv": ["-d", "/nowhere"]},
        {"environ": {"A": 1}},
    ]
    for number, change in enumerate(odd, 1):
        answer = json.loads(ask(site, json.dumps(good | change).encode() + b"\n"))
        assert answer == {"id": f"{number}.{HOST}"}, "what is used as the user is the user's"
        site.done(str(number))
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3


def test_silent_clients_hold_up_nobody(site):
    idle = [socket.socket(socket.AF_UNIX) for _ in range(95)]
    for sock in idle:
        sock.connect(str(site.paths.run / "local.sock"))
        sock.send(b"{")
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3
    idle += [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for sock in idle[95:]:
        sock.connect(str(site.paths.run / "local.sock"))
    time.sleep(0.2)
    with pytest.raises(UsageError, match="connections"):
        site.submit(site.script("true\n"))
    for sock in idle:
        sock.close()


def test_a_full_spool_ends_the_job_and_not_the_service(site):
    (site.root / "prologue.sleep").write_text("0.3")
    job = site.script("#!/bin/sh\ntouch ran\n")
    site.submit("-d", str(site.root), job)
    site.hook("prologue", f"1.{HOST}")
    shutil.rmtree(site.spool / "jobs")  # no state can be written any more
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-2"
    assert not (site.root / "ran").exists(), "a job that could be lost track of is not started"


def test_a_queue_of_an_older_layout_gets_numbers_after_its_own(site):
    (site.spool / "jobs" / "7").mkdir()
    assert not (site.spool / "counter").exists()
    assert site.submit("-W", "block=true", "-o", "out", site.script("#!/bin/sh\necho hi\n")) == 0
    assert site.hook("epilogue", f"8.{HOST}")[9] == "0"


def test_a_descriptor_that_takes_long_to_close_does_not_hold_up_the_end(site):
    """close(2) of the last descriptor of a socket with SO_LINGER waits for the other side."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stuck = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stuck.send(b"x" * 65536)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(site.paths.run / "local.sock"))
            socket.send_fds(client, [b"{"], [stuck.fileno()])
            stuck.setblocking(True)
            stuck.close()  # the service has the last one
            client.sendall(b'"op": "list"}\n')
            assert b"jobs" in client.recv(1000)
            started = time.monotonic()
            time.sleep(0.3)
        try:
            assert site.stop() == 0
            assert time.monotonic() - started < 5
        finally:
            other.close()
