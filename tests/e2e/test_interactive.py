"""``vsub -I``: a shell in a real guest, on the user's own terminal."""

import os
import re
import shlex
import signal
import termios
import time

import pytest

from terminal import PROMPT, STARTED, CommandTerminal, on_a_node

pytestmark = pytest.mark.e2e


def test_interactive_job_gives_a_shell_in_a_guest(clean):
    """Prompt, a real terminal of the right size, job control, exit code; no X without sshd."""
    terminal = on_a_node(clean, "-I", "-X", "-vm", "ram=256M", environ=["DISPLAY=localhost:50.0"])
    terminal.read(STARTED)
    terminal.read(rb"\nvtorque: X11 forwarding does not work: the image has no sshd, or [^\r]*\r\n")
    terminal.read(PROMPT)
    terminal.write(b"echo display-$DISPLAY$XAUTHORITY-; tty; stty size\r")
    terminal.read(rb"display--\r")
    assert terminal.read(rb"\n(/dev/\S+)\r")[1].startswith(b"/dev/")
    assert terminal.read(rb"(\d+ \d+)\r")[1] == b"33 101"
    terminal.read(PROMPT)
    terminal.resize(41, 121)
    terminal.write(b"until [ \"$(stty size)\" = '41 121' ]; do sleep 0.1; done; echo new-size\r")
    terminal.read(rb"\nnew-size\r")
    terminal.read(PROMPT)
    terminal.write(b"id -un; uname -r; echo $PBS_ENVIRONMENT-$TERM\r")
    assert terminal.read(rb"\n(\S+)\r\n(\S+)\r\n(\S+)\r")[1].decode() == clean.user
    assert terminal.leave(7) == 7
    assert re.search(rb"job \S+ completed", terminal.seen)


@pytest.mark.full
def test_lost_terminal_ends_the_job(clean):
    """A user who closes the window does not keep the slot."""
    terminal = on_a_node(clean, "-I", "-vm", "ram=256M")
    job_id = terminal.shell_of(STARTED)
    assert clean.state_of(job_id) == "R"
    terminal.close()
    clean.wait_for(lambda: clean.state_of(job_id) is None, what="end of the job")


@pytest.mark.parametrize("at", [pytest.param("start", marks=pytest.mark.full), "prompt"])
def test_killed_vsub_leaves_the_terminal_with_echo(clean, at):
    """The job shell turns the echo off, and then makes the terminal raw."""
    terminal = on_a_node(clean, "-I", "-vm", "ram=256M", under_a_shell=True)
    pid = int(terminal.read(rb"pid-(\d+)-")[1])
    terminal.read(STARTED)

    def echo():
        return termios.tcgetattr(terminal.fd)[3] & termios.ECHO

    clean.wait_for(lambda: not echo(), what="echo off")
    if at == "prompt":
        terminal.read(PROMPT)
    os.kill(pid, signal.SIGKILL)
    clean.wait_for(echo, what="echo on again")
    terminal.close()
    clean.wait_for(lambda: not clean.jobs(), what="end of the job")


def test_commands_that_follow_a_job_end_on_ctrl_c_and_without_input(clean):
    """Ctrl-C also ends commands that are starting. A closed standard input ends no command."""
    out = clean.home / "out"
    out.unlink(missing_ok=True)
    job_id = clean.submit("#!/bin/sh\necho up\nsleep 1000\n", "-vm", "ram=256M")
    clean.wait_for(lambda: out.exists() and out.read_bytes(), what="the script's output")
    follow, watch = ("logs", "-f", job_id), ("logs", "--console", "-f", job_id)
    log = vmgr(clean, *follow)
    log.read(rb" run .*the guests are ready")
    assert ends(log, b"\x03") == 130
    assert b"vmgr: interrupted\r\n" in log.seen
    for words in (follow, watch, ("console", job_id)):
        early = vmgr(clean, *words)
        time.sleep(0.3)
        assert ends(early, b"\x03") in (130, -signal.SIGINT), early.seen
        command = shlex.join(["timeout", "5", *clean.command("vmgr", *words)])
        for user in (clean.user, "root"):
            argv = ("/usr/bin/setpriv", f"--reuid={user}", "--init-groups", "sh", "-c")
            done = clean.root(*argv, f"{command} <&-", check=False)
            assert (done.returncode, done.stderr) == (124, b"")
    root = CommandTerminal(clean.command("vmgr", "console", job_id))
    root.read(rb"leave with Ctrl-\]\r\n")
    assert ends(root, b"\x03\x04\x1d") == 0
    assert ends(vmgr(clean, "ssh", job_id), b"") == 2
    clean.as_user("vmgr", "cancel", job_id)


def vmgr(node, *words):
    become = ["setpriv", f"--reuid={node.user}", f"--regid={node.user}", "--init-groups"]
    return CommandTerminal([*become, "env", "-i", "TERM=xterm", *node.command("vmgr", *words)])


def ends(terminal, typed):
    """Type keys, and return the exit code of the command, which shows no traceback."""
    terminal.write(typed)
    code = terminal.code()
    assert b"Traceback" not in terminal.seen
    return code
