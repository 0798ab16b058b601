"""Run a job's hooks manually, and restart libvirtd, for tests of faults and failed starts.

``Hooks`` runs the batch system's steps one by one, so that a test can kill each process.
"""

import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_cluster import REPO
from users import TIMEOUT
from vtorque_core.api.submission import to_token
from vtorque_core.base import hypervisor
from vtorque_core.config.request import Request
from vtorque_pbs import convention as pbs

# Runs ``vtorque`` with the journal's test seam counting steps. argv: the mode, then vtorque's.
# "count" prints the names of all steps; "N" dies at step N, "NAME" at the first step of that name,
# "NAME+S" is killed S seconds after that step, by another process.
_DRIVER = """
import os, signal, subprocess, sys, threading
from vtorque_core.records import journal
spec, seen, lock = sys.argv.pop(1), [], threading.Lock()
wanted, _, delay = spec.partition("+")
def step(name):
    with lock:
        seen.append(name)
        if wanted not in (name, str(len(seen))) or seen.count(name) > 1 and wanted == name:
            return
    print(name, flush=True)
    if not delay:
        os.kill(os.getpid(), signal.SIGKILL)
    subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -9 {os.getpid()}"], stdout=2)
journal.on_step = step
if spec == "count":
    ends, hook = os._exit, os.getpid()
    def told(code):
        if os.getpid() == hook:
            print("\\n".join(seen), flush=True)
        ends(code)
    os._exit = told
from vtorque_core.cli.vtorque import main
main()
"""


@dataclass
class Hooks:
    """The hooks of a job that no batch system knows; ``conf`` is the site config."""

    node: object
    job_id: str
    user: str = ""
    pairs: tuple = ()
    token: str = ""
    conf: Path | None = None
    said: list = field(default_factory=list)

    def __post_init__(self):
        self.user = self.user or self.node.user
        self.conf = self.conf or self.node.config
        self.token = self.token or to_token(Request(tuple(self.pairs)).encode())
        self.environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

    def argv(self, which):
        """Return the arguments of a hook's program, as Torque gives them."""
        group = str(pwd.getpwnam(self.user).pw_gid)
        resources = pbs.build_resources({"nodes": "1", "other": self.token})
        hook = ["hook", "--config", str(self.conf), which]
        if which == "prologue":
            args = pbs.PrologueArgs(self.job_id, self.user, group, "t", resources, "local")
        else:
            args = pbs.EpilogueArgs(
                self.job_id, self.user, group, "t", "0", resources, "walltime=00:00:01", "local"
            )
        return [*hook, *args.argv()]

    def start(self, which, spec=""):
        """Start a hook; ``spec`` is the mode of the driver above."""
        python = str(self.node.prefix / "bin/python3")
        program = ["-c", _DRIVER, spec] if spec else ["-m", "vtorque_core.cli.vtorque"]
        return subprocess.Popen(
            [python, "-I", *program, *self.argv(which)], env=self.environ, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def run(self, which, spec="", timeout=TIMEOUT):
        """Run a hook to its end, with any result; return exit code, output, errors."""
        process = self.start(which, spec)
        return self.end(process, timeout)

    def end(self, process, timeout=TIMEOUT):
        """Wait for a hook's end."""
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            pytest.fail(f"{process.args}: no end in {timeout} s")
        self.said.append(err.decode())
        return process.returncode, out.decode().splitlines(), err.decode()

    def killed(self, which, spec):
        """Run a hook until it is killed at the step; return that step's name."""
        code, out, err = self.run(which, spec)
        assert code == -signal.SIGKILL, (spec, code, out, err)
        return out[-1]

    def killed_qemu(self, pid, process):
        """Kill this QEMU; check that the hook, which waits for its guest, ends normally."""
        os.kill(pid, signal.SIGKILL)
        assert self.end(process)[0] == 0

    def wrapper(self, text="#!/bin/sh\necho ran\n", timeout=TIMEOUT):
        """Run the job shell as the user; return exit code, output, errors."""
        script = self.node.home / f"{self.job_id}.SC"
        script.write_text(text)
        script.chmod(0o755)
        environ = {"PBS_JOBID": self.job_id, "PBS_O_WORKDIR": str(self.node.home)}
        done = self.node.as_user(
            "vtorque", "jobshell", "--config", str(self.conf), user=self.user,
            stdin=f"{script}\n".encode(), env=environ, check=False, timeout=timeout,
        )  # fmt: skip
        script.unlink()
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def release(self, how):
        """Release the job's resources: by ``epilogue``, or by ``reap`` like an admin."""
        if how == "epilogue":
            code, out, err = self.run("epilogue")
            assert code == 0, (out, err)
            return
        done = self.node.root("vtorque", "reap", "--config", str(self.conf), "--json")
        for result in json.loads(done.stdout)["jobs"]:
            assert result["action"] in ("released", "alive"), result

    def qemu(self, seconds=TIMEOUT):
        """Return the pid of the job's first QEMU, once it runs."""
        return self.node.wait_for(self.find_qemu, seconds, f"the QEMU of {self.job_id}")

    def find_qemu(self):
        """Return the pid of a QEMU of the job, or None."""
        name = f"guest=vt-{self.job_id}.0-"
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if name.encode() in entry.read_bytes():
                    return int(entry.parent.name)
            except OSError:
                continue
        return None


def observe(node):
    """Return everything that a job could leave on the host."""
    return node.footprint()


def as_before(node, before, where, seconds=TIMEOUT):
    """Fail unless the host's state is as before; a tap and a QEMU may exist a moment longer."""
    deadline = time.monotonic() + seconds
    while (after := observe(node)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {kind: after[kind] ^ before[kind] for kind in before if after[kind] != before[kind]}
    assert not left, f"{where}: {left}"


@contextlib.contextmanager
def syslog_listener():
    """Listen at /dev/log, as syslogd does; yield a function that returns the text sent so far."""
    path = Path("/dev/log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.setblocking(False)
        received = []

        def read():
            with contextlib.suppress(BlockingIOError):
                while True:
                    received.append(listener.recv(8192).decode(errors="replace"))
            return "\n".join(received)

        try:
            yield read
        finally:
            path.unlink()


def kill_libvirtd():
    """Kill this machine's libvirtd, not a scripts/cluster's; tini above it then ends by itself."""
    ours = ["pgrep", "--ns", str(os.getpid()), "--nslist", "pid", "-u", "0", "-x", "libvirtd"]
    found = subprocess.run(ours, capture_output=True, check=False, text=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT
    while any(Path("/proc", pid).exists() for pid in found.stdout.split()):
        assert time.monotonic() < deadline, "libvirtd survives SIGKILL"
        time.sleep(0.02)
    hypervisor.close()  # a later test in this process would use the dead connection


def start_libvirtd(node):
    """Start libvirtd, unless it answers."""
    done = subprocess.run(
        [REPO / "scripts/node", "libvirt", "--name", node.run_dir.name],
        capture_output=True, check=False, timeout=180, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def start_service(node):
    """Start the batch system again, as scripts/node does."""
    node.root("vtorque", "local", "serve", "--config", str(node.config))
