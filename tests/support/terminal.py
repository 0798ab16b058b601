"""Run a user's command on a pseudo-terminal, for tests of interactive jobs."""

import contextlib
import fcntl
import os
import pty
import pwd
import re
import select
import signal
import struct
import termios
import time

from users import TIMEOUT

PROMPT = rb"[$#>] "
STARTED = rb"waiting for job (\S+) to start"  # that of vsub, on a single node


class CommandTerminal:
    """A terminal with a command on it."""

    def __init__(self, command, *, rows=33, columns=101):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
                for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):  # like a login
                    signal.signal(number, signal.SIG_DFL)
                os.execvp(command[0], command)  # noqa: S606
            finally:
                os._exit(99)
        self.seen = b""

    def read(self, pattern, seconds=TIMEOUT):
        """Read until the pattern matches; return the match; later output stays unread."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            assert left > 0, (pattern, self.seen)
            if select.select([self.fd], [], [], left)[0]:
                data = b""
                with contextlib.suppress(OSError):  # EIO: no process has the terminal open any more
                    data = os.read(self.fd, 4096)
                assert data, (pattern, self.seen)
                self.seen += data
        self.seen = self.seen[match.end() :]
        return match

    def shell_of(self, started):
        """Return the id of the job, which a group of the pattern matches, at the shell's prompt."""
        job_id = self.read(started)[1].decode()
        self.read(PROMPT)
        return job_id

    def write(self, data):
        os.write(self.fd, data)

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def interrupt(self):
        """Press Ctrl-C during a command that would take a day; the prompt has to return."""
        self.write(b"sleep 86400\r")
        self.read(rb"sleep 86400\r\n")
        time.sleep(0.5)
        self.write(b"\x03")
        self.read(PROMPT)

    def leave(self, code):
        """Leave the shell after an interrupted command; return the exit code of vsub."""
        self.read(PROMPT)
        self.interrupt()
        self.write(b"exit %d\r" % code)
        return self.code()

    def close(self):
        """Close the window, and wait for the command's end."""
        os.close(self.fd)
        os.waitpid(self.pid, 0)

    def code(self, seconds=TIMEOUT):
        """Return the exit code of the command, after all its output."""
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], seconds)[0] and (data := os.read(self.fd, 4096)):
                self.seen += data
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def on_a_node(node, *argv, environ=(), under_a_shell=False):
    """Return a terminal with ``vsub`` on it, as the node's user; ``environ``: NAME=VALUE.

    ``under_a_shell``: a shell prints ``pid-N-`` of vsub, and keeps the terminal when it is killed.
    """
    home = pwd.getpwnam(node.user).pw_dir
    become = ["setpriv", f"--reuid={node.user}", f"--regid={node.user}", "--init-groups"]
    environ = ["PATH=/usr/local/bin:/usr/bin:/bin", f"HOME={home}", "TERM=xterm", *environ]
    command = node.command("vsub", *argv)
    if under_a_shell:
        inner = ["sh", "-c", 'echo pid-$$-; exec "$@"', "sh", *command]
        command = ["sh", "-c", '"$@"; sleep 86400', "sh", *inner]
    return CommandTerminal([*become, "env", "-i", "-C", home, *environ, *command])
