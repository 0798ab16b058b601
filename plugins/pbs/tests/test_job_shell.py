"""Input of the job shell from pbs_mom."""

import os
import pty
import termios
from pathlib import Path

import pytest

from vtorque_pbs.pbsdsh import OpenPbsShell

SCRIPT = "/var/spool/pbs/mom_priv/jobs/5.s.SC"


def read(line: str, jobdir: str) -> tuple[Path | None, tuple[str, ...], str]:
    """Return script, arguments and working directory of a job with this line on its stdin."""
    out, into = os.pipe()
    os.write(into, line.encode())
    os.close(into)
    try:
        job = OpenPbsShell().read_start([], {"PBS_JOBID": "5.s", "PBS_JOBDIR": jobdir}, out)
    finally:
        os.close(out)
    return job.script, job.args, job.cwd


@pytest.mark.parametrize("home", ["/home/ada", "/home/a da's"])
def test_script_starts_in_a_private_sandbox(home):
    """``-W sandbox=PRIVATE``, like OpenPBS 23.06.06."""
    sandbox = f"{home}/pbs.5.s.x8z"
    assert read(f"cd {sandbox};{SCRIPT}\n", sandbox) == (Path(SCRIPT), (), sandbox)
    assert read(f"{SCRIPT}\n", home) == (Path(SCRIPT), (), "")


def test_terminal_does_not_echo_before_the_guest_is_ready():
    """The guest's shell echoes the input, which would be shown twice."""
    leader, terminal = pty.openpty()
    try:
        assert termios.tcgetattr(leader)[3] & termios.ECHO
        assert OpenPbsShell().read_start([], {"PBS_JOBID": "5.s"}, terminal).script is None
        assert not termios.tcgetattr(leader)[3] & termios.ECHO
        assert termios.tcgetattr(leader)[3] & termios.ISIG, "Ctrl-C would not end the job"
    finally:
        os.close(leader)
        os.close(terminal)
