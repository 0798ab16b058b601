"""Access to the three-node Slurm cluster of ``scripts/cluster``."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import patience
from users import TIMEOUT

NAME = "vtorque-slurm"
REPO = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2", "n3")
MACHINES = ("head", "login", *NODES)
USER, UID = "vtslurm1", 2001
OTHER = "vtslurm2"
UIDS = {USER: UID, OTHER: 2002}
PREFIX = f"/opt/{NAME}/bin"


# The pid file of one of Slurm's daemons names the process to end.
RESTART = """
kill $(cat /run/$0.pid)
while pgrep -x $0 >/dev/null; do sleep 0.1; done
$0
"""


class SlurmCluster:
    """A head, a submit host, and three nodes: sets of namespaces on this machine."""

    home = Path("/var/lib", NAME, "home", USER)

    def enter(self, machine):
        """Return the command that runs the rest of a command line in a machine."""
        pid = Path("/run", NAME, f"{machine}.pid").read_text().split()[0]
        return ["nsenter", "-a", "-t", pid, "--"]

    def root(self, machine, *argv, check=True, timeout=TIMEOUT, stdin=None):
        """Run a command in a machine as root; return its output."""
        environ = {"PATH": f"{PREFIX}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        done = subprocess.run(
            [*self.enter(machine), *argv], env=environ, capture_output=True, timeout=timeout,
            input=stdin, check=False,
        )  # fmt: skip
        if check and done.returncode:
            pytest.fail(f"{machine}: {argv}: exit {done.returncode}: {done.stdout} {done.stderr}")
        return done.stdout.decode()

    def user_command(self, *argv, env=(), machine="head", user=USER):
        """Return the command line that runs another on the head as the user, in their home."""
        environ = {
            "PATH": f"{PREFIX}:/usr/local/bin:/usr/bin:/bin", "HOME": f"/home/{user}",
            "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8", **dict(env),
        }  # fmt: skip
        pairs = [f"{name}={value}" for name, value in environ.items()]
        become = ["setpriv", f"--reuid={UIDS[user]}", f"--regid={UIDS[user]}", "--init-groups"]
        return [
            *self.enter(machine), *become, "env", "-i", "-C", f"/home/{user}", *pairs, *argv,
        ]  # fmt: skip

    def user(self, *argv, check=True, timeout=TIMEOUT, stdin=b"", machine="head", **more):
        """Run a command on the head, or another machine, as the user, or another user."""
        done = subprocess.run(
            self.user_command(*argv, machine=machine, **more), capture_output=True,
            timeout=timeout, input=stdin, check=False,
        )  # fmt: skip
        if check and done.returncode:
            pytest.fail(f"{argv}: exit {done.returncode}: {done.stdout!r} {done.stderr!r}")
        return done

    def script(self, content, name="job.sh"):
        """Write a file into the user's home; return its name."""
        path = self.home / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o700)
        os.chown(path, UID, UID)
        return name

    def submit(self, content, *args, check=True):
        """Submit a script; return the job's id without waiting."""
        (self.home / "out").unlink(missing_ok=True)
        done = self.user("vsub", "--parsable", "-o", "out", *args, self.script(content))
        return done.stdout.decode().strip()

    def job(self, content, *args, timeout=TIMEOUT):
        """Run a script to its end; return exit code, stdout, stderr."""
        for old in ("out", "err"):
            (self.home / old).unlink(missing_ok=True)
        argv = ("vsub", "--parsable", "-o", "out", "-e", "err", *args, self.script(content))
        job_id = self.user(*argv).stdout.decode().strip()
        self.wait_state(job_id, "COMPLETED", "FAILED", seconds=timeout)
        code, _, signal = self.show(job_id)["ExitCode"].partition(":")
        return int(code) or (128 + int(signal) if signal != "0" else 0), *map(
            self.read, ("out", "err")
        )

    def read(self, name):
        """Return a file of the user's home; empty if it is missing."""
        path = self.home / name
        return path.read_bytes() if path.exists() else b""

    def show(self, job_id):
        """Return fields of ``scontrol show job``; empty if it is unknown."""
        text = self.root("head", "scontrol", "show", "job", job_id, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def state(self, job_id):
        return self.show(job_id).get("JobState", "")

    def wait(self, condition, seconds=TIMEOUT, what="condition"):
        """Wait until ``condition()`` is true; return its value."""
        return patience.wait_for(condition, seconds, what)

    def wait_state(self, job_id, *states, seconds=TIMEOUT):
        return self.wait(lambda: self.state(job_id) in states, seconds, f"{job_id} {states}")

    def guests(self, machine):
        return self.root(machine, "virsh", "-q", "list", "--all", "--name", check=False).split()

    def processes(self, machine, pattern):
        """Return the pids, in the machine, of the processes whose command line matches."""
        return self.root(machine, "pgrep", "-f", pattern, check=False).split()

    def left(self):
        """Return leftovers of jobs on the nodes, and nodes that are not idle."""
        found = {}
        for node in NODES:
            places = ("/var/lib/vtorque/journal", "/var/lib/vtorque/jobs", "/run/vtorque/jobs",
                      "/run/vtorque/proof")  # fmt: skip
            files = self.root(node, "find", *places, "-mindepth", "1", check=False).split()
            guests = self.processes(node, "guest=vt-")
            if files or guests:
                found[node] = files + guests
        states = self.states().items()
        found |= {node: said for node, said in states if said.split()[0] != "idle"}
        queue = self.root("head", "squeue", "-h")
        return found | ({"queue": queue} if queue else {})

    def states(self):
        """Return the state and reason of each node in Slurm.

        All are queried: for a single node (sinfo -n) slurmctld 24.11 does not check again whether a
        job uses it, and may print "draining" for minutes.
        """
        rows = self.root("head", "sinfo", "-h", "-N", "-o", "%N %T %E").splitlines()
        return {node: said.strip() for node, _, said in (row.partition(" ") for row in rows)}

    def image(self, name, *options, builder="debian"):
        """Build an image (40 s or more with Debian's packages) if it is missing; return its name.

        On the host: no machine reaches Debian's mirror.
        """
        vmgr = [f"{PREFIX}/vmgr", "--config", Path("/var/lib", NAME, "build.toml"), "images"]
        if subprocess.run([*vmgr, "show", name], capture_output=True, check=False).returncode:
            subprocess.run([*vmgr, "build", name, builder, *options], check=True, timeout=900)
        return name

    def restart_slurm(self):
        """Let all daemons read slurm.conf again, and wait until all nodes are idle."""
        for machine in NODES:
            self.root(machine, "timeout", "60", "sh", "-ec", RESTART, "slurmd")
        self.root("head", "timeout", "60", "sh", "-ec", RESTART, "slurmctld")
        idle = ("sinfo", "-h", "-p", "main", "-N", "-t", "idle", "-o", "%N")
        self.wait(
            lambda: len(self.root("head", *idle, check=False).split()) == len(NODES),
            what="idle nodes",
        )

    def start_libvirt(self, node):
        start = "setsid tini -s -- libvirtd >/dev/null 2>&1 </dev/null &"
        self.root(node, "sh", "-c", start)
        self.wait(lambda: self.root(node, "virsh", "-q", "uri", check=False), what="libvirtd")

    def stop_libvirt(self, node):
        for pid in self.processes(node, "^libvirtd$"):
            self.root(node, "kill", "-9", pid)
        self.wait(lambda: not self.processes(node, "^libvirtd$"), what="end of libvirtd")


def bring_up():
    """Make the cluster, or bring it up to date; the user's home is empty."""
    assert os.geteuid() == 0, "the cluster's machines are namespaces: run as root"
    up = subprocess.run(
        [REPO / "scripts/cluster", "up", "--name", NAME], capture_output=True, check=False,
        timeout=1100, text=True,
    )  # fmt: skip
    if up.returncode:
        pytest.fail(f"scripts/cluster up: {up.stdout}{up.stderr}")
    for path in SlurmCluster.home.glob("[!.]*"):  # of earlier tests, if the cluster stayed up
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return SlurmCluster()


@contextlib.contextmanager
def nothing_left(cluster):
    """Fail if a job has left anything on a node, or if a node is not idle."""
    yield cluster
    deadline = time.monotonic() + 120
    while (left := cluster.left()) and time.monotonic() < deadline:
        time.sleep(0.3)
    if left:  # the next test needs a clean cluster
        cluster.root("head", "scancel", "-u", USER, "--signal=KILL", check=False)
        cluster.root("head", "scancel", "-u", USER, check=False)
    assert not left
