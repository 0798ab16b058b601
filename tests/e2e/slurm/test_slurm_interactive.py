"""``vsub -I`` on a real Slurm: a shell in a real guest, on the user's own terminal."""

import re

import pytest

from terminal import PROMPT, CommandTerminal

pytestmark = pytest.mark.e2e

STARTED = rb"Granted job allocation (\d+)"


def vsub(cluster, *argv):
    """Return a terminal with ``vsub`` on it, on the head as the user."""
    return CommandTerminal(cluster.user_command("vsub", *argv, env={"TERM": "xterm"}))


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_interactive_job_gives_a_shell_in_a_guest(clean, nodes):
    """Prompt, a terminal of the right size, Ctrl-C, exit code; also with guests on two nodes."""
    terminal = vsub(clean, "-I", f"-N{nodes}", "-vm", "ram=256M")
    terminal.shell_of(STARTED)
    terminal.write(b"stty size; echo $SLURM_NNODES-$(hostname)-$TERM\r")
    assert terminal.read(rb"(\d+ \d+)\r")[1] == b"33 101"
    assert re.fullmatch(rb"%d-vn\d-xterm" % nodes, terminal.read(rb"\n(\S+-vn\S+)\r")[1])
    terminal.read(PROMPT)
    terminal.resize(41, 121)
    terminal.write(b"until [ \"$(stty size)\" = '41 121' ]; do sleep 0.1; done; echo new-size\r")
    terminal.read(rb"\nnew-size\r")
    assert terminal.leave(7) == 7


@pytest.mark.full
def test_lost_terminal_ends_the_job(clean):
    """A user who closes the window does not keep the nodes."""
    terminal = vsub(clean, "-I", "-vm", "ram=256M")
    job_id = terminal.shell_of(STARTED)
    assert clean.state(job_id) == "RUNNING"
    terminal.close()
    clean.wait(lambda: clean.state(job_id) != "RUNNING", what="end of the job")


def test_bare_metal_interactive_job_runs(clean):
    terminal = vsub(clean, "-I", "-vm", "none")
    terminal.shell_of(STARTED)
    terminal.write(b"hostname; exit 3\r")
    terminal.read(rb"[\r\n]n\d\r")
    assert terminal.code() == 3
