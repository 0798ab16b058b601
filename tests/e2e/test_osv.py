"""Real OSv guests. They need a loader built from OSv's source: VTORQUE_OSV_LOADER=/path.

``VTORQUE_OSV_LOADER``: loader-stripped.elf. ``VTORQUE_OSV_IMG``: loader.img, for the disk boot.
``VTORQUE_OSV_REST``: a directory with the files of the module httpserver-api (and cloud-init, if
it was built) in the layout of an image. Tests are skipped if their file is missing: OSv is not part
of this repository.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hooks_by_hand import Hooks, as_before, observe
from vtorque_core.base.locks import lock_holder

LOADER = os.environ.get("VTORQUE_OSV_LOADER")
REST = os.environ.get("VTORQUE_OSV_REST")
DISK_LOADER = os.environ.get("VTORQUE_OSV_IMG")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not LOADER, reason="VTORQUE_OSV_LOADER is not set"),
]

PROGRAM = Path(__file__).parents[1] / "support" / "osv_program.c"
IMAGE, SHARE_IMAGE = "osv-e2e", "osv-e2e-share"
REST_IMAGE, DISK_IMAGE, ROOT_IMAGE = "osv-e2e-rest", "osv-e2e-disk", "osv-e2e-root"
VM = ("-vm", f"img={IMAGE},ram=64M")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("osv") / "prog"
    subprocess.run(["gcc", "-O1", "-fPIE", "-pie", "-o", path, PROGRAM], check=True)
    return path


@pytest.fixture(scope="session")
def images(node, program):
    """Build the images; remove them from the pool afterwards."""
    own = ["-o", f"file:/prog={program}", "-o", "command:greet=/prog args hello"]
    built = [(IMAGE, LOADER, []), (SHARE_IMAGE, LOADER, ["-o", f"mounts={node.home}"])]
    built += [(REST_IMAGE, LOADER, ["-o", f"file:/={REST}"])] if REST else []
    built += [(DISK_IMAGE, DISK_LOADER, [])] if DISK_LOADER else []
    for name, loader, more in built:
        node.root("vmgr", "images", "build", name, "osv", "-o", f"loader={loader}", *own, *more)
    yield [name for name, _, _ in built]
    for name, _, _ in built:
        node.root("vmgr", "images", "remove", name)


@pytest.fixture
def osv(clean, images):
    return clean


ENDS = (  # a script, its exit code and its output
    ("/prog ret 0", 0, "returns 0\n"),
    ("/prog ret 1", 1, "returns 1\n"),
    ("/prog ret 42", 42, "returns 42\n"),
    ("/prog exit 7", 7, "exits 7\n"),
    ("/prog ret 3; /prog ret 0", 3, "returns 3\nreturns 0\n"),
)


@pytest.mark.parametrize(
    ("line", "code", "out"),
    [
        *ENDS,
        ("greet there", 0, "[hello]\n[there]\n"),
        ('/prog args "a b" $DISTRO', 0, "[a b]\n[OSV]\n"),
    ],
)
def test_output_and_exit_code_of_a_program_are_returned(osv, line, code, out):
    result = osv.job(f"#!/bin/bash\n#PBS -N osv\n{line}\n", *VM)
    assert (result.code, result.out.decode(), result.err) == (code, out, b"")


@pytest.mark.parametrize(("how", "code"), [("abort", 134), ("segv", 139)])
def test_crash_fails_the_job_and_prints_the_console_end(osv, how, code):
    result = osv.job(f"/prog {how}\n", *VM)
    assert (result.code, result.out.decode()) == (code, f"will {how}\n")
    assert b"the program crashed" in result.err
    assert b"[backtrace]" not in result.out
    assert b"| 0x" in result.err


def test_missing_program_exits_with_127(osv):
    result = osv.job("/no/such\n", *VM)
    assert result.code == 127
    assert b"Failed to load object: /no/such" in result.err


def test_program_gets_the_job_environment_and_an_address(osv):
    result = osv.job("/prog env\n", *VM, "-v", "X=a b=c,Y=1")
    found = dict(line.partition("=")[::2] for line in result.out.decode().splitlines())
    assert found["X"] == "a b=c"
    assert (found["DISTRO"], found["VTORQUE_RANK"], found["PBS_JOBNAME"]) == ("OSV", "0", "t")
    assert found["OSV_IP"].startswith("10.87.")
    assert "PATH" not in found
    assert "PBS_NODEFILE" not in found  # this image has no such file


def test_environment_is_hidden_from_other_users(osv):
    job = osv.submit("/prog sleep 30\n", *VM, "-v", "SECRET=for-me-alone")
    osv.wait_for(_qemu_arguments, what="QEMU")
    assert b"runscript /dev/vblk1" in _qemu_arguments()
    assert b"for-me-alone" not in _qemu_arguments()
    osv.as_user("vmgr", "cancel", job)
    osv.wait_for(lambda: osv.state_of(job) is None, what="the job's end")


def _qemu_arguments():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return b"\n".join(each for each in found if b"guest=vt-" in each)


def test_login_environment_fits(osv):
    given = {f"V{number:03d}": "x y" * 20 for number in range(300)} | {"B": "a\\b", "D": "$x/y"}
    path = osv.script("/prog env\n")
    for old in ("out", "err"):
        (osv.home / old).unlink(missing_ok=True)
    done = osv.as_user(
        "vsub", "-V", "-W", "block=true", "-o", "out", "-e", "err", *VM, path,
        env=given.items(), check=False,
    )  # fmt: skip
    assert done.returncode == 0
    lines = (osv.home / "out").read_text().splitlines()
    assert {f"{name}={value}" for name, value in given.items() if name != "B"} <= set(lines)
    assert "B=a\\b" in lines


def test_share_is_mounted_at_a_mount_point_of_the_image(osv):
    (osv.home / "words").write_text("from the host\n")
    (osv.home / "words").chmod(0o644)
    result = osv.job("/prog cat words\n", "-vm", f"img={SHARE_IMAGE},ram=64M")
    assert (result.code, result.out) == (0, b"from the host\n")


def test_root_file_system_can_be_a_share(osv, program, config):
    """No disk: programs and libraries are read from a directory of the host."""
    directory = osv.state / "osv-root"
    own = ("-o", f"file:/prog={program}", "-o", "command:greet=/prog args hello")
    root = ("-o", "root_share=apps", "-o", f"root_directory={directory}")
    config("shares.apps", f'source = "{directory}"\ntarget = "/opt/apps"\nreadonly = true')
    home = 'source = "{home}"\ntarget = "/home/{user}"\nuser_owned = true'
    config("shares.home", home)
    try:
        osv.root(
            *("vmgr", "images", "build", ROOT_IMAGE, "osv", "-o", f"loader={LOADER}", *own, *root),
            *("-o", f"mounts={osv.home}"),
        )
        (osv.home / "words").write_text("from the host\n")
        (osv.home / "words").chmod(0o644)
        vm = ("-vm", f"img={ROOT_IMAGE},ram=64M")
        result = osv.job("greet there\n/prog cat words\n/prog ret 42\n", *vm)
        said = "[hello]\n[there]\nfrom the host\nreturns 42\n"
        assert (result.code, result.out.decode(), result.err) == (42, said, b"")
        result = osv.job("/no/such\n", *vm)
        assert result.code == 127
    finally:
        osv.root("vmgr", "images", "remove", ROOT_IMAGE, check=False)
        shutil.rmtree(directory, ignore_errors=True)


def _starter(node, job):
    """Return the pid of the process that waits for a job's order: it holds the record's lock."""
    (journal,) = [p for p in (node.state / "journal").iterdir() if job.job_id in p.name]
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    (lock,) = [r["args"]["lock"] for r in records if r.get("kind") == "starter"]
    with Path(lock).open("rb+") as file:
        return lock_holder(file.fileno())


@pytest.mark.parametrize("how", ["epilogue", "reap"])
def test_starter_killed_before_the_order_is_released(osv, how):
    before = observe(osv)
    job = Hooks(osv, f"osv-{how}.faults", pairs=(("img", IMAGE), ("ram", "64M")))
    try:
        assert job.run("prologue")[0] == 0
        pid = _starter(osv, job)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        code, out, err = job.wrapper("/prog ret 0\n")
        assert (code != 0, out) == (True, ""), err
    finally:
        job.release(how)
    as_before(osv, before, f"starter killed, {how}")
    assert osv.job("/prog ret 5\n", *VM).code == 5


@pytest.mark.parametrize(
    "step",
    ["before record domain", "after record domain", "before create domain", "after create domain"],
)
def test_starter_killed_during_boot_is_released(osv, step):
    """The starter, a fork of the prologue, kills itself: the job ends and nothing is left."""
    before = observe(osv)
    job = Hooks(osv, f"osv-{step.replace(' ', '-')}.faults", pairs=(("img", IMAGE), ("ram", "64M")))
    try:
        code, _, err = job.run("prologue", step)
        assert code == 0, err
        assert _starter(osv, job) is not None
        code, out, err = job.wrapper("/prog ret 0\n")
        assert (code != 0, out) == (True, ""), err
        assert "the process that boots guests ended without answer" in err
    finally:
        job.release("epilogue")
    as_before(osv, before, f"starter killed {step}")


def test_output_is_streamed(osv):
    """The output of a program is in the job's output while it runs."""
    job = osv.submit("/prog sleep 20\n", *VM)
    osv.wait_for(lambda: osv.state_of(job) == "R", what="the job runs")
    osv.wait_for(lambda: b"sleeping" in _spooled(osv, job), what="output")
    osv.as_user("vmgr", "cancel", job)
    osv.wait_for(lambda: osv.state_of(job) is None, what="the job's end")


def _spooled(osv, job):
    number = job.partition(".")[0]
    found = [*osv.state.glob(f"**/{job}.OU"), *osv.state.glob(f"**/{number}*/*"), osv.home / "out"]
    return b"".join(path.read_bytes() for path in found if path.is_file())


def test_endless_loop_ends_at_walltime(osv):
    result = osv.job("/prog loop\n", *VM, "-l", "walltime=4")
    code, out = result.code, result.out
    linux = osv.job("#!/bin/sh\nwhile :; do :; done\n", "-l", "walltime=3")
    assert (code, out) == (linux.code, b"looping\n")


def test_running_guest_is_canceled(osv):
    job = osv.submit("/prog loop\n", *VM)
    osv.wait_for(lambda: osv.state_of(job) == "R", what="the job runs")
    osv.as_user("vmgr", "cancel", job)
    osv.wait_for(lambda: osv.state_of(job) is None, what="the job's end")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/bash\ncd /tmp\n/prog\n", b"line 2 of the job script: cd is of a shell"),
        ("/prog | /prog\n", b"line 1 of the job script: a pipe or || (|) needs a shell"),
        ("# nothing\n", b"no command line"),
    ],
)
def test_script_that_needs_a_shell_is_refused_at_submission(osv, script, words):
    result = osv.job(script, *VM)
    assert result.code == 2
    assert words in result.done.stderr


def test_several_guests_each_run_the_script(osv):
    result = osv.job("/prog ret 5\n", "-vm", f"img={IMAGE},ram=64M,vms_per_node=2")
    assert result.code == 5
    first, second = sorted(result.out.decode().splitlines())
    assert first.endswith("-0: returns 5")
    assert second.endswith("-1: returns 5")


def test_prologue_script_is_refused(osv):
    script = osv.script("exit 0\n", "pro.sh")
    result = osv.job("/prog\n", "-vm", f"img={IMAGE},ram=64M,vm_prologue={script}")
    assert result.code == 121
    assert b"OSv has no shell" in result.err


def test_rest_needs_the_permission_of_the_site(osv):
    result = osv.job("/prog\n", "-vm", f"img={IMAGE},ram=64M,osv_mode=rest")
    assert result.code == 121
    assert b"[plugin.osv] rest" in result.err


def test_job_runs_from_vsub_to_its_end(osv):
    """Within 1.5 s under emulation."""
    took = []
    for _ in range(5):
        begin = time.monotonic()
        assert osv.job("/prog ret 0\n", *VM).code == 0
        took.append(time.monotonic() - begin)
    assert min(took) <= 1.5, took


@pytest.mark.skipif(not DISK_LOADER, reason="VTORQUE_OSV_IMG is not set")
def test_image_boots_from_its_disk(osv):
    result = osv.job("/prog ret 42\n", "-vm", f"img={DISK_IMAGE},ram=64M")
    assert (result.code, result.out) == (42, b"returns 42\n")


@pytest.fixture
def rest(osv):
    """Allow REST for a test."""
    before = osv.config.read_text()
    osv.config.write_text(before + "\n[plugin.osv]\nrest = true\n")
    yield osv
    osv.config.write_text(before)


REST_VM = ("-vm", f"img={REST_IMAGE},ram=128M,osv_mode=rest")


@pytest.mark.skipif(not REST, reason="VTORQUE_OSV_REST is not set")
@pytest.mark.parametrize(("line", "code", "out"), ENDS)
def test_rest_output_and_exit_code_of_a_program_are_returned(rest, line, code, out):
    result = rest.job(f"{line}\n", *REST_VM)
    assert (result.code, result.out.decode(), result.err) == (code, out, b"")


@pytest.mark.skipif(not REST, reason="VTORQUE_OSV_REST is not set")
def test_rest_job_ends_at_a_crash_and_at_its_walltime(rest):
    result = rest.job("/prog segv\n", *REST_VM)
    assert (result.code, result.out) == (139, b"will segv\n")
    result = rest.job("/prog loop\n", *REST_VM, "-l", "walltime=4")
    assert (result.code != 0, result.out) == (True, b"looping\n")


@pytest.mark.skipif(not REST, reason="VTORQUE_OSV_REST is not set")
def test_rest_program_gets_environment_and_node_file(rest):
    result = rest.job("/prog env\n/prog cat $PBS_NODEFILE\n", *REST_VM, "-v", "X=a b=c")
    found = dict(line.partition("=")[::2] for line in result.out.decode().splitlines())
    assert found["X"] == "a b=c"
    assert found["PBS_NODEFILE"].startswith("/tmp/")
    assert result.out.decode().splitlines()[-1].startswith("v")


@pytest.mark.skipif(
    not REST or not Path(REST, "usr/mgmt/cloud-init.so").exists(),
    reason="VTORQUE_OSV_REST has no cloud-init",
)
def test_seed_contains_the_node_file(osv):
    vm = ("-vm", f"img={REST_IMAGE},ram=128M")
    result = osv.job("/prog cat $PBS_NODEFILE\n", *vm)
    assert result.code == 0
    assert result.out.decode().splitlines()[-1].startswith("v")
