"""A real slurmctld in separate namespaces, whose nodes are the pool's. As root.

The controller, munged and all machines are in one set of namespaces (mount, net, pid, uts, ipc);
each machine (slurmd_cloud) has its own pid namespace within, so that its end ends all its
processes.
"""

import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path

from vtorque_admin.steps import Check
from vtorque_core.api.setup_steps import Installation
from vtorque_pool import slurm_conf

HERE = Path(__file__).parent
_INSIDE = r"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /etc/slurm; mount -t tmpfs tmpfs /etc/slurm
ip link set lo up
ip link add br0 type bridge; ip link set br0 up; ip addr add 10.89.0.1/16 dev br0
hostname head
mkdir -p /run/munge /run/lock
{ echo 127.0.0.1 localhost; echo 10.89.0.1 head $1; } > $0/hosts; mount --bind $0/hosts /etc/hosts
cp $0/slurm.conf /etc/slurm/; echo CgroupPlugin=cgroup/v1 > /etc/slurm/cgroup.conf
install -m 400 $0/munge.key /run/munge.key
munged --force --key-file /run/munge.key --pid-file /run/munge/pid --log-file $0/munge.log \
  --seed-file /run/munge/seed -S /run/munge/munge.socket.2
eval "$2"
: > $0/up
exec tini -s -- sleep infinity
"""
_CONF = """ClusterName=pool
SlurmctldHost=head(10.89.0.1)
SlurmUser=root
AuthInfo=cred_expire=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,sched_min_interval=100000
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/cloud/spool/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/slurmd.%n.log
DebugFlags=Power
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES State=UP
"""
_TOML = """[paths]
state = "{top}/vtorque"
run = "{top}/vtorque-run"

[plugin.pool]
cluster = "test"
state = "{top}/pool"
log = "{top}/pool.log"
idle_timeout = 4
boot_timeout = {ready}
delete_timeout = 4
max_failures = 2
failure_backoff = 60
timeout = 20

[[plugin.pool.shapes]]
name = "small"
nodes = "cloud[1-{most}]"
cloud = "here"
memory = "500M"

[plugin.pool.clouds.here]
"""
_DOUBLE = """driver = "slurmd-in-namespaces"
directory = "{top}/cloud"
"""


class SlurmWorld:
    """One Slurm; ``top`` has all its files."""

    conf, toml, inside = _CONF, _TOML + _DOUBLE, ""

    def __init__(self, top, most=3, ready=15):
        self.top = top
        self.names = [f"cloud{n}" for n in range(1, most + 1)]
        for name in ("state", "cloud", "out"):
            (top / name).mkdir()
        about = top / "brought" / "slurmd_cloud-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slurmd-cloud\nVersion: 1.0\n")
        entry = "slurmd-in-namespaces = slurmd_cloud:driver"
        (about / "entry_points.txt").write_text(f"[vtorque1.pool]\n{entry}\n")
        self.config = top / "vtorque.toml"
        self.config.write_text(self.toml.format(top=top, most=most, ready=ready))
        self.python = top / "python"
        line = shlex.join(
            [sys.executable, "-I", str(HERE / "run_with_double.py"), str(top / "brought")]
        )
        self.python.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        self.python.chmod(0o755)
        (top / "munge.key").write_text(secrets.token_hex(512))
        (top / "slurm.conf").write_text(self.conf.format(top=top))

    def __enter__(self):
        names = " ".join(self.names)
        with (self.top / "world.log").open("w") as log:
            self._unshare = subprocess.Popen(
                ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork",
                 "--kill-child", "bash", "-c", _INSIDE, str(self.top), names, self.inside],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self.wait((self.top / "up").exists, "the world")
            children = f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children"
            self._pid = Path(children).read_text().strip()
            self._set_up()
            self.run("slurmctld")
            self.wait(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._unshare.kill()
        self._unshare.wait()

    def _set_up(self):
        """Apply the pool's own steps inside."""
        self.run(str(self.python), str(HERE / "slurm_world.py"), str(self.top), str(self.config))
        self._nodes_of_one_host()

    def _nodes_of_one_host(self):
        """Give each node its own ports."""
        text = self.run("cat", "/etc/slurm/vtorque-pool.conf")
        ports = f"Port=[17001-{17000 + len(self.names)}] NodeAddr=10.89.0.1 NodeHostName=head"
        text = text.replace(" State=CLOUD", f" State=CLOUD {ports}")
        (self.top / "vtorque-pool.conf").write_text(text)
        self.run("cp", str(self.top / "vtorque-pool.conf"), "/etc/slurm/")

    def run(self, *argv, check=True):
        """Run a command inside; return its output."""
        path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            ["nsenter", "-a", "-t", self._pid, "--", "env", "-i", path, "HOME=/root", *argv],
            capture_output=True, text=True, timeout=600, check=False, cwd="/",
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def pool(self, *words, check=True):
        """Run ``vtorque pool`` inside."""
        config = ("--config", str(self.config))
        argv = (str(self.python), "-m", "vtorque_core.cli.vtorque", "pool", *words, *config)
        return self.run(*argv, check=check)

    def submit(self, script, *options):
        """Submit a job; return its id."""
        words = ("sbatch", "--parsable", "-o", f"{self.top}/out/%j", "-D", "/", *options)
        return self.run(*words, "--wrap", script).strip()

    def jobs(self):
        """Return the output of squeue: id to state and reason."""
        lines = self.run("squeue", "-h", "-a", "-o", "%i %T %r").splitlines()
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}

    def machines(self):
        """Return the nodes that have machines, according to the cloud."""
        import json

        found = [json.loads(p.read_text()) for p in (self.top / "cloud").glob("m-*.json")]
        return sorted(each["machine"][1] for each in found)

    def wait(self, done, what, seconds=600):
        """Return the result of ``done`` once it is true; show the logs if it never is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if answer := done():
                return answer
            time.sleep(0.2)
        logs = [self.top / name for name in ("world.log", "slurmctld.log", "pool.log")]
        ends = "\n".join(f"-- {p}\n{p.read_text()[-3000:]}" for p in logs if p.exists())
        raise AssertionError(f"{what}: not after {seconds} s\n{ends}")

    def log(self):
        """Return the pool's log."""
        path = self.top / "pool.log"
        return path.read_text() if path.exists() else ""


if __name__ == "__main__":  # inside: the setup steps, with a program that finds the double
    from vtorque_core.live.service import site_and_installation
    from vtorque_pool.settings import Settings

    top, config = Path(sys.argv[1]), Path(sys.argv[2])
    site, _ = site_and_installation(config)
    place = Installation(top / "vtorque", config, top / "jobshell", python=top / "python")
    for step in slurm_conf.steps(site[Settings], place):
        if not step.is_applied():
            assert not isinstance(step, Check), step
            step.apply()
        assert step.is_applied(), step.text
