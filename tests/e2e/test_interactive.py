"""``vsub -I``: a shell in a real guest, on the user's own terminal."""

import contextlib
import fcntl
import os
import pty
import pwd
import re
import select
import struct
import termios
import time

import pytest

pytestmark = pytest.mark.e2e


class Terminal:
    """A terminal with ``vsub`` on it, as the user."""

    def __init__(self, node, *argv, rows=33, columns=101):
        entry = pwd.getpwnam(node.user)
        program = str(node.prefix / "bin/vsub")
        environ = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": entry.pw_dir,
            "TERM": "xterm",
            "VTORQUE_CONFIG": str(node.config),
        }
        groups = os.getgrouplist(node.user, entry.pw_gid)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.setgroups(groups)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
                os.chdir(entry.pw_dir)
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
                os.execve(program, [program, *argv], environ)  # noqa: S606
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
        """Return the exit code of vsub, when it has said all."""
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], seconds)[0] and (data := os.read(self.fd, 4096)):
                self.seen += data
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


PROMPT = rb"[$#>] "


def test_a_shell_in_a_guest(clean):
    """Prompt, a real terminal of the right size, job control, exit code."""
    terminal = Terminal(clean, "-I", "-vm", "ram=256M")
    terminal.read(rb"waiting for job (\S+) to start")
    terminal.read(PROMPT)
    terminal.write(b"tty; stty size\r")
    assert terminal.read(rb"\n(/dev/\S+)\r")[1].startswith(b"/dev/")
    assert terminal.read(rb"(\d+ \d+)\r")[1] == b"33 101"
    terminal.read(PROMPT)
    terminal.write(b"id -un; uname -r; echo $PBS_ENVIRONMENT-$TERM\r")
    assert terminal.read(rb"\n(\S+)\r\n(\S+)\r\n(\S+)\r")[1].decode() == clean.user
    terminal.read(PROMPT)
    terminal.write(b"sleep 100\r")
    terminal.read(rb"sleep 100\r\n")
    time.sleep(0.5)
    start = time.monotonic()
    terminal.write(b"\x03")
    terminal.read(PROMPT, 10)
    assert time.monotonic() - start < 5, "Ctrl-C ends the command, not the shell"
    terminal.write(b"exit 7\r")
    terminal.read(rb"job \S+ completed")
    assert terminal.code() == 7


def test_a_lost_terminal_ends_the_job(clean):
    """Whoever closes the window does not keep the slot."""
    terminal = Terminal(clean, "-I", "-vm", "ram=256M")
    job_id = terminal.read(rb"waiting for job (\S+) to start")[1].decode()
    terminal.read(PROMPT)
    assert clean.state_of(job_id) == "R"
    os.close(terminal.fd)
    os.waitpid(terminal.pid, 0)
    clean.wait_for(lambda: clean.state_of(job_id) is None, 60, "end of the job")
