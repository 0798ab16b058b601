"""Test pbsdsh in guests with real shells and a double of ssh that runs programs on this machine."""

import os
import shutil
import subprocess
import sys
from importlib.resources import files

import pytest

from vtorque_pbs.inside_guests import PBSDSH

SHELLS = [["dash"], ["busybox", "sh"], ["bash", "--posix"]]
HERE = os.uname().nodename
NUMBERS = "$PBS_TASKNUM $PBS_VNODENUM $PBS_NODENUM ${VIA:-here}"


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def pbsdsh(request, tmp_path):
    """Return a function that runs pbsdsh in the first guest of two."""
    shell = " ".join([shutil.which(request.param[0]), *request.param[1:]])
    (tmp_path / "pbsdsh").write_bytes(PBSDSH)
    (tmp_path / "nodes").write_text(f"{HERE}\n{HERE}\nother\nother\n")
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\n[ "$7" = other ] || exit 255\n'
        f"exec env -i PATH=/usr/bin:/bin VIA=ssh {shell} -s\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    on_guest = tmp_path / "on-guest"
    on_guest.write_bytes(files("vtorque_linux_guest.guest").joinpath("on-guest").read_bytes())
    on_guest.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_JOBID": "5[1].s", "HOME": str(tmp_path), "VTORQUE_ON_GUEST": str(on_guest),
    }  # fmt: skip

    def call(*argv, **more):
        done = subprocess.run(
            [*request.param, str(tmp_path / "pbsdsh"), *argv],
            capture_output=True, text=True, env=environ | more, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, sorted(done.stdout.splitlines()), done.stderr

    call.home = tmp_path
    return call


def test_pbsdsh_numbers_tasks_like_pbs(pbsdsh):
    """Task 1 is the script. PBS_NODENUM counts hosts, PBS_VNODENUM lines of the node file."""
    tell = ("sh", "-c", f"echo {NUMBERS}")
    every = ["2 0 0 here", "3 1 0 here", "4 2 1 ssh", "5 3 1 ssh"]
    assert pbsdsh(*tell) == (0, every, "")
    assert pbsdsh("-u", *tell)[1] == ["2 0 0 here", "3 2 1 ssh"]
    assert pbsdsh("-c", "6", "-s", *tell)[1] == [*every, "6 0 0 here", "7 1 0 here"]
    assert pbsdsh("-n", "3", *tell)[1] == ["2 3 1 ssh"]
    assert pbsdsh("-h", "other", *tell)[1] == ["2 2 1 ssh"]


def test_pbsdsh_passes_the_environment_to_every_guest(pbsdsh):
    """Tasks get all variables unchanged, even if the script has variables of the same names."""
    mine = {
        "X": "1", "TWO": "it's\nexport Y=2\n", "nodes": "9", "count": "c", "host": "h",
        "line": "l", "number": "n", "copies": "7", "only": "o", "here": "e", "word": "w",
    }  # fmt: skip
    show = "import os, sys; print([os.environ.get(n) for n in sys.argv[1:]], os.getcwd())"
    code, lines, said = pbsdsh(sys.executable, "-c", show, *mine, "Y", **mine)
    assert (code, said) == (0, "")
    assert lines == [f"{[*mine.values(), None]} {pbsdsh.home}"] * 4


def test_failed_tasks_are_reported(pbsdsh):
    assert pbsdsh("-h", "nobody", "true")[0] == 1
    assert pbsdsh("-n", "1", "sh", "-c", "exit 3") == (0, [], "pbsdsh: task 1 exit status 3\n")
    assert pbsdsh("-n", "3", "sh", "-c", "exit 3") == (0, [], "pbsdsh: task 3 exit status 3\n")
    assert pbsdsh("-q")[0] == 1 and pbsdsh()[0] == 1
