"""A job run by the real agent (a process of this machine) through the real driver."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import sparing
from local_agent import HostedAgent
from patience import LONG
from vtorque_core.api import JobAttempt, Paths
from vtorque_core.api.guest_driver import GuestDied, ReadyGuest, Script, Streams
from vtorque_core.node.shell import proof
from vtorque_linux_guest.guest.contract import CANCEL_MARKER, EPILOGUE_MARKER, SSH_CONFIG
from vtorque_linux_guest.job import display, run_job, site_epilogue
from vtorque_linux_guest.job.site_epilogue import SiteEpilogue

PATH = {"PATH": os.environ["PATH"], "TERM": "dumb"}


@dataclass
class ForwardingGuest:
    """A ready guest: jobs' connections are forwarded to the agent, like by QEMU."""

    agent: HostedAgent
    run_dir: Path

    def run(
        self, content: bytes, stdin: int | None = None, *, terminal: bool = False, **more
    ) -> tuple[int, bytes, bytes]:
        more = {"environ": PATH, "cwd": "/"} | more
        script = Script("42.srv.SC", content, **more)
        ready = ReadyGuest("vt", "vn1", 0, self.run_dir, "tiny")
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = Streams(stdin, out.fileno(), err.fileno(), terminal=terminal)
            code = run_job.run(ready, script, streams)
            out.seek(0)
            err.seek(0)
            return code, out.read(), err.read()


@pytest.fixture
def guest(binary: Path, tmp_path: Path) -> Iterator[ForwardingGuest]:
    with HostedAgent(binary) as agent:
        agent.ready()
        with _switchboard(agent, tmp_path / "run.sock"):
            yield ForwardingGuest(agent, tmp_path)


@contextmanager
def _switchboard(agent: HostedAgent, path: Path) -> Iterator[None]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        while True:
            try:
                ours = listener.accept()[0]
            except OSError:
                return
            theirs = agent.connect()
            back = threading.Thread(target=_copy, args=(theirs, ours))
            back.start()
            _copy(ours, theirs)
            back.join(180)
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(180)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@contextmanager
def signalled(number: int, when: Path) -> Iterator[None]:
    """Send this process a signal when a file exists."""

    def send() -> None:
        deadline = time.monotonic() + 30
        while not when.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join(180)


def test_output_and_exit_code_are_those_of_the_script(guest: ForwardingGuest) -> None:
    text = b"#!/bin/sh\nprintf 'out\\000\\377'; printf err >&2; exit 3\n"
    assert guest.run(text) == (3, b"out\0\xff", b"err")


def test_script_has_its_name_arguments_directory_and_umask(guest: ForwardingGuest) -> None:
    text = b'#!/bin/sh\nbasename "$0"; echo "$2"; pwd; umask\n'
    code, out, _ = guest.run(text, args=("a", "b c"), cwd="/usr", umask=0o027)
    assert (code, out) == (0, b"42.srv.SC\nb c\n/usr\n0027\n")


def test_script_without_interpreter_line_is_run_by_the_login_shell(guest: ForwardingGuest) -> None:
    assert guest.run(b"echo hello\nexit 4\n")[:2] == (4, b"hello\n")


def test_login_shell_reads_the_user_profile_first(guest: ForwardingGuest) -> None:
    text = b'echo "$PROFILE $1"; exit 4\n'
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        Path(place, ".profile").write_text("PROFILE=read; export PROFILE\n")
        home = {"environ": {"HOME": place, "PATH": "/bin:/usr/bin"}, "login": True}
        for line in (b"", b"#!/bin/sh\n"):
            assert guest.run(line + text, args=("a",), **home)[:2] == (4, b"read a\n")
        assert guest.run(text, interpreter="/no/shell", **home)[0] == 127


def test_shell_of_option_s_overrides_the_interpreter_line(guest: ForwardingGuest) -> None:
    text = b"#!/bin/false\nprint('python')\n"
    python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
    assert guest.run(text, interpreter=python)[:2] == (0, b"python\n")


@pytest.mark.parametrize(
    ("text", "more", "code", "words"),
    [
        (
            b"#!/no/python3\n",
            {},
            127,
            b"its interpreter /no/python3 (#! line) is missing in image tiny.",
        ),
        (
            b"#!/no/python3 -u\n",
            {"login": True},
            127,
            b"its interpreter /no/python3 (#! line) is missing in",
        ),
        (b"#!/no/python3\n", {"login": True}, 127, b"vmgr images list shows the images"),
        (b"#!/bin/sh\r\n", {}, 127, b"interpreter"),
        (b"#!/etc/passwd\n", {}, 126, b"Permission denied"),
        (
            b"echo\n",
            {"interpreter": "/no/shell"},
            127,
            b"cannot run the shell /no/shell (-S): it is missing in image tiny. Use -S with a",
        ),
        (b"#!/bin/sh\n", {"interpreter": "/no/shell", "login": True}, 127, b"(-vm img=)"),
        (b"#!/bin/sh\n", {"cwd": "/no/dir"}, 126, b"working directory /no/dir"),
        (b"#!/bin/sh\n", {"environ": {"A": "x" * (3 << 20)}}, 126, b"cannot run"),
    ],
)
def test_script_that_cannot_run_is_explained(
    guest: ForwardingGuest, text: bytes, more: dict, code: int, words: bytes
) -> None:
    got, out, err = guest.run(text, **more)
    assert (got, out) == (code, b"")
    assert err.startswith(b"vtorque: ")
    assert words in err
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("login", [False, True])
@pytest.mark.parametrize("line", [b"#!/usr/bin/env no-python", b"#! /usr/bin/env -S no-python -u"])
def test_program_that_env_does_not_find_is_named(
    guest: ForwardingGuest, line: bytes, login: bool
) -> None:
    environ = {"PATH": "/usr/bin:/bin"}
    code, out, err = guest.run(line + b"\n", environ=environ, login=login)
    assert (code, out) == (127, b"")
    assert (
        b"exit status 127: if env did not find no-python (#! line), the reason is that image tiny"
        in err
    )


def test_exit_status_127_of_another_program_has_no_hint(guest: ForwardingGuest) -> None:
    assert guest.run(b"#!/bin/sh\nexit 127\n")[::2] == (127, b"")


def test_prologue_script_and_epilogue_share_one_environment(guest: ForwardingGuest) -> None:
    code, out, err = guest.run(
        b"#!/bin/sh\necho job $V\n",
        environ=PATH | {"V": "1"},
        prologue=b"echo before $V\n",
        epilogue=b"#!/bin/sh\necho after $V\n",
    )
    assert (code, out, err) == (0, b"before 1\njob 1\nafter 1\n", b"")


def test_failed_prologue_fails_the_job_and_prints_its_output(guest: ForwardingGuest) -> None:
    code, out, err = guest.run(b"#!/bin/sh\necho job\n", prologue=b"echo bad >&2; exit 9\n")
    assert (code, out) == (9, b"")
    assert err == b"bad\nvtorque: vm_prologue failed with exit code 9; the job script was not run\n"


@pytest.mark.parametrize(("script", "code"), [(b"exit 0", 5), (b"exit 3", 3)])
def test_failed_epilogue_counts_if_the_script_succeeded(
    guest: ForwardingGuest, script: bytes, code: int
) -> None:
    got, _, err = guest.run(script, epilogue=b"echo why >&2; exit 5")
    assert (got, err) == (code, b"why\nvtorque: vm_epilogue failed with exit code 5\n")


def test_site_epilogue_runs_if_the_guest_has_one(
    guest: ForwardingGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "EPILOGUE_CLIENT", "/bin/false")
    assert guest.run(b"exit 0")[0] == 0
    (guest.run_dir / EPILOGUE_MARKER).touch()
    code, _, err = guest.run(b"exit 0")
    assert (code, err) == (1, b"vtorque: the site's epilogue failed with exit code 1\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo bye; exit 0", "INFO site epilogue of vn1 (rank 3): done: bye"),
        ("echo why >&2; exit 3", "WARNING site epilogue of vn1 (rank 3): exit code 3: why"),
        (
            "sleep 1000",
            "WARNING site epilogue of vn1 (rank 3): not completed (limit 1 s): the unprivileged"
            " parser did not finish in time",
        ),
    ],
)
def test_root_runs_a_site_epilogue_that_the_job_shell_did_not_run(
    guest: ForwardingGuest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text,
    told,
) -> None:
    client = guest.agent.home / "client"
    client.write_text(f"#!/bin/sh\n{text}\n")
    client.chmod(0o755)
    monkeypatch.setattr(site_epilogue, "EPILOGUE_CLIENT", str(client))
    caplog.set_level("INFO")
    seconds = 1.0 if "sleep" in text else LONG
    SiteEpilogue(str(guest.run_dir), "vn1", 3, seconds).release()
    (record,) = caplog.records
    assert f"{record.levelname} {record.getMessage()}".startswith(told)


def test_full_port_does_not_block_the_release_of_a_guest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's user can access it, too, and may have connected until its queue was full."""
    with socket.socket(socket.AF_UNIX) as port, contextlib.ExitStack() as others:
        port.bind(str(tmp_path / "run.sock"))
        port.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                other = others.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(str(tmp_path / "run.sock"))
        SiteEpilogue(str(tmp_path), "vn1", 0, LONG).release()
    assert "not completed (limit " in caplog.text


def test_missing_guest_does_not_block_its_epilogue(tmp_path: Path) -> None:
    SiteEpilogue(str(tmp_path), "vn1", 0, LONG).release()


def test_login_shells_can_read_the_jobs_environment(guest: ForwardingGuest) -> None:
    value = "it's $(id)\n\\n"
    text = b'. "$(dirname "$0")/.vtorque-environment"; printf %s "$PBS_JOBNAME"; echo "$HOME"'
    text = b"unset PBS_JOBNAME HOME\n" + text
    environ = PATH | {"PBS_JOBNAME": value, "HOME": "/h", "BASH_FUNC_x%%": "() { :; }"}
    assert guest.run(text, environ=environ)[:2] == (0, value.encode() + b"\n")


def test_term_reaches_the_script(guest: ForwardingGuest) -> None:
    flag = guest.agent.home / "started"
    text = f"#!/bin/sh\ntrap 'echo got TERM; exit 7' TERM\ntouch {flag}\nsleep 60 & wait\n"
    with signalled(signal.SIGTERM, flag):
        code, out, _ = guest.run(text.encode())
    assert (code, out) == (7, b"got TERM\n")


def test_signal_just_before_the_wait_interrupts_it() -> None:
    """A wakeup descriptor that was set earlier still gets the signals."""
    read, write = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write)
    try:
        with run_job._SignalForwarder(LONG) as ending:
            assert signal.set_wakeup_fd(ending.events._write) == ending.events._write
            os.kill(os.getpid(), signal.SIGUSR1)
            assert ending.events.take()
            os.kill(os.getpid(), signal.SIGUSR2)
        assert signal.set_wakeup_fd(write) == write
        assert os.read(read, 16) == bytes([signal.SIGUSR1, signal.SIGUSR2])
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_script_killed_after_the_grace_gets_no_epilogue(guest: ForwardingGuest) -> None:
    flag = guest.agent.home / "started"
    text = f"#!/bin/sh\ntrap '' TERM\ntouch {flag}\nsleep 1000; sleep 1000\n"
    before = signal.getsignal(signal.SIGTERM)
    with signalled(signal.SIGTERM, flag):
        code, out, _ = guest.run(text.encode(), grace=0.3, epilogue=b"echo epilogue")
    assert (code, out) == (137, b"")
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_term_during_the_prologue_means_no_script(guest: ForwardingGuest) -> None:
    flag = guest.agent.home / "started"
    prologue = f"trap 'exit 0' TERM\ntouch {flag}\nsleep 60 & wait\n".encode()
    with signalled(signal.SIGTERM, flag):
        code, out, _ = guest.run(b"echo job", prologue=prologue)
    assert (code, out) == (143, b"")


@pytest.fixture
def cancelled(
    guest: ForwardingGuest, binary: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The guest's script for cancellation, with a separate agent without a status port."""
    script = guest.agent.home / "on-cancel"
    script.touch(0o755)
    monkeypatch.setattr(run_job, "ON_CANCEL", str(script))
    (guest.run_dir / CANCEL_MARKER).touch()
    socket_of = guest.run_dir / "cancel.sock"
    with HostedAgent(binary, status=False) as agent, _switchboard(agent, socket_of):
        yield script


def test_cancellation_script_runs_before_sigterm(guest: ForwardingGuest, cancelled: Path) -> None:
    """With the script's environment, while it still runs."""
    flag = guest.agent.home / "started"
    cancelled.write_text(f"#!/bin/sh\nrm {flag}; echo saving $V in $(pwd); echo e >&2; exit 3\n")
    trap = f"trap 'test -e {flag} || echo TERM; exit 7' TERM"
    text = f"#!/bin/sh\n{trap}\ntouch {flag}\nsleep 60 & wait\n"
    with signalled(signal.SIGTERM, flag):
        code, out, err = guest.run(text.encode(), environ=PATH | {"V": "1"}, grace=LONG)
    assert (code, out, err) == (7, b"saving 1 in /\nTERM\n", b"e\n")


def test_cancellation_script_gets_half_of_the_grace(
    guest: ForwardingGuest, cancelled: Path
) -> None:
    flag = guest.agent.home / "started"
    cancelled.write_text("#!/bin/sh\nsleep 1000\n")
    text = f"#!/bin/sh\ntrap 'echo TERM; exit 7' TERM\ntouch {flag}\nsleep 600 & wait\n"
    with signalled(signal.SIGTERM, flag):
        code, out, err = guest.run(text.encode(), grace=2.0)
    assert out in (b"TERM\n", b"") and code in (7, 137)  # it may not run in its half
    assert (
        b"the script for a canceled job (on_cancel) has failed: it exceeded its time limit of 1 s"
        in err
    )


def test_script_may_end_during_its_cancellation(guest: ForwardingGuest, cancelled: Path) -> None:
    """The epilogue must not get the SIGTERM that was meant for the script."""
    flag, end = guest.agent.home / "started", guest.agent.home / "end"
    cancelled.write_text(f"#!/bin/sh\ntouch {end}; sleep 0.2; echo saved\n")
    text = f"#!/bin/sh\ntouch {flag}\nuntil [ -e {end} ]; do sleep 0.01; done\nexit 5\n"
    with signalled(signal.SIGTERM, flag):
        code, out, _ = guest.run(text.encode(), grace=LONG, epilogue=b"sleep 0.1; echo epilogue")
    assert (code, out) == (5, b"saved\nepilogue\n")


def test_cancellation_script_is_skipped_without_its_agent(guest: ForwardingGuest) -> None:
    (guest.run_dir / CANCEL_MARKER).touch()
    flag = guest.agent.home / "started"
    text = f"#!/bin/sh\ntrap 'echo TERM; exit 7' TERM\ntouch {flag}\nsleep 60 & wait\n"
    with signalled(signal.SIGTERM, flag):
        code, out, err = guest.run(text.encode(), grace=LONG)
    assert (code, out) == (7, b"TERM\n")
    assert b"the script for a canceled job (on_cancel) has" in err


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_other_signals_are_forwarded(guest: ForwardingGuest, number: signal.Signals) -> None:
    flag = guest.agent.home / "started"
    name = number.name.removeprefix("SIG")
    text = f"#!/bin/sh\ntrap 'echo {name}; exit 0' {name}\ntouch {flag}\nsleep 60 & wait\n"
    with signalled(number, flag):
        assert guest.run(text.encode())[:2] == (0, f"{name}\n".encode())


def test_repeated_signal_is_forwarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torque's pbs_mom sends qsig's signal four times."""
    clock = [100.0]
    monkeypatch.setattr(run_job.time, "monotonic", lambda: clock[0])
    with run_job._SignalForwarder(1.0) as ending:
        for _ in range(4):
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            clock[0] += 0.1
        once = ending.events.take()
        clock[0] += 1.0
        os.kill(os.getpid(), signal.SIGUSR1)
        again = ending.events.take()
    assert len(once) == 2 * len(again) > 0 and once.startswith(again)


def test_script_killed_by_a_signal_has_its_exit_code(guest: ForwardingGuest) -> None:
    line = b"vtorque: the script was killed by signal 11 (Segmentation fault)\n"
    assert guest.run(b"#!/bin/sh\nkill -SEGV $$\n", login=True) == (139, b"", line)
    assert guest.run(b"#!/bin/sh\nkill -INT $$\n", login=True) == (130, b"", b"")
    assert guest.run(b"#!/bin/sh\nkill -SEGV $$\n") == (139, b"", b""), (
        "a message without a login shell"
    )


def test_stdin_is_passed_on(guest: ForwardingGuest) -> None:
    read, write = os.pipe()
    os.write(write, b"typed\n")
    os.close(write)
    try:
        assert guest.run(b"#!/bin/sh\ncat\n", stdin=read)[:2] == (0, b"typed\n")
    finally:
        os.close(read)


def test_guest_that_dies_is_named(guest: ForwardingGuest) -> None:
    flag = guest.agent.home / "started"

    def kill() -> None:
        while not flag.exists():
            time.sleep(0.01)
        for connection in guest.agent._open[2:]:
            connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(GuestDied, match="vn1: "):
        guest.run(f"#!/bin/sh\ntouch {flag}\nsleep 20\n".encode())
    thread.join(180)


def test_missing_run_port_is_a_dead_guest(tmp_path: Path) -> None:
    ready = ReadyGuest("vt", "vn1", 0, tmp_path)
    with pytest.raises(GuestDied, match=r"run\.sock: No such file"):
        run_job.run(ready, Script("s", b"", {}, "/"), Streams(None, 1, 2))


# The job shell as started by the batch system; its proof is this user's, who may not be root.
JOB_SHELL = """
import functools, os, sys
from vtorque_core.cli import hook
from vtorque_core.node.shell import jobshell
jobshell.run_job = functools.partial(jobshell.run_job, owner_uid=os.getuid())
sys.exit(hook.run(["jobshell", "--config", sys.argv[1]]))
"""
TRAPS = b"""#!/bin/sh
trap 'echo got TERM; exit 0' TERM
: >$STARTED
while :; do sleep 0.1; done
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("system", "code"),
    sparing.each(2, [("torque", -signal.SIGTERM), ("openpbs", -signal.SIGTERM), ("local", 0)]),
)
def test_canceled_job_shell_dies_of_sigterm_as_a_plain_job(
    guest: ForwardingGuest, tmp_path: Path, system: str, code: int
) -> None:
    """With exit status 0, jobs that depend on the job's success would start."""
    started = guest.agent.home / "started"
    config, script = tmp_path / "vtorque.toml", tmp_path / "42.srv.SC"
    config.write_text(
        f'[batch]\nsystem = "{system}"\n[paths]\nstate = "{tmp_path}"\nrun = "{tmp_path}"\n'
    )
    script.write_bytes(TRAPS)
    ready = ReadyGuest("vt", "vn1", 0, tmp_path)
    job = JobAttempt("42.srv", 0, "u", os.getuid())
    made = proof.Proof(job, "ready", guest_type="linux", plugin="linux-guest", guests=(ready,))
    proof.write(Paths(tmp_path, tmp_path), made)
    shell = subprocess.Popen(
        [sys.executable, "-c", JOB_SHELL, config], cwd="/",
        env=PATH | {"PBS_JOBID": "42.srv", "PBS_O_INITDIR": "/", "STARTED": str(started)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert shell.stdin is not None
    shell.stdin.write(f"{script}\n".encode())
    shell.stdin.close()
    shell.stdin = None
    deadline = time.monotonic() + LONG
    while not started.exists() and shell.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    shell.terminate()
    out, err = shell.communicate(timeout=LONG)
    assert (shell.returncode, out) == (code, b"got TERM\n"), err


def test_interactive_job_has_the_display_of_the_job_shell(guest, tmp_path, monkeypatch):
    """With its cookie; without a terminal, a display or a connection the job runs without one."""
    entry = b"\xff\xff" + b"".join(
        len(part).to_bytes(2, "big") + part for part in (b"", b"50", b"MIT-MAGIC-COOKIE-1", b"abc")
    )
    (tmp_path / "cookies").write_bytes(entry)
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift $(($# - 1)); exec sh -c "$1"\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / SSH_CONFIG).touch()
    monkeypatch.setitem(display.ENVIRON, "PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XAUTHORITY", str(tmp_path / "cookies"))
    monkeypatch.setenv("DISPLAY", "localhost:50.0")
    show = b'#!/bin/sh\necho $DISPLAY $XAUTHORITY; cat "${0%/*}/${XAUTHORITY##*/}"; exit 3\n'
    ours, theirs = pty.openpty()
    on_terminal = {"stdin": theirs, "terminal": True}
    code, out, err = guest.run(show, **on_terminal)
    assert (code, err) == (3, b"")
    assert out == b"localhost:50.0 /var/spool/vtorque/.vtorque-xauthority\r\n" + entry
    none = b"#!/bin/sh\necho none$DISPLAY$XAUTHORITY\n"
    assert guest.run(none)[:2] == (0, b"none\n")
    (tmp_path / SSH_CONFIG).unlink()
    code, out, err = guest.run(none, **on_terminal)
    assert (code, out) == (0, b"none\r\n")
    assert (
        err.startswith(b"vtorque: X11 forwarding does not work: the image has no sshd")
        and err.count(b"\n") == 1
    )
    monkeypatch.setenv("DISPLAY", "")
    assert guest.run(none, **on_terminal) == (0, b"none\r\n", b"")
    os.close(ours)
    os.close(theirs)


@contextmanager
def _other_program(guest: ForwardingGuest) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(guest.run_dir / "run.sock"))
        while not run_job._is_busy(ReadyGuest("vt", "vn1", 0, guest.run_dir)):
            time.sleep(0.01)
        yield other


def test_program_waits_for_the_end_of_another_one(guest: ForwardingGuest) -> None:
    """The guest has one port for programs: ``srun --jobid=`` beside the job's script waits."""
    with _other_program(guest) as other:
        threading.Timer(run_job.BUSY_SECONDS + 2, other.shutdown, (socket.SHUT_RDWR,)).start()
        code, out, err = guest.run(b"#!/bin/sh\necho ran\n")
    assert (code, out) == (0, b"ran\n")
    assert b"waiting until another program of this job in vn1 has ended" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_wait_and_nothing_is_run(guest: ForwardingGuest, number: int) -> None:
    with _other_program(guest):
        threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        code, out, _ = guest.run(b"#!/bin/sh\necho ran\n")
    assert (code, out) == (128 + number, b"")
