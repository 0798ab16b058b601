"""``vsub -I`` on a real Slurm: a shell in a real guest, on the user's own terminal."""

import contextlib
import fcntl
import importlib.util
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "slurm_cluster", Path(__file__).with_name("slurm_cluster.py")
)
slurm = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slurm)

pytestmark = pytest.mark.e2e

PROMPT = rb"[$#>] "


class Terminal:
    """A terminal with a command of the user's on it."""

    def __init__(self, cluster, *argv, rows=33, columns=101):
        command = cluster.user_command(*argv, env={"TERM": "xterm"})
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
                os.execvp(command[0], command)  # noqa: S606
            finally:
                os._exit(99)
        self.seen = b""

    def read(self, pattern, seconds=60):
        """Read until the pattern comes; return its match; what is after it stays to be read."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            assert left > 0, (pattern, self.seen)
            if select.select([self.fd], [], [], left)[0]:
                data = b""
                with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
                    data = os.read(self.fd, 4096)
                assert data, (pattern, self.seen)
                self.seen += data
        self.seen = self.seen[match.end() :]
        return match

    def write(self, data):
        os.write(self.fd, data)

    def code(self, seconds=60):
        """Return the exit code of the command, when it has said all."""
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], seconds)[0] and (data := os.read(self.fd, 4096)):
                self.seen += data
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


@pytest.fixture(scope="module")
def cluster():
    return slurm.bring_up()


@pytest.fixture
def clean(cluster):
    with slurm.nothing_left(cluster):
        yield cluster


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_shell_in_a_guest(clean, nodes):
    """Prompt, a terminal of the right size, Ctrl-C, exit code; also with guests on two nodes."""
    terminal = Terminal(clean, "vsub", "-I", f"-N{nodes}", "-vm", "ram=256M")
    terminal.read(rb"Granted job allocation (\d+)")
    terminal.read(PROMPT)
    terminal.write(b"stty size; echo $SLURM_NNODES-$(hostname)-$TERM\r")
    assert terminal.read(rb"(\d+ \d+)\r")[1] == b"33 101"
    assert re.fullmatch(rb"%d-vn\d-xterm" % nodes, terminal.read(rb"\n(\S+-vn\S+)\r")[1])
    terminal.read(PROMPT)
    terminal.write(b"sleep 100\r")
    terminal.read(rb"sleep 100\r\n")
    time.sleep(0.5)
    start = time.monotonic()
    terminal.write(b"\x03")
    terminal.read(PROMPT, 10)
    assert time.monotonic() - start < 5, "Ctrl-C ends the command, not the shell"
    terminal.write(b"exit 7\r")
    assert terminal.code() == 7


def test_a_lost_terminal_ends_the_job(clean):
    """Whoever closes the window does not keep the nodes."""
    terminal = Terminal(clean, "vsub", "-I", "-vm", "ram=256M")
    job_id = terminal.read(rb"Granted job allocation (\d+)")[1].decode()
    terminal.read(PROMPT)
    assert clean.state(job_id) == "RUNNING"
    os.close(terminal.fd)
    os.waitpid(terminal.pid, 0)
    clean.wait(lambda: clean.state(job_id) != "RUNNING", 60, "end of the job")


def test_bare_metal(clean):
    terminal = Terminal(clean, "vsub", "-I", "-vm", "none")
    terminal.read(rb"Granted job allocation (\d+)")
    terminal.read(PROMPT)
    terminal.write(b"hostname; exit 3\r")
    terminal.read(rb"[\r\n]n\d\r")
    assert terminal.code() == 3
