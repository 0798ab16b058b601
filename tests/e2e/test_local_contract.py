"""The embedded batch system passes the live part of the contract of batch adapters."""

import os
import platform
import pwd
import subprocess

import pytest

from vtorque_testing.harness import ProgramResult
from vtorque_testing.live import LiveBatchContract, LiveDialect

FORGE = """
import os, sys
from pathlib import Path
from vtorque_local.submitter import LocalSubmitter
from vtorque_core.api import Paths
submitter = LocalSubmitter(Paths(run=Path(sys.argv[1])))
blob = os.fsencode(sys.argv[2])
sys.exit(submitter.submit(submitter.split(sys.argv[3:]), blob, None))
"""


class LocalLive:
    """See vtorque_testing.live.LiveHarness."""

    dialect = LiveDialect(
        busy=(),  # one slot
        walltime=lambda seconds: ["-l", f"walltime={seconds}"],
        cancelled=frozenset({143}),
        late=frozenset({143}),
        environ={
            "PBS_JOBID": rf"[0-9]+\.{platform.node()}",
            "PBS_JOBNAME": "t",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": "/var/spool/torque/aux/.+",
            "PBS_O_WORKDIR": "/home/.+",
        },
    )

    def __init__(self, node):
        self.node = node
        self.home = node.home
        self.waiting = {}

    def submit(self, script, *args):
        return self._start(self.node.command("vsub"), script, *args)

    def submit_forged(self, script, blob):
        python = [self.node.prefix / "bin/python3", "-I", "-c", FORGE, self.node.run_dir]
        return self._start([*python, os.fsdecode(blob)], script)

    def _start(self, command, script, *args):
        number = len(self.waiting)
        name = self.node.script(script, f"live{number}.sh")
        files = ("-N", "t", "-o", f"out{number}", "-e", f"err{number}")
        entry = pwd.getpwnam(self.node.user)
        process = subprocess.Popen(
            [*command, "-W", "block=true", *files, *args, name],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.node.home,
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], umask=0o022,
            env={"PATH": "/usr/bin:/bin", "HOME": entry.pw_dir, "SHELL": "/bin/bash"},
        )  # fmt: skip
        job = process.stdout.readline().decode().strip()
        assert job, process.communicate()
        self.waiting[job] = process, number
        return job

    def phase(self, job):
        state = self.node.state_of(job)
        if state is None:
            return "gone"
        proof = self.node.run_dir / "proof" / f"{job}.json"
        said = proof.read_bytes() if state == "R" and proof.exists() else b""
        if state == "Q" or (state == "R" and not said and not self._begun(job)):
            return "queued"
        return "starting" if b'"starting"' in said else "running"

    def _begun(self, job):
        """Whether the job, on bare metal, has its output file."""
        return (self.node.home / f"out{self.waiting[job][1]}").exists()

    def wait(self, job):
        process, number = self.waiting[job]
        process.communicate(timeout=180)
        found = (self.node.home / f"{name}{number}" for name in ("out", "err"))
        return ProgramResult(
            process.returncode, *(p.read_bytes() if p.exists() else b"" for p in found)
        )

    def cancel(self, job):
        self.node.as_user("vmgr", "cancel", job)

    def tidy(self):
        for job, (process, number) in self.waiting.items():
            if process.poll() is None:
                self.node.as_user("vmgr", "cancel", job, check=False)
                process.communicate(timeout=180)
            for name in (f"out{number}", f"err{number}", f"live{number}.sh"):
                (self.node.home / name).unlink(missing_ok=True)


# Other tests cover its report of a job with guests; plugins/local/tests that of one without.
@pytest.mark.full
@pytest.mark.e2e
class TestLocalJobs(LiveBatchContract):
    @pytest.fixture
    def live(self, clean):
        harness = LocalLive(clean)
        yield harness
        harness.tidy()
