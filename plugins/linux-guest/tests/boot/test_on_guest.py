"""Test on-guest with real shells and a double of ssh that runs the program on this machine."""

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

SHELLS = [["dash"], ["busybox", "sh"], ["bash", "--posix"]]
PYTHON = sys.executable
# A double of ssh. Like after a login, the program inherits no variable of the caller.
SSH = """#!/bin/sh
[ "$7 $8 $9" = "vn2 exec /bin/sh" ] || exit 99
umask 022
exec env -i PATH=/usr/bin:/bin HOME=/ SSH_CONNECTION=there {shell} -s
"""
SHOW = (
    "import json, os, sys\n"
    "mask = os.umask(0)\n"
    "seen = {k.decode('latin1'): v.decode('latin1') for k, v in os.environb.items()}\n"
    "print(json.dumps([seen, os.getcwd(), mask, sys.argv[1:], sys.stdin.read()]))\n"
)


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def run_on_guest(request, tmp_path):
    """Return a function that runs a program on another guest and returns what the program gets."""
    shell = " ".join([shutil.which(request.param[0]), *request.param[1:]])
    program = tmp_path / "on-guest"
    text = files("vtorque_linux_guest.guest").joinpath("on-guest").read_text()
    program.write_text(text.replace("/etc/profile.d/vtorque.sh", f"{tmp_path}/profile"))
    (tmp_path / "ssh").write_text(SSH.format(shell=shell))
    (tmp_path / "ssh").chmod(0o755)

    def call(environ, *words, there="", here=""):
        last = "if false; then . spool; fi\n"
        (tmp_path / "profile").write_text(here + last)
        argv = [*request.param, str(program), "vn2", PYTHON, "-c", SHOW, *words]
        environ = {b"PATH": os.fsencode(f"{tmp_path}:/usr/bin:/bin"), **environ}
        if there:  # the other guest has another file at this path
            (tmp_path / "there").write_text(there + last)
            (tmp_path / "ssh").write_text(
                SSH.format(shell=shell).replace(
                    "exec env", f"mv {tmp_path}/there {tmp_path}/profile\nexec env"
                )
            )
        old = os.umask(0o027)
        try:
            done = subprocess.run(
                argv, env=environ, cwd=tmp_path / "it's a dir", input=b"in", capture_output=True,
                check=False, timeout=120,
            )  # fmt: skip
        finally:
            os.umask(old)
        assert (done.returncode, done.stderr) == (0, b"")
        return json.loads(done.stdout)

    Path(tmp_path / "it's a dir").mkdir()
    return call


ODD = {
    b"A": b"a b=c",
    b"LINES_OF": b"one\nexport FORGED=1\nFORGED2=2\n\n",
    b"QUOTES": b"it's \"a\" `id` $HOME \\ \\n",
    b"BYTES": bytes(range(1, 256)),
    b"EMPTY": b"",
    b"PS_": b"%s%n*?[a]~",
    b"host": b"h", b"name": b"n", b"value": b"v", b"word": b"w", b"text": b"t",
    b"LC_ALL": b"C",
}  # fmt: skip


def test_program_gets_environment_arguments_cwd_and_umask_of_the_caller(run_on_guest, tmp_path):
    words = ["a  b", "'q'", "$HOME", "new\nline\n", "", "\\", "*", "é"]
    seen, cwd, mask, argv, stdin = run_on_guest(ODD, *words)
    for name, value in ODD.items():
        assert seen[name.decode()].encode("latin1") == value, name
    assert not {"FORGED", "FORGED2"} & set(seen)
    assert (cwd, mask, argv, stdin) == (f"{tmp_path}/it's a dir", 0o027, words, "")


def test_variables_of_this_guest_are_not_sent(run_on_guest):
    """The other guest has its own values of these variables, unless the job has changed them."""
    here = (
        "export CHANGED='site'\nexport VTORQUE_RANK='0'\nexport X_OF='a\nexport VTORQUE_RANK=9'\n"
    )
    there = here.replace("RANK='0'", "RANK='1'")
    given = {
        b"VTORQUE_RANK": b"0", b"CHANGED": b"by the job", b"DISPLAY": b":0", b"SSH_TTY": b"x",
        b"X_OF": b"a\nexport VTORQUE_RANK=9",
    }  # fmt: skip
    seen = run_on_guest(given, here=here, there=there)[0]
    assert (seen["VTORQUE_RANK"], seen["CHANGED"]) == ("1", "by the job")
    assert seen["SSH_CONNECTION"] == "there"
    assert not {"DISPLAY", "SSH_TTY"} & set(seen)
