"""The Slurm adapter passes the contract of batch adapters, with doubles of Slurm's commands."""

import json
import os
import pwd
from pathlib import Path

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_core.api import Paths
from vtorque_core.api.batch_system import Outcome
from vtorque_slurm import batch_commands, plugin
from vtorque_slurm.settings import Settings
from vtorque_testing import harness as contract
from vtorque_testing.batch import BatchContract
from vtorque_testing.wild_scripts import SCRIPTS, select_few

pytestmark = pytest.mark.e2e  # whole hooks and job shells: with the whole jobs


def comment_of(job: contract.Submission) -> str:
    return next((w.partition("=")[2] for w in job.argv if w.startswith("--comment=")), "")


class SlurmHarness:
    """See vtorque_testing.harness.BatchHarness."""

    dialect = contract.Dialect(
        options=("-J", "t", "--time=00:10:00", "-e", "err or"),
        directive="#SBATCH --job-name=named -n2",
        unknown="--no-such-option",
        arguments=lambda script, words: [script, *words],
        share=lambda cpus, mib: [f"-c{cpus}", f"--mem={mib}M"],
        exits=dict.fromkeys(Outcome, 0),
        carries=128 * 1024,
        permutes=False,
        array=("--array=1-2",),
        two_nodes=("-N", "2"),
        interactive=("-I",),
        own=(
            contract.OwnValue(
                ("--comment=mine 'a' b",), lambda job: "mine 'a' b" in comment_of(job)
            ),
            contract.OwnValue(
                ("-C", "big|fat"),
                lambda job: "(big|fat)&vt" in " ".join(job.argv) or "big|fat" in job.argv,
            ),
        ),
    )

    def __init__(self, root: Path) -> None:
        self.system = next(iter(plugin.vtorque_batch_systems()))
        self.slurm = SlurmDoubles(root)
        self.directory = root / "home"
        self.directory.mkdir()
        self.root = root / "etc"
        self.root.mkdir()
        conf = self.root / "slurm.conf"
        conf.write_text("ClusterName=x\nProlog=/etc/slurm/site.sh # ours\nPrologFlags=Alloc")
        self.settings = Settings(bindir=str(self.slurm.bin), conf=str(conf), feature="vt")
        paths = Paths(state=root / "state", run=root / "run")
        self.site = contract.PluginSite(paths, (self.settings,))
        self.environ = {"PATH": f"{self.slurm.bin}:{os.environ['PATH']}", "HOME": str(root)}

    def last_input(self) -> contract.Submission | None:
        job = self.slurm.last()
        if job is None:
            return None
        return contract.Submission(job["id"], tuple(job["argv"]), job["environ"], job["script"])

    def answer(self, ended) -> bool:
        words = [ended.code, ended.stdout.decode("latin-1"), ended.stderr.decode("latin-1")]
        (self.slurm.top / "answer").write_text(json.dumps(words))
        return True

    def start(self, job, *, nodes=1, element=0, forged=None) -> contract.StartedJob:
        job_id = str(int(job.job_id) + element * 100_000)
        known = json.loads((self.slurm.top / f"{job.job_id}.job").read_text())
        names = [f"n{i + 1}" for i in range(nodes)]
        common = {
            "SLURM_JOB_ID": job_id,
            "SLURM_JOB_USER": pwd.getpwuid(os.getuid()).pw_name,
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_NODELIST": "n1" if nodes == 1 else f"n[1-{nodes}]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_CPUS_PER_NODE": "2" if nodes == 1 else f"2(x{nodes})",
            "SLURM_JOB_RESTART_COUNT": "0",
            "SLURM_JOB_COMMENT": known["comment"] if forged is None else forged,
        }
        asked = " ".join(job.argv)
        cpus = next((int(w[2:]) for w in job.argv if w.startswith("-c")), 1)
        mem = asked.partition("--mem=")[2].partition("M")[0] or 0
        self.slurm.facts(cpus=f"0-{cpus - 1}", mem=int(mem), restarts=0, state="RUNNING")
        hooks = tuple(
            contract.HookCall(self.system.node(self.site), (), common | {"SLURMD_NODENAME": name})
            for name in names
        )
        script = self.slurm.top / f"{job.job_id}.script"
        words = list(job.argv[job.argv.index("/dev/stdin") + 1 :]) if "/dev/stdin" in asked else []
        environ = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NUM_NODES": str(nodes)}
        return contract.StartedJob(hooks, contract.ShellCall((str(script), *words), environ, None))

    def end(self, job: contract.Submission) -> None:
        (self.slurm.top / f"{job.job_id}.job").rename(self.slurm.top / f"{job.job_id}.ended")

    def serve(self, up: bool) -> None:
        self.slurm.down(not up)

    def setup_root(self) -> Path | None:
        return self.root


def refusal(content):
    """Return the requests that sbatch reads from a script, in its order; empty: none."""
    if not content.strip():
        return "contains only whitespace" if content else "is empty"
    if not content.startswith(b"#!"):
        return "does not look like a batch script"
    if b"\0" in content:
        return "NULL character"
    return "DOS line breaks" if b"\r\n" in content else ""


class TestSlurm(BatchContract):
    @pytest.fixture
    def harness(self, tmp_path, monkeypatch):
        monkeypatch.setattr(batch_commands, "_PAUSE", 0.0)
        return SlurmHarness(tmp_path)

    wild, rarely = select_few(w for w in SCRIPTS if b"hetjob" not in w.content)
    refused = {w.name: refusal(w.content) for w in SCRIPTS if refusal(w.content)}  # noqa: RUF012
