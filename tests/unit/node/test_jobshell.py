"""The job wrapper with a double of the guest type: ``FakeDriver`` records its calls."""

import contextlib
import os
import pty
import pwd
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import LONG
from vtorque_core.api.batch_system import ShellStart
from vtorque_core.api.guest_driver import GuestDied, ReadyGuest, Streams
from vtorque_core.api.strategies import GuestType
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.node.shell import proof as proofs
from vtorque_core.node.shell.jobshell import PluginCalls, await_local_proof, import_drivers, run_job
from vtorque_core.node.shell.proof import Proof
from vtorque_pbs.shell import PbsJobShell

ME = os.getuid()
JOB = "42.srv"
GUESTS = (
    ReadyGuest("vt-42-1", "vn-1", 1, Path("/r/1")),
    ReadyGuest("vt-42-0", "vn-0", 0, Path("/r/0")),
)
READY = Proof(
    JobAttempt(JOB, 0, "u", ME), "ready", guest_type="fake", plugin="fake-plugin", guests=GUESTS
)


class FakeDriver:
    """Stands in for a guest type's driver; ends with ``result`` or raises it."""

    def __init__(self, result) -> None:
        self.result = result
        self.calls = []

    def run(self, guest, script, streams):
        self.calls.append((guest, script, streams))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class FakePlugins:
    """Stands in for ``Plugins``: one guest type, and the requested plugin names."""

    def __init__(self, driver) -> None:
        self.driver = driver
        self.loaded = []

    def load(self, name):
        self.loaded.append(name)
        return self

    def guest_type(self, name):
        assert name == "fake"
        return GuestType("fake", frozenset(), lambda: self.driver)


class ShellJob:
    def __init__(self, root) -> None:
        root.chmod(0o755)
        self.root = root
        self.paths = Paths(state=root, run=root)
        self.script = root / "42.srv.SC"
        self.script.write_bytes(b"#!/bin/sh\ntouch ran\n\xff\x00")
        self.environ = {"PBS_JOBID": JOB, "PBS_ENVIRONMENT": "PBS_BATCH"}
        self.driver = FakeDriver(0)
        self.after = []
        self.companions = []

    @contextlib.contextmanager
    def beside(self, proof):
        self.companions.append((proof.job.id, "begins", len(self.driver.calls)))
        yield
        self.companions.append((proof.job.id, "ends", len(self.driver.calls)))

    def run(self, result=0, line=None, stdin=None, argv=(), meanwhile=None, shell=None, **environ):
        self.driver = FakeDriver(result)
        self.plugins = FakePlugins(self.driver)
        if stdin is None:
            stdin, write = os.pipe()
            os.write(write, f"{self.script}\n".encode() if line is None else line)
            os.close(write)
        files = [os.open(self.root / n, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for n in ("o", "e")]
        calls = PluginCalls(
            load=self.plugins.load,
            beside=self.beside,
            after=lambda proof, code: self.after.append((proof.job.id, code)),
            meanwhile=meanwhile,
        )
        code = run_job(
            self.paths,
            shell or PbsJobShell(),
            argv,
            calls=calls,
            environ=self.environ | environ,
            streams=Streams(stdin, *files),
            owner_uid=ME,
        )
        for fd in (stdin, *files):
            os.close(fd)
        return code

    @property
    def said(self):
        return (self.root / "e").read_text()

    @property
    def seen(self):
        return self.driver.calls[0][1]

    def ran_nothing(self):
        return not self.driver.calls and not (self.root / "ran").exists()


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return ShellJob(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 42, 143])
def test_exit_status_of_the_script_is_that_of_the_job(job, code):
    proofs.write(job.paths, READY)
    assert job.run(code) == code
    guest, script, streams = job.driver.calls[0]
    assert (guest.name, guest.rank, str(guest.run_dir)) == ("vt-42-0", 0, "/r/0")
    assert script.content == job.script.read_bytes() and script.name == "42.srv.SC"
    assert (streams.stdin, streams.terminal) == (None, False)
    assert job.plugins.loaded == ["fake-plugin"] and job.said == ""


def test_missing_options_of_the_job_are_printed_first(job, capfd):
    proofs.write(job.paths, replace(READY, detail=("runs without \x1b[1mscam",)))
    assert job.run() == 0
    assert job.said == "vtorque: warning: runs without \\x1b[1mscam\n"
    assert await_local_proof(job.paths, JOB, owner_uid=ME) == 0
    assert "warning: runs without" in capfd.readouterr().err


def test_values_of_the_proof_and_batch_system_reach_the_script(job, monkeypatch):
    texts = {"vm_prologue": b"p", "vm_epilogue": b"e"}
    sums = {name: proofs.digest(text) for name, text in texts.items()}
    given = replace(  # noqa: S604
        READY, shell="/bin/bash", files=sums, grace=3.0, environ={"DISTRO": "SLG"}
    )
    for name, text in texts.items():
        path = proofs.user_file_path(job.paths, READY.job, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    proofs.write(job.paths, given)
    mask = os.umask(0o027)
    job.run(line=f"{job.script} a 'b c' \"d\ne\"\n".encode(), DISTRO="mine", KEEP="1", TMPDIR="/t")
    os.umask(mask)
    seen = job.seen
    assert list(seen.args) == ["a", "b c", "d\ne"]
    assert (seen.interpreter, seen.prologue, seen.epilogue, seen.grace) == (
        "/bin/bash",
        b"p",
        b"e",
        3,
    )
    assert seen.environ["DISTRO"] == "SLG" and seen.environ["KEEP"] == "1"
    assert "TMPDIR" not in seen.environ and seen.environ["PBS_JOBID"] == JOB
    assert seen.environ["SHELL"] == (pwd.getpwuid(ME).pw_shell or "/bin/sh")
    assert seen.cwd == str(job.root) and seen.umask == 0o027 and not seen.merge
    assert seen.limits["NOFILE"][0] > 0 and "DATA" not in seen.limits


@pytest.mark.parametrize(("given", "ours"), [({}, True), ({"B": ""}, False), ({"C": "1"}, True)])
def test_variable_gives_way_to_variables_that_the_user_has_set(job, given, ours):
    proofs.write(job.paths, replace(READY, environ={"A": "ours"}, unless={"A": ("A", "B")}))
    job.run(**given)
    assert job.seen.environ.get("A") == ("ours" if ours else None)
    job.run(A="mine")
    assert job.seen.environ["A"] == "mine"


def test_paths_follow_the_home_of_the_guest(job):
    home = pwd.getpwuid(ME).pw_dir.rstrip("/")
    proofs.write(job.paths, replace(READY, environ={"HOME": "/home/u"}))
    job.run(PBS_O_INITDIR=f"{home}/run", PBS_O_WORKDIR=home, OTHER=home)
    assert job.seen.cwd == "/home/u/run" and job.seen.environ["PBS_O_WORKDIR"] == "/home/u"
    assert job.seen.environ["OTHER"] == home
    job.run(PBS_O_INITDIR=f"{home}2/run")
    assert job.seen.cwd == f"{home}2/run"


def test_jobshell_maps_both_paths_of_a_linked_home(job, tmp_path, monkeypatch):
    """The batch system may use the path that getcwd(3) returns."""
    (tmp_path / "data").mkdir()
    (tmp_path / "home").symlink_to("data")
    account = SimpleNamespace(pw_dir=f"{tmp_path}/home", pw_shell="/bin/sh", pw_name="u")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    proofs.write(job.paths, replace(READY, environ={"HOME": "/home/u"}))
    job.run(PBS_O_INITDIR=f"{tmp_path}/data/run", PBS_O_WORKDIR=f"{tmp_path}/home/x")
    assert (job.seen.cwd, job.seen.environ["PBS_O_WORKDIR"]) == ("/home/u/run", "/home/u/x")


def test_missing_proof_runs_nothing(job):
    assert job.run() == 120
    assert job.ran_nothing() and "nothing was run" in job.said and job.said.count("\n") == 1


def test_missing_user_prologue_runs_nothing(job):
    proofs.write(job.paths, replace(READY, files={"vm_prologue": proofs.digest(b"p")}))
    assert job.run() == 122
    assert job.ran_nothing() and "vm_prologue: No such file" in job.said


def test_forged_proof_runs_nothing(job):
    proofs.write(job.paths, READY)
    job.paths.proof(JOB).chmod(0o666)
    assert job.run() == 120
    assert job.ran_nothing() and "can be written by others" in job.said


@pytest.mark.parametrize(("state", "code"), [("refused", 121), ("host_fault", 122)])
def test_failed_start_prints_its_reason(job, state, code):
    proofs.write(job.paths, Proof(JobAttempt(JOB, 0, "u", ME), state, "boot: no\nkernel\x1b"))
    assert job.run() == code
    assert job.ran_nothing() and job.said == "vtorque: boot: no\\nkernel\\x1b\n"


def test_jobshell_waits_while_the_guests_start(job):
    starting = replace(READY, state="starting", deadline=time.monotonic() + 60)
    proofs.write(job.paths, starting)
    timer = threading.Timer(0.2, proofs.write, (job.paths, READY))
    timer.start()
    assert job.run(7) == 7
    assert timer.finished.is_set(), "the script ran before the guests were ready"
    timer.join()


@pytest.mark.parametrize(("nodes", "code"), [(("n1",), 0), (("n1", "n2"), 122)])
def test_jobshell_waits_only_for_nodes_named_by_the_proof(job, monkeypatch, nodes, code):
    """Other nodes of a mixed request have no guests, whatever the batch system tells the job."""
    (job.root / "pbsdsh").write_text(f'#!/bin/sh\necho "$@" > {job.root}/called; exit 3\n')
    (job.root / "pbsdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{job.root}:/usr/bin:/bin")
    proofs.write(job.paths, replace(READY, nodes=nodes))
    assert job.run(PBS_NUM_NODES="4") == code
    assert (job.root / "called").exists() == (len(nodes) > 1)
    assert ("not all of the job's 2 nodes" in job.said) == (len(nodes) > 1)


def test_jobshell_ends_after_the_start_deadline(job):
    proofs.write(job.paths, replace(READY, state="starting", deadline=time.monotonic() - 6))
    assert job.run() == 120
    assert job.ran_nothing() and "start_timeout" in job.said


def test_jobshell_ends_when_the_prologue_was_killed(job):
    """The kernel may kill the prologue for lack of memory, long before the deadline."""
    root = subprocess.Popen(["sleep", "1000"])
    here = {"namespace": proofs.pid_namespace(), "deadline": time.monotonic() + 1000}
    proofs.write(job.paths, replace(READY, state="starting", starter=root.pid, **here))
    timer = threading.Timer(0.2, root.kill)
    timer.start()
    assert job.run() == 122
    timer.join()
    root.wait()
    assert job.ran_nothing() and "ended while it was starting the guests" in job.said


def test_jobshell_locks_a_requeued_proof_and_waits(job):
    """Root waits for that lock before it asks the server, which must find the job's processes."""
    failed = replace(READY, state="requeued", reason="no", deadline=time.monotonic() + 1000)
    proofs.write(job.paths, failed)
    seen = []

    def root():
        seen.append(proofs.await_lock(job.paths, failed, LONG))
        proofs.write(job.paths, replace(failed, state="host_fault"))

    thread = threading.Thread(target=root)
    thread.start()
    assert job.run() == 122
    thread.join()
    assert seen == [True]
    assert job.ran_nothing() and job.said == "vtorque: no\n"


def test_jobshell_ends_at_the_deadline_without_a_requeue(job):
    failed = replace(READY, state="requeued", reason="no", deadline=time.monotonic() - 6)
    proofs.write(job.paths, failed)
    assert job.run() == 122
    assert job.ran_nothing() and "no; the job could not be requeued" in job.said


def test_await_lock_returns_false_for_a_removed_or_replaced_proof(job):
    failed = replace(READY, state="requeued")
    assert not proofs.await_lock(job.paths, failed, LONG)
    proofs.write(job.paths, replace(failed, reason="of the next attempt"))
    assert not proofs.await_lock(job.paths, failed, LONG)


def test_prologue_that_ended_after_ready_is_not_taken_as_killed(job, monkeypatch):
    """The job shell reads the prologue's last message after it has seen the prologue's end."""
    starting = replace(READY, state="starting", deadline=time.monotonic() + 1000)
    proofs.write(job.paths, starting)

    def ends_now(self):
        proofs.write(job.paths, READY)
        return True

    monkeypatch.setattr(Proof, "starter_has_ended", ends_now)
    assert job.run(7) == 7


def test_starter_in_another_pid_namespace_is_not_taken_as_ended(job):
    starting = replace(READY, state="starting", starter=2**22 - 1, namespace=1)
    assert not starting.starter_has_ended()
    assert replace(starting, namespace=proofs.pid_namespace()).starter_has_ended()
    assert not replace(starting, starter=0, namespace=proofs.pid_namespace()).starter_has_ended()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (GuestDied("no heartbeat"), 123, "the guest vn-0 (vt-42-0) died"),
        (HostFault("socket gone"), 122, "socket gone"),
        (Refused("vm_prologue failed"), 121, "vm_prologue failed"),
        (RuntimeError("a defect"), 122, "RuntimeError: a defect"),
    ],
)
def test_driver_errors_end_in_one_line(job, error, code, words):
    proofs.write(job.paths, READY)
    assert job.run(error) == code
    assert words in job.said and job.said.count("\n") == 1
    assert not (job.root / "ran").exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [(b"", 2), (b"\n", 2), (b"/x 'open\n", 2), (b"/nonexistent.SC\n", 1), (b"/proc\n", 1)],
)
def test_bad_script_lines_are_refused(job, line, code):
    proofs.write(job.paths, READY)
    assert job.run(line=line) == code
    assert job.ran_nothing() and job.said.startswith("vtorque: ")


def test_missing_job_id_is_refused(job):
    job.environ = {}
    assert job.run() == 2 and "PBS_JOBID" in job.said


def test_proof_without_rank_0_runs_nothing(job):
    proofs.write(job.paths, replace(READY, guests=GUESTS[:1]))
    assert job.run() == 120 and job.ran_nothing()


def test_merged_streams_are_detected(job):
    proofs.write(job.paths, READY)
    stdin, write = os.pipe()
    os.write(write, f"{job.script}\n".encode())
    os.close(write)
    out = os.open(job.root / "both", os.O_RDWR | os.O_CREAT)
    driver = FakeDriver(0)
    fake = FakePlugins(driver)
    streams = Streams(stdin, out, out)
    run_job(
        job.paths,
        PbsJobShell(),
        environ=job.environ,
        calls=PluginCalls(fake.load),
        streams=streams,
        owner_uid=ME,
    )
    assert driver.calls[0][1].merge is True
    os.close(stdin)
    os.close(out)


def test_interactive_job_gets_the_terminal(job):
    proofs.write(job.paths, READY)
    leader, terminal = pty.openpty()
    assert job.run(5, stdin=terminal) == 5
    _, script, streams = job.driver.calls[0]
    assert script.interactive and script.content == b"" and streams.terminal
    assert streams.stdin == terminal
    os.close(leader)


def test_command_of_an_interactive_job_gets_the_terminal(job):
    proofs.write(job.paths, READY)
    leader, terminal = pty.openpty()
    assert job.run(0, stdin=terminal, argv=("-c", "stty size")) == 0
    _, script, streams = job.driver.calls[0]
    assert not script.interactive and script.content == b"stty size" and streams.terminal
    os.close(leader)


class StepShell(PbsJobShell):
    """Starts a command instead of a script, as Slurm's job shell does for a step."""

    def read_start(self, argv, environ, stdin):
        return ShellStart(environ["PBS_JOBID"], None, command=argv[1])


@pytest.mark.parametrize(("guests", "rank"), [(GUESTS, 0), (GUESTS[:1], 1)])
def test_command_reads_standard_input_also_on_nodes_without_the_first_guest(job, guests, rank):
    """A step of Slurm runs on each node: in the first guest that its proof has."""
    proofs.write(job.paths, replace(READY, guests=guests))
    reader, writer = os.pipe()
    assert job.run(0, stdin=reader, argv=("-c", "cat"), shell=StepShell()) == 0
    guest, _, streams = job.driver.calls[0]
    assert (guest.rank, streams.stdin, streams.terminal) == (rank, reader, False)
    os.close(writer)


@pytest.mark.parametrize(
    ("result", "code"), [(0, 0), (7, 7), (GuestDied("gone"), 123), (KeyboardInterrupt(), 130)]
)
def test_after_script_hook_gets_the_exit_status(job, result, code):
    proofs.write(job.paths, READY)
    assert job.run(result) == code
    assert job.after == [(JOB, code)]


@pytest.mark.parametrize("terminal", [False, True])
def test_companion_starts_and_ends_with_the_script(job, terminal):
    proofs.write(job.paths, READY)
    leader, end = pty.openpty()
    assert job.run(5, stdin=end if terminal else None) == 5
    os.close(leader)
    if not terminal:
        os.close(end)
    assert job.companions == [(JOB, "begins", 0), (JOB, "ends", 1)]


def test_companion_runs_while_the_guests_boot(job):
    """On Torque only the companion of a booting job answers vmgr, which would wait for 20 s."""
    proofs.write(job.paths, replace(READY, state="starting", deadline=time.monotonic() + 60))

    def meanwhile():
        assert job.companions == [(JOB, "begins", 0)]
        proofs.write(job.paths, replace(READY, state="refused", reason="no"))

    assert job.run(meanwhile=meanwhile) == 121
    assert job.companions == [(JOB, "begins", 0), (JOB, "ends", 0)]


def test_after_script_hook_is_not_called_if_the_script_did_not_run(job):
    proofs.write(job.paths, replace(READY, state="refused", reason="no"))
    assert job.run() == 121
    assert job.companions == []
    proofs.write(job.paths, READY)
    leader, terminal = pty.openpty()
    assert job.run(0, stdin=terminal) == 0
    os.close(leader)
    assert job.after == []


@pytest.mark.root
def test_drivers_are_imported_while_guests_start(job):
    """Imports after READY would delay the job, so everything is imported before."""
    proofs.write(job.paths, replace(READY, state="starting", deadline=time.monotonic() + 60))
    ready = replace(READY, guest_type="linux", plugin="linux-guest")
    program = f"""
import os, sys
from pathlib import Path, PosixPath
os.geteuid = lambda: 1  # the job shell is never root
from vtorque_core.api.guest_driver import ReadyGuest, Streams
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_pbs.shell import PbsJobShell
from vtorque_core.node.shell import jobshell, proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.config.plugins import Plugins
paths, ready = Paths(Path({str(job.root)!r}), Path({str(job.root)!r})), {ready!r}
plugins, before = Plugins.load(node=False), []
def meanwhile():
    jobshell.import_drivers(plugins)
    before.extend(sys.modules)
    proof.write(paths, ready)
jobshell.run_job(
    paths, PbsJobShell(), environ={job.environ!r}, owner_uid={ME},
    calls=jobshell.PluginCalls(lambda _: plugins, meanwhile=meanwhile),
)
print(*sorted(set(sys.modules) - set(before)) if before else ["the calls were not made"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=f"{job.script}\n", capture_output=True, text=True,
        check=True, timeout=180,
    )  # fmt: skip
    assert "run.sock: No such file" in done.stderr, "the driver was not called"
    assert done.stdout.split() == []


def test_no_job_waits_for_rarely_used_imports():
    """The guests may be ready before the job shell starts: then all of these are waited for."""
    code = """
import sys
from pathlib import Path
import vtorque_core.cli.vtorque, vtorque_core.cli.hook, vtorque_core.node.shell.jobshell
from vtorque_core.config.load import load
_, plugins = load(Path("/nonexistent"), node=False, new=True)
plugins.batch_system("local").shell()
plugins.guest_type("linux").driver()
print(*sys.modules)
"""
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=180)
    few = {"hashlib", "logging", "subprocess", "termios"}
    assert not few & set(done.stdout.split())


def test_driver_with_an_import_error_does_not_stop_the_wait():
    def broken():
        raise ImportError("not here")

    plugins = FakePlugins(None)
    plugins.guest_types = lambda: {"fake": GuestType("fake", frozenset(), broken)}
    import_drivers(plugins)
