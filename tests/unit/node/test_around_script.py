"""Lines of plugins at the end of a job's standard error, limited to a second."""

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from vtorque_core.api.values import hookimpl
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_core.node.shell import around_script
from vtorque_core.node.shell.proof import Proof


@pytest.fixture
def output(tmp_path):
    with (tmp_path / "out").open("w+b") as file:
        yield file


def content_of(output):
    output.seek(0)
    return output.read()


def test_after_script_output_is_shown_and_errors_are_not(output):
    commands = [
        ["/bin/sh", "-c", "echo one; echo trouble >&2; exit 3"],
        ["/nonexistent/program"],
        [],
        [7, None],
        ["/bin/sh", "-c", "read x; echo two $x; env"],
    ]
    around_script.run_all(commands, output.fileno(), 20)
    lines = content_of(output).decode().splitlines()
    assert lines[:2] == ["one", "two"]
    assert not [line for line in lines if line.startswith("HOME=")]


def test_hanging_after_script_command_is_killed(output):
    commands = [["/bin/sh", "-c", "echo here; exec sleep 600"], ["/bin/echo", "late"]]
    around_script.run_all(commands, output.fileno(), 0.5)
    assert content_of(output) == b"here\n"


def test_full_error_pipe_does_not_delay_the_end_of_the_job(tmp_path):
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(write, b"x" * 4096)
        os.set_blocking(write, True)
        around_script.run_all([["/bin/echo", "never"]], write, 0.5)
    finally:
        os.close(read)
        os.close(write)


SHELL = """
import os, signal, sys
from vtorque_core.node.shell import around_script
class Each:
    error = None
    item = ["/bin/sh", "-c", "kill -TERM $PPID; kill -INT $PPID; echo told"]
class Plugins:
    def withhold(self, names):
        return self
    def each(self, hook, **kw):
        return [Each()]
class Site:
    from vtorque_core.api import Paths
    paths = Paths()
from vtorque_core.base.names import JobAttempt
from vtorque_core.node.shell.proof import Proof
around_script.run_after(Proof(JobAttempt("42.srv", 0, "u", 1000), "ready"), 42, Site(), Plugins())
sys.exit(42)
"""


def test_walltime_reached_during_after_script_keeps_the_exit_status(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SHELL], capture_output=True, check=False, cwd=tmp_path, timeout=180
    )
    assert (done.returncode, done.stdout, done.stderr) == (42, b"", b"told\n")


def test_raising_or_silent_after_script_hook_changes_nothing(tmp_path):
    bad, mute = ModuleType("bad"), ModuleType("mute")

    @hookimpl
    def vtorque_after_script(place):
        raise RuntimeError(place)

    bad.vtorque_after_script = vtorque_after_script

    @hookimpl
    def mute_after_script(site):
        return ()

    mute.vtorque_after_script = mute_after_script
    plugins = Plugins()
    plugins.register("mute", mute, "mute 1")
    plugins.register("bad", bad, "bad 1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    proof = Proof(JobAttempt("42.srv", 0, "u", os.getuid()), "ready")
    around_script.run_after(proof, 0, build(parse_toml(b""), plugins, node=False), plugins)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_disabled_plugin_of_the_job_is_not_called_after_the_script():
    asked = []

    @hookimpl
    def vtorque_after_script(code):
        asked.append(code)
        return ()

    module = ModuleType("report")
    module.vtorque_after_script = vtorque_after_script
    plugins = Plugins()
    plugins.register("report", module, "report 1")
    site = build(parse_toml(b""), plugins, node=False)
    for code, off in ((1, ("report",)), (2, ())):
        proof = Proof(JobAttempt("42.srv", 0, "u", os.getuid()), "ready", off=off)
        around_script.run_after(proof, code, site, plugins)
    assert asked == [2]
