"""Ends of jobs in the real agent: signals, leftovers, slow and lost hosts, garbage."""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from local_agent import HostedAgent, run, sh
from patience import LONG, with_more_time
from processes import alive
from vtorque_linux_guest.agent.build import build_agent
from vtorque_linux_guest.job import connection
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import AgentError, FrameKind, frame
from vtorque_linux_guest.job.start_request import Pty
from vtorque_linux_guest.job.stream import Session

pytestmark = pytest.mark.e2e

PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable
DEVNULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def wait_until(what: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"timed out after {seconds:g} s"
        time.sleep(0.02)


def test_signal_reaches_the_script_and_its_children(session: Session) -> None:
    script = "trap 'echo got; exit 7' TERM; echo up; sleep 1000 & wait"
    assert when_up(session, script, lambda events: events.signal(signal.SIGTERM)) == (7, b"got\n")


def test_agent_that_answers_late_runs_the_job(
    agent: HostedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent gets two HELLOs at once with zeros between, and answers both."""
    monkeypatch.setattr(connection, "RESYNC_FIRST", 0.2)
    session = Session(agent.connect())
    agent.process.send_signal(signal.SIGSTOP)
    hello = threading.Thread(target=session.hello, args=(time.monotonic() + LONG,))
    hello.start()
    wait_until(lambda: session._hellos > 1 and not session._out)
    agent.process.send_signal(signal.SIGCONT)
    hello.join(LONG)
    status, out, _ = run(session, sh("echo ran; exit 4"))
    assert (status.code, out) == (4, b"ran\n")


def when_up(session: Session, script: str, act: Callable[[Events], None]) -> tuple[int, bytes]:
    """Run a script, act when it has printed "up"; return its code and its further output."""
    read, write = os.pipe()
    with Events() as events, os.fdopen(read, "rb") as said:

        def wait() -> None:
            assert said.readline() == b"up\n"
            act(events)

        thread = threading.Thread(target=wait)
        thread.start()
        status = session.run(sh(script), None, write, DEVNULL, events)
        os.close(write)
        thread.join(180)
        return status.code, said.read()


def test_signal_sent_by_a_handler_reaches_the_job(session: Session) -> None:
    got: list[Events] = []
    before = signal.signal(signal.SIGALRM, lambda *_: got[0].signal(signal.SIGKILL))

    def ring(events: Events) -> None:
        got.append(events)
        os.kill(os.getpid(), signal.SIGALRM)

    try:
        assert when_up(session, "echo up; exec sleep 60", ring) == (128 + signal.SIGKILL, b"")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_end_of_a_pty_job_kills_its_background_processes(session: Session) -> None:
    start = sh("sleep 61 & echo $!; tty; exit 3", pty=Pty("dumb", 24, 80))
    status, out, _ = run(session, start)
    pid, tty = out.split()
    assert (status.code, tty[:9]) == (3, b"/dev/pts/")
    assert not alive(int(pid))


def test_background_child_holding_the_pipe_is_killed_after_a_grace(session: Session) -> None:
    script = "(sleep 0.4; echo late; exec sleep 1000) & echo $!; exit 5"
    for _ in range(10):  # on a busy machine it may print it after the grace, which is a second
        status, out, _ = run(session, sh(script))
        pid, *late = out.split()
        assert status.code == 5
        assert not alive(int(pid))
        if late:
            break
    assert late == [b"late"]


def test_leftover_process_without_streams_is_killed_without_grace(tmp_path: Path) -> None:
    """The grace period of this agent is one hour."""
    said: list[bytes] = []

    def job() -> None:
        with HostedAgent(binary) as agent:
            agent.ready()
            session = agent.session()
            said.append(run(session, sh("sleep 60 > /dev/null 2>&1 < /dev/null & echo $!"))[1])

    binary = tmp_path / "vtorque-agent"
    build_agent(binary, "gcc", ("-DVT_DRAIN_MS=3600000",))
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(LONG)
    assert said, "the agent waited for the grace period"
    assert not alive(int(said[0]))


def test_daemon_in_a_separate_session_neither_blocks_nor_is_killed(session: Session) -> None:
    script = """
    f=$PWD/there.$$; export f; trap 'rm -f $f' EXIT
    setsid sh -c 'echo $$; : >$f; exec sleep 1000' &
    timeout 30 sh -c 'until [ -e $f ]; do sleep 0.02; done' || exit 3
    exit 2
    """
    status, out, _ = run(session, sh(script))
    assert status.code == 2
    assert alive(int(out))
    os.kill(int(out), signal.SIGKILL)


def test_endless_background_writer_does_not_hold_the_job(session: Session) -> None:
    status = session.run(sh("yes & exit 0"), None, DEVNULL, DEVNULL)
    assert status.code == 0


def test_slow_reader_loses_no_output_and_signals_arrive(session: Session) -> None:
    with_more_time(partial(read_late, session), 0.3, 3, 15)


def read_late(session: Session, seconds: float) -> None:
    read, write = os.pipe()
    script = (
        "trap 'echo term >&2; exit 9' USR1; echo up >&2; head -c 8000000 /dev/zero;"
        "while :; do sleep 0.1; done"
    )
    got = bytearray()
    with Events() as events, tempfile.TemporaryFile() as err:

        def late() -> None:
            wait_until(lambda: os.pread(err.fileno(), 3, 0) == b"up\n")
            time.sleep(seconds)  # no process reads: windows and pipes fill up
            events.signal(signal.SIGUSR1)
            time.sleep(seconds)
            while part := os.read(read, 65536):
                got.extend(part)

        reader = threading.Thread(target=late)
        reader.start()
        status = session.run(sh(script), None, write, err.fileno(), events)
        os.close(write)
        reader.join(60)
        os.close(read)
        err.seek(0)
        assert b"term" in err.read()
    assert status.code == 9
    assert bytes(got) == bytes(len(got)) and len(got) > 1_000_000


def test_blocked_stdout_does_not_block_stderr_signals_or_kill(session: Session) -> None:
    read, write = os.pipe()
    err_read, err_write = os.pipe()
    with Events() as events:

        def kill_when_stderr_comes() -> None:
            assert os.read(err_read, 100) == b"err\n"  # while stdout is stuck
            events.signal(signal.SIGKILL)
            time.sleep(0.3)
            while os.read(read, 1 << 20):
                pass

        thread = threading.Thread(target=kill_when_stderr_comes)
        thread.start()
        script = "cat /dev/zero & sleep 0.7; echo err >&2; wait"
        status = session.run(sh(script), None, write, err_write, events)
        os.close(write)
        thread.join(180)
    for fd in (read, err_read, err_write):
        os.close(fd)
    assert status.code == 137


def test_closed_stdout_sends_sigpipe_to_the_program(session: Session) -> None:
    read, write = os.pipe()
    os.close(read)
    status = session.run(sh("exec cat /dev/zero"), None, write, DEVNULL)
    os.close(write)
    assert status.signal == signal.SIGPIPE
    assert status.lost == ("stdout: Broken pipe",)


def test_full_disk_is_reported(session: Session) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    status = session.run(sh("echo x; sleep 0.2; exit 4"), None, full, DEVNULL)
    os.close(full)
    assert (status.code, status.lost) == (4, ("stdout: No space left on device",))


def test_unread_stdin_does_not_hold_the_job(session: Session) -> None:
    status, out, _ = run(session, sh("exec 0<&-; sleep 0.3; echo ok"), b"x" * 3_000_000)
    assert (status.code, out) == (0, b"ok\n")
    assert run(session, sh("cat"), b"clean")[1] == b"clean"


def test_host_disconnect_kills_the_job_and_the_next_job_runs(agent: HostedAgent) -> None:
    first = agent.connect()
    session = Session(first)
    session.hello(time.monotonic() + 20)
    pids = os.pipe()
    with Events() as events:

        def leave() -> None:
            os.read(pids[0], 100)
            events.stop("test")

        threading.Thread(target=leave).start()
        script = f"trap 'echo term > {agent.home}/term; exit' TERM; echo up; sleep 60 & wait"
        with pytest.raises(Exception, match="test"):
            session.run(sh(script), None, pids[1], DEVNULL, events)
    first.close()
    wait_until((agent.home / "term").exists)
    again = agent.session()
    assert run(again, sh("echo again"))[1] == b"again\n"
    for fd in pids:
        os.close(fd)


def test_disconnect_kills_a_job_that_ignores_term(agent: HostedAgent) -> None:
    first = agent.connect()
    first.settimeout(180)
    session = Session(first)
    session.hello(time.monotonic() + 20)
    pid_file = agent.home / "pid"
    with Events() as events:

        def leave() -> None:
            wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
            events.stop("test")

        threading.Thread(target=leave).start()
        with pytest.raises(Exception, match="test"):
            session.run(
                sh(f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 1; done"),
                None,
                DEVNULL,
                DEVNULL,
                events,
            )
    pid = int(pid_file.read_text())
    first.close()
    closed = time.monotonic()
    second = agent.connect()
    time.sleep(0.3)
    lives = alive(pid)
    assert lives or time.monotonic() - closed > 4.5  # its grace; a new session ends it
    following = Session(second)
    following.hello(time.monotonic() + 20)
    assert run(following, sh("echo after"))[1] == b"after\n"
    assert not alive(pid)
    second.close()


def test_new_session_after_a_truncated_frame_runs_a_job(agent: HostedAgent) -> None:
    connection = agent.connect()
    session = Session(connection)
    session.hello(time.monotonic() + 20)
    connection.setblocking(True)
    connection.sendall(frame(FrameKind.START, 0, b"x" * 60_000)[:100])  # a host that died here
    following = Session(connection)  # virtio: the next host uses the same byte stream
    following.hello(time.monotonic() + 20)
    assert run(following, sh("echo synced"))[1] == b"synced\n"
    connection.close()


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 8,
        frame(FrameKind.DATA, 1, b"x"),
        frame(FrameKind.EXIT, 0, b"xxxx"),
        frame(FrameKind.SIGNAL, 0, b"\xff\0\0\0"),
        frame(FrameKind.START, 1, b"\x01\xff\xff\xff\xff"),
        frame(FrameKind.START, 1, b"\x02\x02\0\0\0x\0"),
        frame(FrameKind.FILE, 0, b"../x"),
        frame(FrameKind.FILE, 1, b"content"),
    ],
)
def test_garbage_gets_an_error_and_a_new_hello_helps(agent: HostedAgent, bad: bytes) -> None:
    connection = agent.connect()
    session = Session(connection)
    session.hello(time.monotonic() + 20)
    connection.send(bad)
    with pytest.raises(AgentError):
        run(session, sh("sleep 60"))
    session.hello(time.monotonic() + 20)
    assert run(session, sh("echo fine"))[1] == b"fine\n"
    connection.close()
