"""Setup on the server's host and on other nodes: OpenPBS shows hooks to root on the first only."""

from pathlib import Path

import pytest

from pbs_harness import OpenPbsHarness
from vtorque_admin.steps import Check
from vtorque_core.api import HostFault
from vtorque_core.api.setup_steps import Installation
from vtorque_pbs.openpbs.setup import BEGIN, END, ServerHook


@pytest.fixture
def harness(tmp_path):
    found = OpenPbsHarness(tmp_path)
    (found.setup_root() / "spool/mom_priv/hooks").mkdir()
    return found


def steps(harness, node="n1"):
    place = Installation(Path("/p/bin/vtorque"), Path("/e/vtorque.toml"), Path("/shell"))
    return harness.adapter_of(node).setup_steps(place)


def problems(harness):
    found = [step for step in steps(harness) if isinstance(step, Check)]
    return [step.problem for step in found if "the server's hook" in step.text]


def send_hooks(harness, **changes):
    """Do what the server does after a change: each node's pbs_mom gets both files."""
    for name, hook in harness.pbs.state()["hooks"].items():
        directory = harness.root / "node/spool/mom_priv/hooks"
        said = {"hook_name": name, "event": hook["event"], "alarm": hook["alarm"], **changes}
        said |= {"order": hook["order"]} if hook["order"] != "1" else {}
        (directory / f"{name}.HK").write_text("".join(f"{k}={v}\n" for k, v in said.items()))
        (directory / f"{name}.PY").write_text(hook["content"])


def test_hooks_are_checked_on_a_node_that_is_not_the_server(harness):
    for step in steps(harness):
        if isinstance(step, ServerHook):
            step.apply()
    assert set(harness.pbs.state()["hooks"]) == {BEGIN, END}
    harness.pbs.change(at_server=False)
    send_hooks(harness)
    assert problems(harness) == ["", ""]
    assert not [step for step in steps(harness) if isinstance(step, ServerHook)]
    for step in steps(harness):
        if not isinstance(step, Check):
            step.apply()
            assert step.is_applied()
            step.undo()
    assert set(harness.pbs.state()["hooks"]) == {BEGIN, END}


def test_invalid_hook_is_reported_with_the_host_and_command(harness):
    for step in steps(harness):
        if isinstance(step, ServerHook):
            step.apply()
    harness.pbs.change(at_server=False)
    assert all("is missing on this node (No such file" in each for each in problems(harness))
    send_hooks(harness, enabled="false")
    assert all("is not enabled" in each for each in problems(harness))
    send_hooks(harness, alarm="7")
    assert all("has different settings" in each for each in problems(harness))
    send_hooks(harness)
    (harness.root / f"node/spool/mom_priv/hooks/{END}.PY").write_text("import pbs\n")
    fine, other = problems(harness)
    assert fine == ""
    assert "was written by another version of vTorque: only root on the server's host" in other
    assert other.endswith("run: vtorque setup install --batch openpbs")


def test_server_that_is_not_a_node_gets_hooks_and_no_mark(harness):
    (harness.root / "node/spool/mom_priv").rename(harness.root / "no-mom")
    found = steps(harness, "server")
    assert not [step.problem for step in found if isinstance(step, Check) and step.problem]
    changes = [step.text for step in found if not isinstance(step, Check)]
    assert [text.partition(" vtorque")[0] for text in changes] == [
        "import the hook", "import the hook", "create the resource",
    ]  # fmt: skip
    for step in (*found, *reversed(found)):
        if not isinstance(step, Check):
            step.apply()
    shared = [step for step in found if not isinstance(step, Check)]
    marked = next(step for step in steps(harness) if step.text.startswith("set vtorque"))
    marked.apply()
    for step in shared:  # after one node's uninstall no job would start on any node
        with pytest.raises(
            HostFault,
            match="nodes still use this server: n1; run vtorque setup uninstall on these nodes",
        ):
            step.undo()
    marked.undo()
    for step in shared:
        step.undo()
    assert harness.pbs.state()["hooks"] == {} and harness.pbs.state()["resources"] == []


def test_resource_used_by_finished_jobs_is_kept_with_a_fix(harness):
    resource = next(step for step in steps(harness) if "create the resource" in step.text)
    resource.apply()
    harness.pbs.change(busy=True)
    with pytest.raises(
        HostFault, match=r"request vtorque, .*history \(qselect -x\): delete them \(qdel -x\)"
    ):
        resource.undo()
    harness.pbs.change(busy=False)
    resource.undo()
    assert not resource.is_applied()
