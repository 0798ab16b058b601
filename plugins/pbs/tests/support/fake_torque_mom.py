"""Double of Torque's pbs_mom: runs the installed hook files as observed on Torque 6.1.3."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from pbs_harness import ME, NODES, TorqueHarness, resource_list
from quick_python import shebang
from torque_node import adapter_at
from vtorque_admin.steps import ReplacedFile
from vtorque_core.api.batch_system import Outcome
from vtorque_core.api.setup_steps import Installation

STAND_IN = """
import sys
from pathlib import Path
root, node = Path({root!r}), {node!r}
with (root / "vtorque.log").open("a") as log:
    log.write(repr([node, *sys.argv[1:]]) + "\\n")
if sys.argv[4:5] == ["prologue"]:
    outcome, _, later = (root / "outcome").read_text().partition(" ")
    (root / "outcome").write_text(later or outcome)
    if outcome.isdigit():
        sys.exit(f"vtorque: no config" if outcome == "2" else int(outcome))
    from torque_node import adapter_at
    from vtorque_core.api.batch_system import Outcome
    adapter = adapter_at(root, node)
    job = adapter.job(sys.argv[5:], {{}})
    waits = sys.argv[5] == "first"  # pbs_mom ignores the code of prologue.parallel
    code = adapter.finish(job, Outcome[outcome], "libvirtd does not answer", hook_waits=waits)
    sys.exit(code if waits else 0)
"""


class FakeTorqueMom(TorqueHarness):
    """Torque with the hooks of vTorque on two nodes; ``vtorque`` itself is a double.

    The double records its calls and lets the real adapter report an outcome.
    """

    def __init__(self, root):
        super().__init__(root)
        self.output = b""  # of the job: hooks' and its own
        self.down = set()  # nodes on which a prologue.parallel has failed
        self.outcome(Outcome.READY)
        for node in NODES[:2]:
            self._install(node)

    def priv(self, node):
        return self.root / node / "mom_priv"

    def outcome(self, outcome):
        """Set the results of the next prologues: an Outcome, or an exit code of a broken vtorque.

        Several results, separated by blanks, are for one prologue each.
        """
        text = outcome.name if isinstance(outcome, Outcome) else str(outcome)
        (self.root / "outcome").write_text(text)

    def calls(self):
        """Return the calls of vtorque since the last time: node and arguments."""
        log = self.root / "vtorque.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [eval(line) for line in lines]  # noqa: S307 (our own repr)

    def script(self, node, name, text):
        """Put a script of the site in its place when vTorque is installed over it."""
        path = self.priv(node) / f"{name}.orig"
        path.write_text(text)
        path.chmod(0o500)

    def _install(self, node):
        self.priv(node).mkdir(parents=True)
        program = self.root / f"vtorque-{node}"
        path = (str(Path(__file__).parent), *filter(None, sys.path))
        first_line = shebang("torque_node", "vtorque_core.api.batch_system", path=path)
        program.write_text(first_line + STAND_IN.format(root=str(self.root), node=node))
        program.chmod(0o755)
        place = Installation(program, self.root / "v t.toml", self.paths.jobshell)
        for step in adapter_at(self.root, node).setup_steps(place):
            if isinstance(step, ReplacedFile):
                step.apply()

    def hook(self, node, name, args):
        """Run a hook like pbs_mom; return its code, minus the signal; 1 if it cannot be run."""
        path = self.priv(node) / name
        if not path.exists():
            return 0
        status = path.stat()
        if not status.st_mode & stat.S_IXUSR or status.st_mode & 0o022:
            return 1
        # observed: on sisters the outputs go nowhere, and the epilogue has none at all
        closed = name == "epilogue.parallel"
        words = ["/bin/sh", "-c", 'exec "$0" "$@" >&- 2>&-'] if closed else []
        done = subprocess.run(
            [*words, path, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, check=False,
            env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        self.output += done.stdout
        return done.returncode

    def run(self, job_id, nodes=1, *, starts=10, runs=("/bin/true",), signal_prologue=False):
        """Start a queued job repeatedly like Torque; return the number of starts."""
        names = NODES[:nodes]
        where = "+".join(f"{name}/0-1" for name in names)
        for count in range(1, starts + 1):
            job = self.pbs.job(job_id, exec_host=where, state="R", start_count=count)
            head = [job_id, ME, ME, job["name"]]
            resources = resource_list(job["resources"])
            first = [*head, resources, "batch", "", job["script"] or ""]
            for name in names[1:]:  # sisters begin before the first node
                if self.hook(name, "prologue.parallel", first):
                    self.down.add(name)
                    self.pbs.job(job_id, state="Q", exec_host="")
                    return count
            code = -signal.SIGKILL if signal_prologue else self.hook(NODES[0], "prologue", first)
            status = self._job(job_id, job, code, runs)
            last = [*head, "77", resources, "", "batch", "", str(status), job["script"] or ""]
            if code <= 0:  # after a failure on the first node the sisters' did not run
                for name in names[1:]:
                    self.hook(name, "epilogue.parallel", last)
            self.hook(NODES[0], "epilogue", last)
            if self.pbs.job(job_id)["state"] != "Q":
                return count
        return starts

    def _job(self, job_id, job, code, runs):
        """Act on a prologue's code; return the job's exit status."""
        if code <= 0:  # killed by a signal counts as success
            line = f"{job['script']} {job['args']}".rstrip() + "\n"
            environ = {"PATH": os.environ["PATH"], "PBS_JOBID": job_id, "SHELL": job["shell"]}
            done = subprocess.run(
                runs, input=line.encode(), capture_output=True, env=environ, check=False
            )
            self.output += done.stdout + done.stderr
            self.pbs.job(job_id, state="C")
            return done.returncode
        if code == 1 or job["interactive"]:
            self.output = b""  # never delivered
            self.pbs.job(job_id, state="C")
            return -2
        held = self.pbs.job(job_id)["hold"] == "s"
        self.pbs.job(job_id, state="H" if held else "Q", exec_host="")
        return -14
