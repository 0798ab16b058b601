"""Exclusive nodes: requests of vsub to the batch system, and detection on the node."""

import pytest

from pbs_harness import OpenPbsHarness, TorqueHarness
from torque_node import TorqueSite
from vtorque_core.api import Paths
from vtorque_core.api.batch_system import Needs
from vtorque_pbs import resources
from vtorque_pbs.convention import PrologueArgs
from vtorque_pbs.openpbs.node import OpenPbsNode
from vtorque_pbs.settings import Settings
from vtorque_pbs.torque.node import FIRST, TorqueNode
from vtorque_testing.harness import PluginSite
from vtorque_testing.submit import run_vsub

SINGLE = "naccesspolicy=singleuser"
NODES = "nodes=1:ppn=2:vtorque"


@pytest.mark.parametrize(
    ("site", "user", "asked"),
    [
        ("", {"select": "1"}, None),
        ("place=excl", {"select": "1"}, "excl"),
        ("place=excl", {"select": "1", "place": "scatter"}, "scatter:excl"),
        ("place=excl", {"select": "1", "place": "scatter:shared"}, None),
        ("place=excl", {"select": "1", "place": "exclhost"}, None),
        ("place=excl", {"nodes": "1:ppn=2"}, None),
        (SINGLE, {"nodes": "1:ppn=2"}, "singleuser"),
        (SINGLE, {"nodes": "1:ppn=2", "naccesspolicy": "shared"}, None),
    ],
)
def test_exclusive_setting_is_requested_unless_the_user_does(site, user, asked):
    name = site.partition("=")[0]
    assert resources.exclusive_place(site, user) == ({name: asked} if asked else {})


@pytest.mark.parametrize("bad", ["excl", "place=excl,mem=1gb", "place=", "mem=1gb", "place=a b"])
def test_invalid_exclusive_setting_is_refused(bad):
    with pytest.raises(ValueError, match="exclusive="):
        Settings(exclusive=bad)


@pytest.mark.parametrize(
    ("harness", "site", "words"),
    [(TorqueHarness, SINGLE, SINGLE), (OpenPbsHarness, "place=excl", "place=excl")],
)
def test_qsub_gets_the_exclusive_request(tmp_path, harness, site, words):
    found = harness(tmp_path)
    settings = Settings(bindir=str(found.pbs.bin), exclusive=site)
    found.site = PluginSite(found.paths, (settings,))
    (found.directory / "j.sh").write_text("#!/bin/sh\n:\n")
    run_vsub(found, ["j.sh"], blob=b'{"v":1}', needs=Needs(4, 2304))
    assert words in found.last_input().argv


def torque_job(tmp_path, monkeypatch, *, site="", np="4", given="", nodes=NODES):
    settings = Settings(node="n1", exclusive=site)
    node = TorqueNode(TorqueSite(Paths(tmp_path, tmp_path), settings), settings)
    known = {"exec_host": "n1/0-1", "Resource_List.nodes": nodes}
    monkeypatch.setattr(node, "_find_job", lambda _: known | {"Resource_List.naccesspolicy": given})
    shown = f"n1\n     state = free\n     np = {np}\n     note = np = 1\n\nn2\n     np = 2\n"
    monkeypatch.setattr(node.commands, "run_checked", lambda *_: shown)
    args = PrologueArgs("7.srv", "ada", "users", "j", "other=vt1:AAAA", "gpu", "", "/j.SC")
    job = node.job((FIRST, *args.argv()), {})
    return job.whole_node, job.whole_user


@pytest.mark.parametrize(
    ("more", "alone"),
    [
        ({}, (False, False)),
        ({"np": "2"}, (True, False)),
        ({"np": "2", "nodes": NODES + "#shared"}, (False, False)),
        ({"np": "0"}, (False, False)),
        ({"given": "singleuser"}, (False, False)),
        ({"given": "singleuser", "site": SINGLE}, (False, True)),
        ({"given": "SINGLEJOB", "site": SINGLE}, (True, False)),
        ({"given": "uniqueuser", "site": SINGLE}, (False, False)),
        ({"site": SINGLE}, (False, False)),
    ],
)
def test_torque_job_is_alone_by_processors_or_a_known_policy(tmp_path, monkeypatch, more, alone):
    """A policy requested by the user counts only if the site's scheduler knows it."""
    assert torque_job(tmp_path, monkeypatch, **more) == alone


@pytest.mark.parametrize(
    ("place", "vnode", "alone"),
    [
        ("excl", "n1", True),
        ("excl", "n1[0]", False),
        ("pack:exclhost", "n1[0]", True),
        ("pack", "n1", False),
        ("", "n1", False),
    ],
)
def test_openpbs_job_is_alone_by_its_place(tmp_path, place, vnode, alone):
    """``excl`` applies to vnodes, of which a host may have several."""
    settings = Settings(node="n1")
    node = OpenPbsNode(TorqueSite(Paths(tmp_path, tmp_path), settings), settings)
    words = ("id=7.srv", "owner=ada", "exec_host=n1/0", "request=vt1:AAAA", f"place={place}")
    words += (f"vnodes=({vnode}:ncpus=1)",)
    assert node.job(words, {}).whole_node is alone
