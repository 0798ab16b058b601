"""The contract's harness for Torque and OpenPBS: doubles of their commands, the real adapters."""

import json
import os
import pwd
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

from quick_python import shebang
from vtorque_admin.steps import Check
from vtorque_core.api import Paths
from vtorque_core.api.batch_system import Outcome
from vtorque_pbs import plugin
from vtorque_pbs.qsub_dialect import VARIABLE
from vtorque_testing import harness as contract

FIRST_LINE = partial(shebang, "fake_pbs_commands", path=(str(Path(__file__).parent),))
PROGRAMS = ("qsub", "qstat", "qdel", "qhold", "qalter", "qrerun", "pbsnodes", "qmgr")
SYSTEMS = {system.name: system for system in plugin.vtorque_batch_systems()}
NODES = ("n1", "n2", "n3", "n4")
ME = pwd.getpwuid(os.getuid()).pw_name
BUFFER = 2048  # of Torque's fifth argument: an item that does not fit is dropped silently (src)
OWN_VARIABLE = contract.OwnValue(
    ("-v", "MINE=a"), lambda job: any("MINE=a" in word for word in job.argv)
)


AGAIN = [outcome for outcome in Outcome if outcome.may_run_elsewhere]


class FakePbs:
    """A double of the server of Torque or OpenPBS and its commands, in a directory."""

    def __init__(self, root, system):
        self.system, self.directory, self.bin = system, root / "server", root / "bin"
        self.directory.mkdir()
        self.bin.mkdir()
        mark = {"properties": "fast,vtorque"} if system == "torque" else {}
        mark |= {"resources_available.vtorque": "True"} if system == "openpbs" else {}
        self.write(
            {
                "up": True, "last": 0, "jobs": {}, "calls": [], "managers": "root@*",
                "manager": True, "hooks": {}, "resources": [],
                "nodes": {name: {"state": "free", **mark} for name in NODES},
            }
        )  # fmt: skip
        for name in PROGRAMS:
            given = (str(self.directory), system, name)
            code = f"import fake_pbs_commands\nfake_pbs_commands.run(*{given})\n"
            (self.bin / name).write_text(FIRST_LINE() + code)
            (self.bin / name).chmod(0o755)

    def write(self, state):
        (self.directory / "state.json").write_text(json.dumps(state))

    def state(self):
        return json.loads((self.directory / "state.json").read_text())

    def change(self, **values):
        self.write(self.state() | values)

    def job(self, job_id, **values):
        """Return a job after changing it."""
        state = self.state()
        state["jobs"][job_id] |= values
        self.write(state)
        return state["jobs"][job_id]


class PbsHarness:
    """See vtorque_testing.harness.BatchHarness."""

    def __init__(self, root, system):
        self.root, self.pbs, self.system = root, FakePbs(root, system), SYSTEMS[system]
        self.paths = Paths(root / "state", root / "run", root / "jobshell")
        self.directory = root / "home"
        self.directory.mkdir()
        self.environ = {"PATH": f"{self.pbs.bin}:{os.environ['PATH']}", "HOME": str(self.directory)}
        self.site = self.site_of("n1")

    def adapter_of(self, node):
        """Return the node part on one of the nodes."""
        return self.system.node(self.site_of(node))

    def site_of(self, node):
        home = self.root / "node/spool"
        return contract.PluginSite(
            self.paths, (plugin.Settings(bindir=str(self.pbs.bin), node=node, home=str(home)),)
        )

    def serve(self, up):
        self.pbs.change(up=up)

    def answer(self, ended):
        said = {"out": ended.stdout.hex(), "err": ended.stderr.hex(), "code": ended.code}
        (self.pbs.directory / "answer.json").write_text(json.dumps(said))
        return True

    def last_input(self):
        path = self.pbs.directory / "qsub.json"
        if not path.exists():
            return None
        call = json.loads(path.read_text())
        path.unlink()
        if call["id"] is None:
            return contract.Submission("", tuple(call["argv"]), call["environ"], None)
        script = self.pbs.state()["jobs"][call["id"]]["script"]
        content = Path(script).read_bytes() if script else None
        return contract.Submission(call["id"], tuple(call["argv"]), call["environ"], content)

    def end(self, job):
        state = self.pbs.state()
        del state["jobs"][job.job_id]
        self.pbs.write(state)

    def setup_root(self):
        priv = self.root / "node/spool/mom_priv"
        if not priv.exists():
            priv.mkdir(parents=True)
            (priv / "config").write_bytes(b"$pbsserver server\n$prologalarm 60\n$logevent 255")
            for name in ("prologue", "epilogue"):
                (priv / name).write_bytes(b"#!/bin/sh\n# the site's own\nexit 0\n")
                (priv / name).chmod(0o500)
        state = self.pbs.state()
        for node in state["nodes"].values():
            node.pop("properties", None)
            node.pop("resources_available.vtorque", None)
        self.pbs.write(state)
        return self.root / "node"

    def _job(self, job, nodes, element):
        found = self.pbs.job(job.job_id)
        job_id = job.job_id.replace("[]", f"[{element}]")
        return job_id, found, NODES[:nodes]

    def _shell(self, job_id, found, nodes, script):
        path = self.root / "nodefile"
        path.write_text("".join(f"{node}\n" * 2 for node in nodes))
        environ = {
            **found["variables"], "PBS_JOBID": job_id, "PBS_NODEFILE": str(path),
            "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBNAME": found["name"],
            "SHELL": found["shell"],
        }  # fmt: skip
        line = f"{script} {found['args']}".rstrip() + "\n"
        return environ, contract.ShellCall((), environ, os.fsencode(line))


class TorqueHarness(PbsHarness):
    """Torque."""

    dialect = contract.Dialect(
        options=("-N", "t", "-j", "oe", "-l", "walltime=00:10:00", "-e", "err or"),
        directive="#PBS -N named -l nodes=1:ppn=2",
        unknown="--no-such-option",
        arguments=lambda script, words: ["-F", shlex.join(words), script],
        share=lambda cpus, mib: ["-l", f"nodes=1:ppn={cpus},mem={mib}mb"],
        exits={**dict.fromkeys(Outcome, 0), **dict.fromkeys(AGAIN, 75)},
        carries=60_000,
        array=("-t", "0-1"),
        two_nodes=("-l", "nodes=2:ppn=2"),
        interactive=("-I",),
        own=(
            OWN_VARIABLE,
            contract.OwnValue(
                ("-l", "other=mine"), lambda job: any("other=mine" in w for w in job.argv)
            ),
            contract.OwnValue(("-W", "x=mine"), lambda job: "x=mine" in job.argv),
        ),
    )

    def __init__(self, root):
        super().__init__(root, "torque")

    def start(self, job, *, nodes=1, element=0, forged=None):
        job_id, found, names = self._job(job, nodes, element)
        ppn = re.search(r":ppn=([0-9]+)", found["resources"].get("nodes", "1"))
        last = int(ppn[1]) - 1 if ppn else 0
        where = "+".join(f"{name}/0-{last}" for name in names)
        self.pbs.job(job.job_id, exec_host=where, state="R", start_count=1)
        resources = found["resources"] if forged is None else found["resources"] | {"other": forged}
        script = found["script"] or ""
        args = [job_id, ME, ME, found["name"], resource_list(resources), "batch", "", script]
        hooks = [
            contract.HookCall(self.system.node(self.site_of(name)), (kind, *args), {})
            for kind, name in zip(["first", *["sister"] * nodes], names, strict=False)
        ]
        environ, shell = self._shell(job_id, found, names, script)
        environ["PBS_NUM_NODES"] = str(nodes)
        return contract.StartedJob(tuple(hooks), shell)


def resource_list(resources):
    """Return argv 5 of a prologue: in no fixed order, and with only some resources."""
    text = ""
    for key in ("nodes", "other", "gres", "file", "walltime"):
        if key in resources:
            item = f"{key}={resources[key]}"
            if len(text) + len(item) + 1 < BUFFER:
                text += f",{item}" if text else item
    return text


class OpenPbsHarness(PbsHarness):
    """OpenPBS."""

    dialect = replace(
        TorqueHarness.dialect,
        directive="#PBS -N named -l select=1:ncpus=2",
        arguments=lambda script, words: ["--", "/bin/echo", *words],
        share=lambda cpus, mib: ["-l", f"select=1:ncpus={cpus}:mem={mib}mb"],
        exits={**dict.fromkeys(Outcome, 0), **dict.fromkeys(AGAIN, 1)},
        permutes=False,
        array=("-J", "0-1"),
        two_nodes=("-l", "select=2:ncpus=2"),
        own=(
            OWN_VARIABLE,
            contract.OwnValue(("-W", "group_list=g"), lambda job: "group_list=g" in job.argv),
        ),
    )

    def __init__(self, root):
        super().__init__(root, "openpbs")

    def start(self, job, *, nodes=1, element=0, forged=None):
        job_id, found, names = self._job(job, nodes, element)
        where = "+".join(f"{name}/0*2" for name in names)
        self.pbs.job(job.job_id, exec_host=where, state="R", start_count=1)
        request = found["variables"].get(VARIABLE) if forged is None else forged
        words = {
            "id": job_id, "owner": ME, "name": found["name"], "request": request,
            "exec_host": where.replace("/", ":15002/"), "run_count": 1,
        }  # fmt: skip
        argv = tuple(f"{key}={value}" for key, value in words.items() if value)
        hooks = [
            contract.HookCall(self.system.node(self.site_of(name)), argv, {}) for name in names
        ]
        script = found["script"] or ""
        return contract.StartedJob(tuple(hooks), self._shell(job_id, found, names, script)[1])


def apply_steps(node, place):
    """Apply the setup steps of a node adapter, none of which may report a problem."""
    steps = node.setup_steps(place)
    assert not [step.problem for step in steps if isinstance(step, Check) and step.problem]
    for step in steps:
        if not isinstance(step, Check):
            step.apply()


def undo_steps(node, place):
    """Undo the setup steps of a node adapter, in reverse order."""
    for step in reversed(node.setup_steps(place)):
        if not isinstance(step, Check):
            step.undo()
