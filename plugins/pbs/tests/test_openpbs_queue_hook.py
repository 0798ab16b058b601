"""The queuejob hook of OpenPBS, and its installation."""

import json
import subprocess
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path

import pytest

from pbs_harness import OpenPbsHarness, apply_steps, undo_steps
from vtorque_admin.steps import Check
from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Needs
from vtorque_core.api.setup_steps import Installation
from vtorque_core.api.submission import from_token
from vtorque_pbs.openpbs import hooks
from vtorque_pbs.openpbs.setup import QUEUE
from vtorque_pbs.plugin import Settings
from vtorque_testing.batch_node import tree

SHELL = "/opt/vt/jobshell"
BLOB = '{"v":1,"vm":[["ram","2G"]],"files":{},"shell":null}'
NEEDS = {"request": BLOB, "cpus": 4, "mib": 2304, "seconds": 60}


class Resources(dict):
    def __missing__(self, _name):
        return None


class Accepted(Exception):
    pass


class Rejected(Exception):
    pass


def submitted(found, *, queue="vm", default="", feature="vtorque", **values):
    """Run the hook for a job; return the job, or raise Rejected."""

    def accept():
        raise Accepted

    def reject(text):
        raise Rejected(text)

    values = {"executable": None, "Shell_Path_List": None, "Variable_List": {"A": "1"}} | values
    values["Resource_List"] = Resources(values.get("Resource_List", {}))
    job = types.SimpleNamespace(queue=queue and types.SimpleNamespace(name=queue), **values)
    pbs = types.ModuleType("pbs")
    pbs.event = lambda: types.SimpleNamespace(job=job, accept=accept, reject=reject)
    pbs.server = lambda: types.SimpleNamespace(default_queue=default)
    pbs.select, pbs.size, pbs.duration, pbs.path_list = str, str, int, str
    sys.modules["pbs"] = pbs
    try:
        exec(hooks.queue(found, feature, Path(SHELL)), {})  # noqa: S102 - as pbs_server does
    except Accepted:
        return job
    finally:
        del sys.modules["pbs"]
    raise AssertionError("the hook neither accepts nor rejects")


def request_of(job):
    return json.loads(from_token(job.Variable_List["VTORQUE_REQUEST"]))


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {"select": "1:ncpus=4:mem=2304mb:vtorque=True"}),
        ({"select": "2:ncpus=1"}, {"select": "2:ncpus=1:mem=2304mb:vtorque=True"}),
        (
            {"select": "ncpus=1:mem=1gb:vtorque=true+2:ncpus=8:vtorque=False"},
            {"select": "ncpus=1:mem=1gb:vtorque=true+2:ncpus=8:vtorque=False"},
        ),
        ({"ncpus": 2}, {"ncpus": 2, "mem": "2304mb", "vtorque": True}),
        ({"walltime": 30}, {"walltime": 90, "select": "1:ncpus=4:mem=2304mb:vtorque=True"}),
    ],
)
def test_job_in_the_queue_becomes_a_vm_job(asked, wanted):
    job = submitted({"vm": NEEDS}, Resource_List=asked, Shell_Path_List="/bin/zsh@h,/bin/sh")
    assert job.Resource_List == wanted
    assert job.Shell_Path_List == SHELL
    assert job.Variable_List["A"] == "1"
    request = request_of(job)
    assert request == json.loads(BLOB) | {"shell": "/bin/zsh"}
    assert request_of(submitted({"vm": NEEDS})) == json.loads(BLOB)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["vm"], {"queue": "", "default": "vm"}),
        (["vtorque"], {"queue": "x", "Resource_List": {"select": "1:ncpus=1:vtorque=True"}}),
        (["vtorque"], {"queue": "x", "Resource_List": {"vtorque": True}}),
    ],
)
def test_default_queue_and_requested_resource_count(names, values):
    assert submitted(dict.fromkeys(names, NEEDS), **values).Shell_Path_List == SHELL


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["vm"], {"queue": "batch"}),
        (["vm"], {"queue": "", "default": "batch"}),
        (["vm"], {"Shell_Path_List": SHELL}),
        (["vtorque"], {"Resource_List": {"select": "1:vtorque=False", "vtorque": False}}),
        (["vm"], {"queue": "x", "Resource_List": {"select": "1:vtorque=True"}}),
    ],
)
def test_other_jobs_and_those_of_vsub_are_not_changed(names, values):
    job = submitted(dict.fromkeys(names, NEEDS), **values)
    assert job.Shell_Path_List == values.get("Shell_Path_List")
    assert job.Variable_List == {"A": "1"}
    assert job.Resource_List == values.get("Resource_List", {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"executable": "<jsdl>"}, "qsub -- COMMAND is not possible here: submit a script, or"),
        ({"Resource_List": {"nodes": "2:ppn=1"}}, "write -l select= for nodes=, host=, vnode=,"),
        ({"Variable_List": None}, "'NoneType'"),
    ],
)
def test_job_that_cannot_become_a_vm_job_is_rejected(values, said):
    """Such a job must never run on the host instead."""
    with pytest.raises(Rejected, match="the jobs of this queue run in virtual machines: ") as found:
        submitted({"vm": NEEDS}, **values)
    assert said in str(found.value)


PLAIN = """
import sys, types
pbs = sys.modules["pbs"] = types.ModuleType("pbs")
job = types.SimpleNamespace(queue=types.SimpleNamespace(name="batch"), Resource_List={})
pbs.event = lambda: types.SimpleNamespace(job=job, accept=lambda: print("accepted"))
before = set(sys.modules)
exec(sys.stdin.read())
print(*set(sys.modules) - before)
"""


def test_hook_loads_no_module_for_a_plain_job():
    text = hooks.queue({"vm": NEEDS}, "vtorque", Path(SHELL))
    argv = [sys.executable, "-I", "-c", PLAIN]
    done = subprocess.run(argv, input=text, capture_output=True, check=True)
    assert done.stdout == b"accepted\n\n"


# -- installation ---------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path):
    found = OpenPbsHarness(tmp_path)
    (found.setup_root() / "spool/mom_priv/hooks").mkdir()
    vsub = tmp_path / "vsub"
    vsub.write_text(f"#!/bin/sh\n[ $# -gt 3 ] || exit 0\necho '{json.dumps(NEEDS)}'\n")
    vsub.chmod(0o755)
    return found


def steps(harness, table):
    place = Installation(harness.root / "vtorque", Path("/e/vtorque.toml"), Path(SHELL))
    node = harness.adapter_of("n1")
    node._settings = Settings(bindir=node._settings.bindir, home=node._settings.home, **table)
    return [step for step in node.setup_steps(place) if QUEUE in step.text or "vm_q" in step.text]


def test_setup_creates_changes_and_removes_the_hook(harness):
    own = {"type": "site", "event": "queuejob", "order": "1", "content": "import pbs\n"}
    harness.pbs.change(hooks={"site_queue": own})
    before = harness.pbs.state()["hooks"]
    entry = tomllib.loads('vm_queues = ["vm:ram=2G"]')
    table = {"vm_queues": tuple(entry["vm_queues"])}
    check, hook = steps(harness, table)
    assert (check.problem, hook.is_applied()) == ("", False)
    hook.apply()
    assert hook.is_applied()
    assert harness.pbs.state()["hooks"][QUEUE]["event"] == "queuejob"
    (_, other) = steps(harness, {"vm_queues": ("other:ram=2G",)})
    assert not other.is_applied()
    other.apply()
    (unused,) = steps(harness, {})
    assert not unused.is_applied()
    unused.apply()
    assert harness.pbs.state()["hooks"] == before
    assert steps(harness, {}) == []
    hook.apply()
    hook.undo()
    assert harness.pbs.state()["hooks"] == before


def state_of(harness):
    return {key: harness.pbs.state()[key] for key in ("hooks", "nodes", "resources")}


def test_uninstall_restores_a_site_with_hooks_of_all_events(harness):
    """All steps of the server's host, twice in a row."""
    events = {"site_queue": "queuejob", "site_begin": "execjob_begin", "site_end": "execjob_end"}
    own = {"type": "site", "order": "1", "alarm": "30", "content": "import pbs\n"}
    hooks_of_site = {name: own | {"event": event} for name, event in events.items()}
    harness.pbs.change(hooks=hooks_of_site)
    root = harness.setup_root()
    before, state = tree(root), state_of(harness)
    node = harness.adapter_of("n1")
    node._settings = replace(node._settings, vm_queues=("vm:ram=2G",))
    place = Installation(harness.root / "vtorque", Path("/e/vtorque.toml"), Path(SHELL))
    for _ in range(2):
        apply_steps(node, place)
        found = harness.pbs.state()["hooks"]
        assert len(found) == 2 * len(events) and found.items() > hooks_of_site.items()
        undo_steps(node, place)
        assert (tree(root), state_of(harness)) == (before, state)


@pytest.mark.parametrize("image", ["oci:/srv/app", "/root/.cache/vtorque/images/0.squashfs"])
def test_queue_with_own_image_is_rejected(harness, image):
    """Root would prepare the image once, in root's home, and no user's job could open it."""
    submitter = harness.system.submitter(harness.site)
    args, needs = submitter.split(["--request", "img=x"]), Needs(1, 512, 0)
    blob = json.dumps({"v": 1, "vm": [["ram", "2G"], ["img", image]]}).encode()
    with pytest.raises(UsageError, match="a user's own image"):
        submitter.submit(args, blob, needs)


def test_queue_whose_request_is_bare_metal_or_invalid_is_a_problem(harness):
    check, _ = steps(harness, {"vm_queues": ("vm",)})
    assert isinstance(check, Check)
    assert "vm_queues vm: this requests no virtual machine: add :KEY=VALUE" in check.problem
    (harness.root / "vsub").write_text("#!/bin/sh\necho no such image >&2; exit 2\n")
    check, _ = steps(harness, {"vm_queues": ("vm:img=x",)})
    assert "vm_queues vm:img=x: no such image" in check.problem
