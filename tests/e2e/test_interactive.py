"""``vsub -I``: a shell in a real guest, on the user's own terminal."""

import pwd
import re

import pytest

from terminal import PROMPT, Terminal

pytestmark = pytest.mark.e2e

STARTED = rb"waiting for job (\S+) to start"


def vsub(node, *argv):
    """Return a terminal with ``vsub`` on it, as the user."""
    home = pwd.getpwnam(node.user).pw_dir
    become = ["setpriv", f"--reuid={node.user}", f"--regid={node.user}", "--init-groups"]
    environ = ["PATH=/usr/local/bin:/usr/bin:/bin", f"HOME={home}", "TERM=xterm"]
    return Terminal([*become, "env", "-i", "-C", home, *environ, *node.command("vsub", *argv)])


def test_a_shell_in_a_guest(clean):
    """Prompt, a real terminal of the right size, job control, exit code."""
    terminal = vsub(clean, "-I", "-vm", "ram=256M")
    terminal.shell_of(STARTED)
    terminal.write(b"tty; stty size\r")
    assert terminal.read(rb"\n(/dev/\S+)\r")[1].startswith(b"/dev/")
    assert terminal.read(rb"(\d+ \d+)\r")[1] == b"33 101"
    terminal.read(PROMPT)
    terminal.write(b"id -un; uname -r; echo $PBS_ENVIRONMENT-$TERM\r")
    assert terminal.read(rb"\n(\S+)\r\n(\S+)\r\n(\S+)\r")[1].decode() == clean.user
    assert terminal.leave(7) == 7
    assert re.search(rb"job \S+ completed", terminal.seen)


def test_a_lost_terminal_ends_the_job(clean):
    """Whoever closes the window does not keep the slot."""
    terminal = vsub(clean, "-I", "-vm", "ram=256M")
    job_id = terminal.shell_of(STARTED)
    assert clean.state_of(job_id) == "R"
    terminal.close()
    clean.wait_for(lambda: clean.state_of(job_id) is None, what="end of the job")
