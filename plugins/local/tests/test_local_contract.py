"""The embedded batch system passes the contract of batch adapters, with its real service.

The double is small: the service has no slots, so that jobs stay queued, and records its input.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from pbs_harness import TorqueHarness
from vtorque_core.api import Paths
from vtorque_core.api.batch_system import Outcome
from vtorque_local import plugin
from vtorque_local.entry import number_of
from vtorque_local.job import LocalJob, array_of
from vtorque_local.node import WAITS
from vtorque_local.submitter import LocalSubmitter
from vtorque_pbs import convention as pbs
from vtorque_testing import harness as contract
from vtorque_testing.batch import BatchContract
from vtorque_testing.wild_scripts import SCRIPTS, select_few

SERVE = """
import sys
from pathlib import Path
from vtorque_local.mom import JobPrograms
from vtorque_local.service import LocalService, Setup

run, spool, noting = Path(sys.argv[1]), Path(sys.argv[2]), [sys.executable, "-c", *sys.argv[3:]]
programs = JobPrograms(["true"], ["true"], ["true"])
setup = Setup(run, spool, programs, ["true"], slots=0, root_jobs=True, acceptor=noting)
service = LocalService(setup)
service.open()
print("up", flush=True)
service.serve()
"""
NOTING = """
import json, sys
from pathlib import Path
from vtorque_local import acceptor, client

plain, last = client.submission, sys.argv.pop(1)

def noting(message, *args):
    Path(last).write_text(json.dumps({name: message[name] for name in ("argv", "environ")}))
    return plain(message, *args)

client.submission = noting
acceptor.main()
"""
pytestmark = pytest.mark.e2e
OPEN_JOBS = 10  # at once: the service has limits per user


class LocalHarness:
    """See vtorque_testing.harness.BatchHarness."""

    system = next(iter(plugin.vtorque_batch_systems()))
    dialect = replace(
        TorqueHarness.dialect,
        exits=dict.fromkeys(Outcome, 0) | {Outcome.IN_USE: WAITS},
        carries=70_000,
        two_nodes=(),
        own=(
            contract.OwnValue(("-v", "MINE='a,b'"), lambda job: "MINE='a,b'" in job.argv),
            contract.OwnValue(("-l", "mem=1gb"), lambda job: "mem=1gb" in job.argv),
        ),
    )

    def __init__(self, root: Path) -> None:
        self.paths = Paths(state=root / "state", run=root / "run")
        self.site = contract.PluginSite(self.paths)
        self.directory = root / "home"
        self.directory.mkdir()
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(self.directory)}
        self.submitter = LocalSubmitter(self.paths)
        self.open: deque[str] = deque()
        self.last, self.number = root / "last", ""
        self.serve(True)

    def serve(self, up: bool) -> None:
        if up and getattr(self, "process", None) is None:
            spool = self.paths.state / "local"
            argv = [sys.executable, "-c", SERVE, self.paths.run, spool, NOTING, self.last]
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)
            assert self.process.stdout.readline() == b"up\n"
        elif not up and self.process:
            self.process.kill()
            self.process.wait(180)
            self.process.stdout.close()
            self.process = None

    def last_input(self) -> contract.Submission | None:
        counter = self.paths.state / "local/counter"
        number = counter.read_text() if counter.exists() else ""
        if number == self.number:
            return None
        self.number, note = number, json.loads(self.last.read_text())
        jobs = counter.parent / "jobs"
        name, *_ = (*jobs.glob(f"{number}/*.SC"), *jobs.glob(f"{number}-*/*.SC"))
        job_id = array_of(name.stem)
        self.open.append(job_id)
        if len(self.open) > OPEN_JOBS:
            self.submitter.cancel(self.open.popleft())
        content = name.read_bytes()
        return contract.Submission(job_id, tuple(note["argv"]), note["environ"], content)

    def job(self, job_id: str, element: int) -> LocalJob:
        number = pbs.sequence(job_id)
        of = (self.paths.state / "local/jobs").glob(f"{number}*" if number[-1] == "-" else number)
        return LocalJob.decode((sorted(of, key=number_of)[element] / "job").read_bytes())

    def answer(self, ended) -> bool:
        return False

    def start(self, job, *, nodes=1, element=0, forged=None) -> contract.StartedJob:
        assert nodes == 1
        found = self.job(job.job_id, element)
        args = pbs.PrologueArgs.parse(found.hook)
        if forged is not None:
            resources = pbs.parse_resources(args.resources) | {"other": forged}
            args = replace(args, resources=pbs.build_resources(resources))
        hook = contract.HookCall(self.system.node(self.site), tuple(args.argv()), {})
        rest = json.loads(Path(found.hook[7]).with_name("rest").read_bytes())
        line = f"{shlex.quote(found.hook[7])} {rest['args']}".rstrip() + "\n"
        environ = rest["environ"] | found.environ
        return contract.StartedJob((hook,), contract.ShellCall((), environ, os.fsencode(line)))

    def end(self, job: contract.Submission) -> None:
        self.open.remove(job.job_id)
        self.submitter.cancel(job.job_id)

    def setup_root(self) -> Path | None:
        return None


@pytest.fixture(scope="module")
def local():
    root = Path(tempfile.mkdtemp(prefix="vtc"))
    harness = LocalHarness(root)
    yield harness
    harness.serve(False)
    shutil.rmtree(root)


class TestLocal(BatchContract):
    @pytest.fixture
    def harness(self, local):
        return local

    wild, rarely = select_few(SCRIPTS)
    refused = {  # noqa: RUF012
        "account-and-priority.sh": "-A",
        "array-openpbs.sh": "-J",
        "conda.sh": "gpus=1",
        "csh-array.csh": "-J",
        "csh-cray-habit.csh": "-A",
        "depend.sh": "-W depend",
        "email-options.sh": "-m",
        "feature-nodes.sh": "-q",
        "gnu-parallel.sh": "nodes=2",
        "line-continuation-directive.sh": "No escaped character",
        "mail.sh": "-m",
        "make-nproc.sh": "-l select",
        "mpdboot.sh": "nodes=3",
        "mpi-intel.sh": "nodes=2",
        "mpi-mpich-machinefile.sh": "node02",
        "mpi-openmpi.sh": "nodes=4",
        "namd.csh": "nodes=8",
        "pbsdsh.sh": "nodes=4",
        "procs-option.sh": "-A",
        "scratch-dir-option.sh": "-l select",
        "scratch-gaussian.sh": "-q",
        "select-chunks.sh": "-l select",
        "size-option.csh": "-l size",
        "ssh-loop.sh": "nodes=3",
        "stage-remote.sh": "-W stagein",
    }


def test_300_real_scripts_are_accepted():
    assert len({wild.content for wild in SCRIPTS}) == len(SCRIPTS)
    assert len(SCRIPTS) - len(TestLocal.refused) >= 300
    assert sum(wild.runs != "" for wild in SCRIPTS) >= 250
