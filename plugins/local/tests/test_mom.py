"""One job, run like by pbs_mom, by the user who runs the tests."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from as_root import with_a_shell
from patience import eventually
from vtorque_core.api import UsageError
from vtorque_local import become_job, job_processes, mom
from vtorque_local.job import make_job
from vtorque_local.order import LocalSubmission, pack
from vtorque_pbs import convention as pbs

# Replaces the first program in a job's process, and the one that records the reason.
LOOK = """#!/bin/sh
for fd in 0 1 2; do at=$(readlink /proc/$$/fd/$fd); echo "$at" >>{said}; done
echo why >&2
"""


class Task(mom.JobTask):
    """A job that no test has to find again."""

    def save(self):
        """Keep nothing."""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Return a function that makes a task; hooks are programs of the test's."""
    with_a_shell(monkeypatch)
    directory = tmp_path / "1"
    directory.mkdir()
    script = directory / "1.h.SC"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)

    def make(out="out", *, prologue="true", epilogue="true", token="", wrapper="false"):
        outputs = [(str(tmp_path / name), n) for n, name in enumerate((out, "err"))]
        rest = {"environ": dict(os.environ), "shell": "", "args": "", "directory": str(tmp_path)}
        (directory / "rest").write_text(json.dumps(rest | {"outputs": outputs}))
        want = LocalSubmission("job.sh", 0, 0, "", False, token)
        job = make_job("1.h", want, os.getuid(), "h", directory, 0)
        return Task(job, mom.JobPrograms([prologue], [epilogue], [wrapper]), directory, {})

    return make


def test_no_process_of_the_user_holds_a_file_of_the_service(task, tmp_path, monkeypatch):
    """The descriptor would be writable, regardless of the file's mode."""
    said = tmp_path / "said"
    look = tmp_path / "look"
    look.write_text(LOOK.format(said=said))
    look.chmod(0o755)
    monkeypatch.setattr(become_job.sys, "executable", str(look))
    one = task()
    monkeypatch.setattr(one, "_run_prologue", lambda: None)
    monkeypatch.setattr(one, "_end_processes", lambda grace: None)  # a program too, without cgroups
    one.work()
    assert one.job.reason == "why"
    held = said.read_text().splitlines()
    assert len(held) == 6
    assert [at for at in held if not re.fullmatch(r"pipe:\[\d+\]|/dev/null", at)] == []


def test_failed_start_is_the_reason(task):
    one = task("/nonexistent/out")
    one.work()
    assert (one.job.status, one.job.reason) == (1, "/nonexistent/out: No such file or directory")


def test_job_that_starts_has_no_reason(task, tmp_path):
    one = task()
    one.work()
    assert (one.job.status, one.job.reason) == (0, "")
    assert Path(tmp_path, "out").read_text() == "ran\n"


def test_epilogue_output_in_the_error_file_is_bounded_and_escaped(task, tmp_path):
    epilogue = tmp_path / "epilogue"
    epilogue.write_text(
        "#!/bin/sh\nprintf 'one\\033[2Jx\\n\\ntwo\\n'; head -c 100000 /dev/zero | tr '\\0' x\n"
    )
    epilogue.chmod(0o755)
    one = task(epilogue=str(epilogue))
    one.work()
    lines = Path(tmp_path, "err").read_text().splitlines()
    assert lines[:2] == ["=>> vtorque: 1.h: one\\x1b[2Jx", "=>> vtorque: 1.h: two"]
    assert len(lines) == 3 and len(lines[2]) < 400
    assert (one.job.status, one.job.reason) == (0, "")


def program(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_killed_prologue_ends_a_vm_job(task, tmp_path):
    """Otherwise the wrapper would wait until start_timeout for guests that never start."""
    said = tmp_path / "said"
    one = task(
        prologue=program(tmp_path / "prologue", "kill -KILL $$"),
        epilogue=program(tmp_path / "epilogue", f'echo "$1 ${{10}}" >{said}'),
        wrapper=program(tmp_path / "wrapper", f"touch {tmp_path}/begun"),
        token="vt1:x",
    )
    one.work()
    reason = "the node's prologue was killed (signal 9); nothing was run"
    assert (one.job.status, one.job.reason) == (122, reason)
    assert pbs.shell_code(one.job.status) == 122
    assert not Path(tmp_path, "begun").exists()
    assert said.read_text() == "1.h 122\n"
    assert Path(tmp_path, "err").read_text() == f"=>> vtorque: 1.h: {reason}\n"


PLACES = """
import os, pathlib, sys, time
os.eventfd_write(int(os.environ["VTORQUE_PLACED"]), 1)
until = time.monotonic() + 60
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < until:
    time.sleep(0.01)
pathlib.Path(sys.argv[2]).touch()
sys.exit(int(sys.argv[3]))
"""


def placing(tmp_path, code=0):
    """Return a prologue that lets the job shell start, and waits until it runs."""
    (tmp_path / "places.py").write_text(PLACES)
    words = [sys.executable, tmp_path / "places.py", tmp_path / "begun", tmp_path / "ready", code]
    return program(tmp_path / "prologue", f"exec {shlex.join(map(str, words))}")


def waiting(tmp_path):
    """Return a wrapper that waits for the guests, as the job shell does."""
    wait = f"until [ -e {tmp_path}/ready ]; do sleep 0.01; done"
    return program(tmp_path / "wrapper", f"touch {tmp_path}/begun; {wait}; echo waited")


def test_wrapper_starts_when_the_prologue_has_placed_the_job(task, tmp_path):
    one = task(prologue=placing(tmp_path), wrapper=waiting(tmp_path), token="vt1:x")
    assert one.work()
    assert (one.job.status, one.job.reason) == (0, "")
    assert Path(tmp_path, "out").read_text() == "waited\n"
    assert not Path(tmp_path, "err").read_text()


@pytest.mark.parametrize(("code", "status"), [(3, pbs.STATUS_NO_START), (mom.WAITS, None)])
def test_prologue_that_fails_after_placing_does_not_requeue_the_job(task, tmp_path, code, status):
    """The wrapper has begun, so it reports the failure from the proof."""
    one = task(prologue=placing(tmp_path, code), wrapper=waiting(tmp_path), token="vt1:x")
    assert one.work()
    assert one.job.status is not None
    assert status is None or one.job.status == status


def test_job_canceled_beside_its_prologue_ends_after_the_prologue(task, tmp_path):
    one = task(
        prologue=placing(tmp_path),
        wrapper=program(tmp_path / "wrapper", f"touch {tmp_path}/begun; exec sleep 300"),
        token="vt1:x",
    )

    def cancel():
        eventually((tmp_path / "begun").exists)
        one.end(271, "canceled")

    canceled = threading.Thread(target=cancel)
    canceled.start()
    assert one.work()
    canceled.join()
    assert Path(tmp_path, "ready").exists()
    assert (one.job.status, one.job.reason) == (271, "canceled")


@pytest.mark.parametrize("interactive", [False, True])
def test_only_guests_jobs_with_a_script_start_beside_the_prologue(task, tmp_path, interactive):
    said = tmp_path / "said"
    look = program(tmp_path / "prologue", f'echo "${{VTORQUE_PLACED-none}}" >{said}')
    one = task(prologue=look, token="vt1:x" if interactive else "")
    one.job.interactive = interactive
    one.work()
    assert said.read_text() == "none\n"


def test_prologue_timeout_ends_a_vm_job(task, tmp_path):
    one = task(prologue=program(tmp_path / "prologue", "exec sleep 300"), token="vt1:x")
    one._programs = replace(one._programs, hook_timeout=0.05)
    one.work()
    assert one.job.status == 122


def test_killed_prologue_does_not_end_a_bare_metal_job(task, tmp_path):
    """The same as in Torque."""
    one = task(prologue=program(tmp_path / "prologue", "kill -KILL $$"))
    one.work()
    assert (one.job.status, Path(tmp_path, "out").read_text()) == (0, "ran\n")


def test_processes_with_the_job_cookie_are_killed_without_cgroups(task, monkeypatch):
    monkeypatch.setattr(mom.job_processes, "make_cgroup", lambda *_: "")
    one = task()
    cookie = {name: one.job.environ[name] for name in (mom.job_processes.COOKIE,)}
    left = subprocess.Popen(["sleep", "1000"], env=os.environ | cookie, start_new_session=True)
    one.work()
    assert left.wait(180) == -signal.SIGKILL
    assert one.job.status == 0


@pytest.mark.parametrize(
    ("pids", "kinds", "made", "limit"),
    [
        (500, ("unified", "pids"), "pids", "500"),  # version 2 has no controllers beside version 1
        (500, ("v2", "pids"), "v2", "500"),
        (500, ("v2-busy", "pids"), "pids", "500"),  # the service is in the parent: cgroups(7)
        (500, ("v2-busy",), "v2-busy", None),
        (500, ("unified", "systemd"), "unified", None),
        (0, ("unified", "pids"), "unified", None),
        (500, (), None, None),
    ],
)
def test_cgroup_limits_processes_of_a_job_if_available(
    tmp_path, monkeypatch, pids, kinds, made, limit
):
    """Directories replace the hierarchies; ``mkdir`` creates the kernel's files there."""
    for kind in kinds:
        (tmp_path / kind).mkdir()
    make = Path.mkdir
    monkeypatch.setattr(job_processes, "_own_cgroups", lambda: [tmp_path / kind for kind in kinds])

    def mkdir(path, *args, **how):
        make(path, *args, **how)
        (path / "cgroup.procs").touch()
        if path.parent.name in ("pids", "v2", "v2-busy"):
            (path / "pids.max").write_text("max")
        if path.parent.name.startswith("v2"):
            kind = "domain invalid" if path.parent.name == "v2-busy" else "domain"
            (path / "cgroup.type").write_text(f"{kind}\n")
            (path.parent / "cgroup.subtree_control").touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    found = job_processes.make_cgroup("job-1", pids)
    assert found == ("" if made is None else str(tmp_path / made / "vtorque-job-1"))
    left = [str(path) for path in tmp_path.glob("*/vtorque-*")]
    assert left == [found] * bool(found), "another control group is left"
    if limit is not None:
        assert Path(found, "pids.max").read_text() == limit
    if "v2-busy" in kinds:
        assert (tmp_path / "v2-busy/cgroup.subtree_control").read_text() == "-pids"


def test_become_job_imports_few_modules():
    tree = ast.parse(Path(become_job.__file__).read_bytes())
    found = {n.names[0].name for n in ast.walk(tree) if isinstance(n, ast.Import)}
    found |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert found == {"__future__", "collections.abc", "json", "os", "signal", "sys"}


def test_word_that_is_not_utf8_is_refused():
    with pytest.raises(UsageError, match=r"^x\\xff: is not UTF-8$"):
        pack("cancel", "x\udcff")
