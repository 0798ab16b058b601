"""That Torque's prologue has pbs_mom look at its start: real processes of its name, no waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_core.api.setup_steps import Installation
from vtorque_pbs.torque.hooks import FIRST, SISTER, prologue

ARGS = ("1.server", "u", "g", "n", "nodes=1,other=vt1:A-1", "batch", "", "")

# pbs_mom with its child, which runs the prologue, and then is the job when pbs_mom lets it: once it
# has been told (SI_USER), or only once no other child is left. Prints whether it was told.
MOM = """
import ctypes, os, signal, sys
from pathlib import Path
mom, starter, starts, gate, *hook = sys.argv[1:]
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what the prologue leaves is ours
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
reader, writer = os.pipe()
Path("/proc/self/comm").write_text(mom)
if not (child := os.fork()):
    os.close(writer)
    Path("/proc/self/comm").write_text(starter)
    code = os.spawnv(os.P_WAIT, hook[0], hook)
    os.read(reader, 1)
    os._exit(code)
os.close(reader)
told = signal.sigwaitinfo({signal.SIGCHLD}).si_code == 0
if not starts:
    assert os.wait()[0] != child
os.close(writer)
print(told, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if starts:
    Path(gate).write_text("\\n")
    os.wait()
"""


class Node:
    """A prologue in a directory, with a clock of its own and what stands in for sleep(1)."""

    def __init__(self, root, kind=FIRST, seconds="8.0"):
        self.gate, self.log, self.bin = root / "gate", root / "pauses", root / "bin"
        self.hook, clock = root / "prologue", root / "uptime"
        self.bin.mkdir()
        os.mkfifo(self.gate)
        clock.write_text("1000.9 9\n")
        self.program("vtorque", f'echo "{1000.9 + float(seconds):.2f} 9" >"{clock}"; exit 75')
        place = Installation(self.bin / "vtorque", root / "c.toml", root / "shell")
        text = prologue(place, self.hook, kind).decode()
        self.hook.write_text(text.replace("/proc/uptime", str(clock)))
        self.hook.chmod(0o755)

    def program(self, name, text):
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, mom, starter, *, starts):
        """Return what that pbs_mom says, and the pauses of what its prologue has left."""
        wait = f'[ "$1" = 0 ] || timeout 30 head -c 1 "{self.gate}"' if starts else ":"
        self.program("sleep", f'echo "$1" >>"{self.log}"\n{wait}')
        words = (mom, starter, "1" if starts else "", self.gate, self.hook, *ARGS)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", MOM, *words], capture_output=True, check=True,
            text=True, env={"PATH": f"{self.bin}:/usr/bin:/bin"}, timeout=30,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.strip(), self.log.read_text().split()


def test_pbs_mom_is_told_until_the_job_starts(tmp_path):
    assert Node(tmp_path).run("pbs_mom", "pbs_mom", starts=True) == ("True 2", ["0", "1"])


def test_it_is_told_a_few_times_while_users_prologues_run(tmp_path):
    said = Node(tmp_path).run("pbs_mom", "pbs_mom", starts=False)
    assert said == ("True 2", ["0", "1", "2", "4"])


def test_it_is_told_only_once_it_no_more_waits_by_itself(tmp_path):
    _, pauses = Node(tmp_path, seconds="2.5").run("pbs_mom", "pbs_mom", starts=False)
    assert pauses == ["3", "1", "2", "4"]


@pytest.mark.parametrize("names", [("init", "pbs_mom"), ("pbs_mom", "sh")])
def test_no_other_process_is_told(tmp_path, names):
    assert Node(tmp_path).run(*names, starts=False) == ("False 2", ["0"])


def test_a_sister_tells_nobody():
    """Its start goes on behind its prologue, and pbs_mom waits for that one itself."""
    place = Installation(Path("/v"), Path("/c"), Path("/j"))
    assert b"CHLD" in prologue(place, Path("/p"), FIRST)
    assert b"CHLD" not in prologue(place, Path("/p"), SISTER)
