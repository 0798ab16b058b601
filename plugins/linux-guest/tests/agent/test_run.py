"""The real agent (compiled here, with sanitizers) against the real host side, without a VM."""

import hashlib
import os
import pwd
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from local_agent import ENV, HostedAgent, run, sh
from patience import LONG, eventually
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.frames import StartFailed
from vtorque_linux_guest.job.start_request import (
    FileArg,
    GuestFileData,
    Pty,
    StartMode,
    StartRequest,
)
from vtorque_linux_guest.job.stream import ExitStatus, Session

PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable
DEVNULL = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


@pytest.mark.parametrize("code", [0, 1, 42, 137, 255])
def test_exit_code_is_returned(session: Session, code: int) -> None:
    status, out, err = run(session, sh(f"exit {code}"))
    assert (status.code, status.signal, out, err) == (code, None, b"", b"")


def test_death_by_signal_is_128_plus_n(session: Session) -> None:
    status, _, _ = run(session, sh("kill -SEGV $$"))
    assert (status.signal, status.code) == (signal.SIGSEGV, 128 + signal.SIGSEGV)


def test_streams_are_separate_or_merged(session: Session) -> None:
    script = "echo out; echo err > /dev/stderr; cat"
    assert run(session, sh(script), b"in")[1:] == (b"out\nin", b"err\n")
    assert run(session, sh(script, merge=True), b"in")[1:] == (b"out\nerr\nin", b"")


def test_all_byte_values_both_ways(session: Session) -> None:
    data = bytes(range(256)) * 5000  # more than the windows and the pipes
    status, out, err = run(session, sh("cat; echo done >&2"), data)
    assert (status.code, out == data, err) == (0, True, b"done\n")


def test_fifty_megabytes_of_output_arrive_unchanged(session: Session) -> None:
    size, seed = 50_000_000, b"vtorque"
    block = hashlib.shake_256(seed).digest(1_000_000)
    program = (
        "import hashlib, sys\n"
        f"b = hashlib.shake_256({seed!r}).digest(1000000)\n"
        "for _ in range(50): sys.stdout.buffer.write(b)\n"
    )
    digest, got = hashlib.sha256(), 0
    read, write = os.pipe()

    def collect() -> None:
        nonlocal got
        while part := os.read(read, 1 << 20):
            digest.update(part)
            got += len(part)

    reader = threading.Thread(target=collect)
    reader.start()
    start = StartRequest(argv=(PYTHON, "-c", program), env=ENV)
    status = session.run(start, None, write, write)
    os.close(write)
    reader.join(LONG)
    os.close(read)
    assert (status.code, got) == (0, size)
    assert digest.digest() == hashlib.sha256(block * 50).digest()


def test_script_file_arguments_and_identity(agent: HostedAgent, session: Session) -> None:
    text = b'#!/bin/sh\nid -u; id -g; pwd; echo "$1|$2"; stat -c "%a %u" "$0"; echo "${0##*/}"\n'
    start = StartRequest(
        argv=(FileArg("job 1[2].SC"), "a b", "c"),
        env=ENV,
        files=(GuestFileData("job 1[2].SC", text), GuestFileData("other", b"x" * 200_000)),
    )
    status, out, err = run(session, start)
    expected = [agent.uid, agent.gid, agent.home, "a b|c", f"700 {agent.uid}", "job 1[2].SC"]
    assert (status.code, err) == (0, b"")
    assert out.decode().split("\n")[:-1] == [str(line) for line in expected]
    assert list(agent.spool.iterdir()) == []


def test_groups_are_those_of_the_configuration(binary: Path) -> None:
    with HostedAgent(binary, groups=(4001, 4002)) as agent:
        agent.ready()
        _, out, _ = run(agent.session(), sh("id -G"))
        wanted = {4001, 4002, 65534} if os.getuid() == 0 else {os.getgid(), *os.getgroups()}
        assert {int(gid) for gid in out.split()} == wanted


def test_script_without_interpreter_line_runs_in_the_shell(session: Session) -> None:
    files = (GuestFileData("s", b"echo plain $1\n"),)
    start = StartRequest(argv=(FileArg("s"), "x"), env=ENV, files=files)
    assert run(session, start)[1] == b"plain x\n"


def test_shell_and_login_modes_start_the_right_shell(session: Session) -> None:
    shell = StartRequest(argv=("-c", "echo $0 $-"), env=ENV, mode=StartMode.SHELL)
    assert run(session, shell)[1].split()[0] == b"/bin/sh"
    login = StartRequest(argv=(), env=ENV, mode=StartMode.LOGIN)
    assert run(session, login, b"echo $0\n")[1] == b"-sh\n"


def test_agent_uses_the_login_shell_of_the_guests_passwd(binary: Path) -> None:
    """The configuration names the node's shell, which the image may lack. SHELL follows passwd."""
    root = pwd.getpwnam("root").pw_shell
    with HostedAgent(binary, user="root", shell="/no/zsh") as agent:  # noqa: S604 - a field
        agent.ready()
        session = agent.session()
        login = StartRequest(argv=(), env=ENV, mode=StartMode.LOGIN)
        assert run(session, login, b"echo $0\n")[1] == f"-{Path(root).name}\n".encode()
        env = ENV | {"SHELL": "/no/zsh"}
        files = (GuestFileData("s", b"echo $SHELL\n"),)
        for mode in StartMode:
            words = ("", FileArg("s")) if mode is StartMode.LOGIN else (FileArg("s"),)
            start = StartRequest(argv=words, env=env, files=files, mode=mode)
            assert run(session, start)[1:] == (f"{root}\n".encode(), b""), mode


@pytest.mark.parametrize("shell", ["", "/bin/bash", "/bin/dash"])
@pytest.mark.parametrize("line", [b"", b"#!/bin/sh\n"])
def test_login_shell_runs_a_script_after_the_profile(session: Session, shell, line) -> None:
    """The script runs by its #! line with unchanged arguments."""
    text = line + b'echo "$FROM|$1|$2|${0##*/}"; exit 3\n'
    words = (shell, FileArg("s"), "a  b", "*")
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        for name in (".profile", ".bash_profile"):
            Path(home, name).write_text("export FROM=profile\n")
        files, env = (GuestFileData("s", text),), ENV | {"HOME": home}
        start = StartRequest(argv=words, env=env, files=files, mode=StartMode.LOGIN)
        status, out, err = run(session, start)
    assert (status.code, out, err) == (3, b"profile|a  b|*|s\n", b"")


def test_other_shell_program_gets_the_script_as_argument(session: Session) -> None:
    files = (GuestFileData("s", b"hello\n"),)
    start = StartRequest(
        argv=("/bin/cat", FileArg("s")), env=ENV, files=files, mode=StartMode.LOGIN
    )
    assert run(session, start)[1] == b"hello\n"


def test_environment_is_exact_and_binary_safe(session: Session) -> None:
    env = {"A": "1", "EMPTY": "", "NL": "a\nb=c", "BYTES": os.fsdecode(b"\xff\x01\xe4"), "U": "ä"}
    _, out, _ = run(session, StartRequest(argv=("/usr/bin/env", "-0"), env=env))
    want = {os.fsencode(f"{name}={value}") for name, value in env.items()}
    assert set(out.split(b"\0")[:-1]) == want


def test_large_environment_reaches_the_program(session: Session) -> None:
    env = ENV | {f"V{n}": "x" * 100_000 for n in range(9)}
    _, out, _ = run(session, StartRequest(argv=("/bin/sh", "-c", "echo ${#V8}"), env=env))
    assert out == b"100000\n"


def test_cwd_umask_and_limits(agent: HostedAgent, session: Session) -> None:
    limits = {resource.RLIMIT_NOFILE: (64, 128), resource.RLIMIT_CORE: (-1, -1)}
    start = sh("pwd; umask; ulimit -n; ulimit -Hn", cwd="/usr", umask=0o027, limits=limits)
    assert run(session, start)[1].split() == [b"/usr", b"0027", b"64", b"128"]


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (sh("true", cwd="/nowhere/x"), "working directory /nowhere/x: No such file or directory"),
        (
            StartRequest(argv=("/no/such",), env=ENV),
            "cannot run /no/such: No such file or directory",
        ),
        (StartRequest(argv=("no-such-cmd",), env=ENV), "cannot run no-such-cmd: No such file"),
        (
            StartRequest(
                argv=(FileArg("s"),), env=ENV, files=(GuestFileData("s", b"#!/no/interpreter\n"),)
            ),
            "its interpreter /no/interpreter (#! line) does not exist here",
        ),
        (
            StartRequest(
                argv=("", FileArg("s")),
                env=ENV,
                files=(GuestFileData("s", b"#! /no/interpreter -u\n"),),
                mode=StartMode.LOGIN,
            ),
            "cannot run s: its interpreter /no/interpreter (#! line) does not exist here",
        ),
    ],
)
def test_program_that_cannot_start_is_named(
    session: Session, start: StartRequest, reason: str
) -> None:
    with pytest.raises(StartFailed) as caught:
        run(session, start)
    assert reason in caught.value.reason
    assert run(session, sh("echo next"))[1] == b"next\n"


def test_default_signal_dispositions_and_mask(session: Session) -> None:
    """Python 3.13 starts the agent by posix_spawn(3), which ignores glibc's signals 32 and 33."""
    _, out, _ = run(session, sh("grep -E '^Sig(Blk|Ign)' /proc/self/status"))
    (blocked, mask), (ignored, ignores) = (line.split() for line in out.splitlines())
    assert (blocked, int(mask, 16)) == (b"SigBlk:", 0)
    assert (ignored, int(ignores, 16) & ~(3 << 31)) == (b"SigIgn:", 0)


def test_no_descriptors_leak_into_the_job(session: Session) -> None:
    program = "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd')))"
    _, out, _ = run(session, StartRequest(argv=(PYTHON, "-c", program), env=ENV))
    assert out in (b"[0, 1, 2, 3]\n", b"[0, 1, 2]\n")  # 3: the listing itself


def test_pty_has_size_resize_and_end_of_input(session: Session) -> None:
    program = (
        "import os,signal,sys\n"
        "def show(*_):\n"  # write(2): print() in a handler that interrupts print() is an error
        "    size = os.get_terminal_size(0)\n"
        "    said = size.lines, size.columns, os.environ['TERM'], os.isatty(2)\n"
        "    os.write(1, (' '.join(map(str, said)) + '\\n').encode())\n"
        "signal.signal(signal.SIGWINCH, show)\n"
        "show()\n"
        "print(repr(sys.stdin.read()))\n"
    )
    start = StartRequest(argv=(PYTHON, "-c", program), env=ENV, pty=Pty("vt100", 30, 90))
    read, write = os.pipe()
    with Events() as events, tempfile.TemporaryFile() as out:

        def lines() -> list[bytes]:
            return os.pread(out.fileno(), 9999, 0).replace(b"\r\n", b"\n").split(b"\n")

        def user() -> None:
            eventually(lambda: len(lines()) > 1)
            events.winsize(40, 120)
            eventually(lambda: len(lines()) > 2)
            os.write(write, b"hi\n")
            os.close(write)

        thread = threading.Thread(target=user)
        thread.start()
        status = session.run(start, read, out.fileno(), DEVNULL, events)
        thread.join(LONG)
        os.close(read)
        said = lines()
    assert status.code == 0
    assert said[:2] == [b"30 90 vt100 True", b"40 120 vt100 True"]
    assert said[-2] == b"'hi\\n'"


def test_thirty_programs_run_over_one_connection(session: Session) -> None:
    for number in range(30):
        status, out, _ = run(session, sh(f"echo {number}; exit {number}"), b"unread")
        assert (status.code, out) == (number, f"{number}\n".encode())


def answered(session: Session, start: StartRequest) -> tuple[ExitStatus, bytes]:
    """Run a program that waits until its first output is sent back; return its further output."""
    out, out_end = os.pipe()
    in_end, into = os.pipe()

    def answer() -> None:
        os.write(into, os.read(out, 10) + b"\n")
        os.close(into)

    thread = threading.Thread(target=answer)
    thread.start()
    status = session.run(start, in_end, out_end, DEVNULL)
    thread.join(LONG)
    os.close(out_end)
    said = os.read(out, 100)
    for end in (out, in_end):
        os.close(end)
    return status, said


def test_output_is_not_held_back(session: Session) -> None:
    """The first byte arrives while the program still waits for the test."""
    script = "printf first; read said; [ $said = first ]"
    assert answered(session, sh(script))[0].code == 0


def test_agent_preempts_a_program_for_its_first_output_only(session: Session) -> None:
    """SCHED_BATCH (3) does not preempt, sched(7); otherwise each line would wake the agent."""
    program = (
        "import os\n"
        "agent = os.getppid()\n"
        "print(os.sched_getscheduler(agent), os.sched_getscheduler(0), end='', flush=True)\n"
        "print(input(), os.sched_getscheduler(agent), os.sched_getscheduler(0))\n"
    )
    for _ in range(2):
        status, said = answered(session, StartRequest(argv=(PYTHON, "-c", program), env=ENV))
        assert (status.code, said) == (0, b"0 0 3 0\n")


def test_end_of_input_sent_with_the_start_is_passed_on(session: Session) -> None:
    """The agent reads both at once, and nothing else may happen until the script has read it."""
    for _ in range(50):
        status, out, _ = run(session, sh("cat; echo over"))
        assert (status.exit_code, out) == (0, b"over\n")
