"""Input of users to root's processes: variables, paths, scripts, requests, descriptors.

Every test checks the state of the host afterwards. Attacks on running jobs:
``test_user_attacks.py``.
"""

import contextlib
import os
import pwd
import re
import subprocess
import time
from pathlib import Path

import pytest

import sparing
from vtorque_core.api.submission import to_token

pytestmark = pytest.mark.e2e

OTHER = "vte2e2"
PYTHON = "/usr/bin/python3"  # users cannot reach a checkout's file in a closed home


def test_variables_of_a_user_do_not_reach_root_processes(guest, scratch):
    """Preloaded into every program that supports it: each process records its user."""
    log = guest.home / "log"
    source = scratch / "spy.c"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        "__attribute__((constructor)) static void spy(void) {\n"
        f'  int fd = open("{log}", O_WRONLY | O_CREAT | O_APPEND, 0666);\n'
        '  if (fd >= 0) { write(fd, geteuid() ? "user\\n" : "ROOT\\n", 5); close(fd); }\n}\n'
    )
    library = guest.home / "spy.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wno-unused-result", "-o", library, source],
        check=True, timeout=180,
    )  # fmt: skip
    (guest.home / "evil").mkdir()
    (guest.home / "evil/sitecustomize.py").write_text(
        f"import os\nopen({str(log)!r}, 'a').write('python of uid %d\\n' % os.geteuid())\n"
    )
    variables = {
        "LD_PRELOAD": library, "PYTHONPATH": guest.home / "evil", "PYTHONSTARTUP": "/x",
        "VTORQUE_CONFIG": guest.home / "evil.toml", "LIBVIRT_DEFAULT_URI": "test:///default",
        "PATH": guest.home / "evil", "BASH_ENV": guest.home / "evil/sh", "PYTHONINSPECT": "1",
    }  # fmt: skip
    text = ",".join(f"{name}={value}" for name, value in variables.items())
    result = guest.job("#!/bin/bash\necho ran\n", "-v", text)
    assert result.out == b"ran\n"
    lines = set(log.read_text().splitlines())
    assert "user" in lines  # the wrapper is the user's own process
    assert lines <= {"user"}


@pytest.mark.parametrize("flag", ["-o", "-e"])
def test_output_paths_are_opened_as_the_user(guest, flag):
    secret = guest.state / "site.secret"
    theirs = Path("/home", OTHER)
    before = secret.read_bytes()
    (guest.home / "link").symlink_to(secret)
    for target in (
        "link", "/etc/vtorque-attack", str(guest.run_dir / "proof/forged.json"),
        str(theirs / "out"), str(guest.state / "journal/1.x.0.jsonl"),
        str(guest.run_dir / "local.sock"),
    ):  # fmt: skip
        done = guest.as_user(
            "vsub", "-W", "block=true", "-vm", "none", "-N", "t", flag, target,
            guest.script("#!/bin/sh\ntouch ran\n"), check=False,
        )  # fmt: skip
        assert done.returncode != 0, target
        assert done.stderr.startswith(b"vsub: ") and done.stderr.count(b"\n") == 1
        assert target.rpartition("/")[2].encode() in done.stderr, (target, done.stderr)
        assert not (guest.home / "ran").exists()
    assert secret.read_bytes() == before
    assert not Path("/etc/vtorque-attack").exists()
    assert not (guest.run_dir / "proof/forged.json").exists()
    assert not (theirs / "out").exists()


@pytest.mark.parametrize("flag", ["-o", pytest.param("-e", marks=pytest.mark.full)])
def test_unread_output_fifo_does_not_block_other_jobs(guest, flag):
    """Opening a FIFO waits for its reader; a job that does so can still be ended."""
    entry = pwd.getpwnam(guest.user)
    os.mkfifo(guest.home / "fifo")
    os.chown(guest.home / "fifo", entry.pw_uid, entry.pw_gid)
    job = guest.as_user(
        "vsub", "-vm", "none", flag, "fifo", guest.script("#!/bin/sh\ntrue\n")
    ).stdout.decode().strip()  # fmt: skip
    guest.wait_for(lambda: guest.state_of(job) in (None, "R"), what="the job's start")
    time.sleep(1)
    with contextlib.suppress(pytest.fail.Exception):  # it may have been refused already
        guest.as_user("vmgr", "cancel", job)
    guest.wait_for(lambda: guest.state_of(job) is None, what="the job's end")
    next_one = guest.as_user(
        "vsub", "-W", "block=true", "-vm", "none", "-o", "next", "-e", "err",
        guest.script("#!/bin/sh\necho next\n"), user=guest.user, timeout=180,
    )  # fmt: skip
    assert next_one.returncode == 0
    assert (guest.home / "next").read_bytes() == b"next\n"


def test_working_directory_of_another_user_is_refused(guest):
    done = guest.as_user(
        "vsub", "-W", "block=true", "-vm", "none", "-d", f"/home/{OTHER}", "-o", "out", "-e", "err",
        guest.script("#!/bin/sh\ntouch ran\n"), check=False,
    )  # fmt: skip
    assert done.returncode != 0
    why = f"-d /home/{OTHER}: is not a directory that you may enter"
    assert done.stderr == f"vsub: {why}\n".encode()
    assert not Path("/home", OTHER, "ran").exists()


def test_script_that_is_not_a_regular_file_is_refused(guest):
    os.mkfifo(guest.home / "fifo")
    for name in ("fifo", "/dev/zero", "/dev/tty", "/proc/self/mem", "/", "/etc/shadow"):
        done = guest.as_user("vsub", name, check=False, timeout=180)
        assert done.returncode == 2, name
        assert done.stderr.startswith(b"vsub: ") and done.stderr.count(b"\n") == 1, done.stderr


def test_root_commands_run_by_a_user_change_nothing(guest):
    before = guest.footprint()
    forged = ("1.x", guest.user, guest.user, "n", "nodes=1,other=vt1:AAAA", "local")
    config = ("--config", str(guest.config))
    for argv in (
        ("hook", *config, "prologue", *forged),
        ("hook", *config, "epilogue", "1.x", guest.user, "g", "n", "0", "nodes=1", "", "local"),
        ("reap", *config),
        ("local", "serve", *config),
        ("local", "stop", *config),
        ("setup", "uninstall", *config),
        ("setup", "install", *config),
    ):
        done = guest.as_user("vtorque", *argv, check=False, timeout=180)
        assert done.returncode != 0, argv
        assert b"Traceback" not in done.stderr, (argv, done.stderr)
    assert guest.footprint() == before
    assert guest.job("#!/bin/sh\necho lives\n", "-vm", "none").out == b"lives\n"


# A modified vsub that sends this word in place of the request.
FORGER = (
    "import sys\nimport vtorque_core.api.submission as submission\n"
    "word = sys.argv.pop(1)\nsubmission.to_token = lambda blob: word\n"
    "from vtorque_core.cli.vsub import main\nmain()\n"
)


FORGED_IMAGE = b'{"v":1,"vm":[["img","../../etc"]],"files":{},"shell":null}'


@pytest.mark.parametrize(
    ("token", "words"),
    sparing.each(
        4,
        [
            (to_token(FORGED_IMAGE), b"img=../../etc: is your own image"),
            ("vt1:AAAA", b"the job's request is invalid"),
            ("vt1:!!", b"the job's request is invalid: it is not a vt1 token"),
            ("vt1:", b"the -vm request is invalid"),  # not even accepted
        ],
    ),
)
def test_forged_request_is_refused_on_the_node_and_not_run(guest, token, words):
    python = str(guest.prefix / "bin/python3")
    done = guest.as_user(
        python, "-c", FORGER, token, "--config", str(guest.config), "-W", "block=true",
        "-o", "out", "-e", "err", guest.script("#!/bin/sh\ntouch ran\n"), check=False,
    )  # fmt: skip
    assert done.returncode not in (0, 1)
    err = guest.home / "err"
    told = done.stderr + (err.read_bytes() if err.exists() else b"")
    assert words in told and b"Traceback" not in told
    assert not (guest.home / "ran").exists()


def test_one_user_cannot_exhaust_the_batch_system(guest):
    """A user's maximum of connections, each with three descriptors and half a message."""
    entry = pwd.getpwnam(OTHER)
    hold = (
        "import os, socket, sys, time\nheld = []\n"
        "null = os.open('/dev/null', os.O_RDONLY)\n"
        "for _ in range(300):\n"
        "    s = socket.socket(socket.AF_UNIX); s.setblocking(False)\n"
        "    try:\n"
        "        s.connect(sys.argv[1]); socket.send_fds(s, [b'{' + b'x' * 60000], [null] * 3)\n"
        "    except OSError: pass\n"
        "    held.append(s)\n"
        "print('up', flush=True)\ntime.sleep(3600)\n"
    )
    path = str(guest.run_dir / "local.sock")
    holder = subprocess.Popen(
        [PYTHON, "-I", "-c", hold, path], stdout=subprocess.PIPE, user=entry.pw_uid,
        group=entry.pw_gid, extra_groups=[], cwd="/",
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == b"up\n"
        guest.as_user("vmgr", "ps")  # one after the other, silent clients would take 10 s each
        assert guest.job("#!/bin/sh\necho mine\n", "-vm", "none").out == b"mine\n"
    finally:
        holder.kill()
        holder.communicate()


def test_descriptors_of_disconnected_clients_are_closed(guest):
    """Each sends three with a request and disconnects before the answer."""
    entry = pwd.getpwnam(OTHER)
    leave = (
        "import os, socket, sys\nnull = os.open('/dev/null', os.O_RDONLY)\n"
        "for i in range(150):\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "    data = [b'{\"op\": \"list\"}\\n', b'{', b'[]\\n'][i % 3]\n"
        "    try: socket.send_fds(s, [data], [null] * 3)\n"
        "    except BrokenPipeError: pass  # refused: it has too many\n"
        "    s.close()\n"
    )
    config = re.escape(str(guest.config))
    found = subprocess.run(
        ["pgrep", "-f", f"vtorque local serve .*{config}"], capture_output=True, check=True
    ).stdout.split()
    (service,) = [Path("/proc", pid.decode(), "fd") for pid in found]
    before = len(list(service.iterdir()))
    for _ in range(2):
        subprocess.run(
            [PYTHON, "-I", "-c", leave, str(guest.run_dir / "local.sock")], check=True,
            timeout=180, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], cwd="/",
        )  # fmt: skip
    guest.as_user("vmgr", "ps")
    guest.wait_for(lambda: len(list(service.iterdir())) <= before + 5, what="closed descriptors")
