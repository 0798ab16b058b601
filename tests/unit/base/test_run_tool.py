"""Commands end with the process that started them, and do not begin when it has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import noting as support
from vtorque_core.base.run_tool import guard_command

# Starts a command like Popen, but is killed before its child executes the first program.
KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from noting import noting
from vtorque_core.api import guard_command
me = os.getpid()
command, *files = eval(sys.argv[1])
for file in (file for some in files for file in some):
    os.set_inheritable(file, True)
if os.fork() == 0:
    while os.getppid() == me:
        time.sleep(0.01)
    os.execv(command[0], command)
os.kill(me, 9)
"""


@pytest.mark.parametrize("by", ["[guard_command({what})]", "noting({ran!r}, 'ran')"])
def test_command_whose_starter_has_ended_does_nothing(tmp_path, by):
    """The starter has ended before the command asks the kernel for its parent-death signal."""
    ran = tmp_path / "ran"
    what = f"'touch', {str(ran)!r}"
    source, there = by.format(what=what, ran=str(ran)), Path(support.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, there], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL  # capture_output has waited for the child too
    assert done.stderr in (b"", b"its starter has ended\n")
    assert not ran.exists()


def test_command_whose_starter_is_alive_runs(tmp_path):
    ran = tmp_path / "ran"
    subprocess.run(guard_command("touch", str(ran)), check=True)
    note, files = support.noting(tmp_path / "note", "noted")
    subprocess.run(note, check=True, pass_fds=files)
    assert (ran.exists(), (tmp_path / "note").read_text()) == (True, "noted")


def test_wrong_starter_ends_the_command_with_status_126(tmp_path):
    between = [
        "/bin/sh",
        "-c",
        '"$@"; exit $?',
        "sh",
        *guard_command("touch", str(tmp_path / "ran")),
    ]
    assert subprocess.run(between, check=False).returncode == 126
    assert not (tmp_path / "ran").exists()


def test_command_gets_its_arguments_directory_and_descriptors_unchanged(tmp_path):
    words = ("", " ", "$PPID", "'", '"; exit', "-x", "a=b", "*", "\n")
    command = guard_command("sh", "-c", 'pwd; printf "<%s>" "$@"; echo $$', "name", *words)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
    said, _ = child.communicate()
    shown = "".join(f"<{word}>" for word in words)
    assert said.decode() == f"{tmp_path}\n{shown}{child.pid}\n"


def test_command_is_killed_with_its_starter(tmp_path):
    code = "import os; from vtorque_core.api import guard_command as g; import subprocess as s; "
    code += "s.Popen(g('sh', '-c', 'echo up; exec sleep 1000')); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout.readline() == b"up\n"
        starter.kill()
        assert starter.stdout.read() == b"", "the command still runs"


def test_command_with_dropped_privileges_is_killed_with_its_starter():
    """A change of the user resets it, prctl(2): setpriv has to request it afterwards."""
    rights, uid = [], os.getuid()
    if uid == 0:
        rights, uid = [*rights, "--reuid", "65534", "--regid", "65534", "--clear-groups"], 65534
    said = subprocess.check_output(
        guard_command("/usr/bin/setpriv", "-d", rights=rights), text=True
    )
    told = {f"uid: {uid}", "no_new_privs: 1", "Parent death signal: KILL"}
    assert told <= set(said.splitlines())
