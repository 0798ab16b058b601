"""Queue and account for limits: from the hooks' arguments, and from users' options."""

from pathlib import Path

import pytest

from torque_node import TorqueSite, adapter_at
from vtorque_core.api import Paths
from vtorque_pbs.convention import PrologueArgs
from vtorque_pbs.openpbs.node import OpenPbsNode
from vtorque_pbs.plugin import vtorque_batch_systems
from vtorque_pbs.qsub_dialect import OPENPBS, TORQUE
from vtorque_pbs.settings import Settings
from vtorque_pbs.submitter import PbsSubmitter
from vtorque_pbs.torque.node import FIRST, SISTER


@pytest.mark.parametrize("kind", [FIRST, SISTER])
def test_torque_passes_queue_and_account_in_the_hook_arguments(tmp_path, monkeypatch, kind):
    node = adapter_at(tmp_path, "n1")
    monkeypatch.setattr(node, "_find_job", lambda _: {"exec_host": "n1/0", "queue": "forged"})
    resources = "nodes=1,other=vt1:AAAA"
    args = PrologueArgs("7.srv", "ada", "users", "j", resources, "gpu", "chem", "/j.SC")
    job = node.job((kind, *args.argv()), {"PBS_QUEUE": "forged"})
    assert (job.queue, job.account, job.partition, job.qos) == ("gpu", "chem", "", "")


def test_openpbs_passes_queue_and_account_in_the_hook_words(tmp_path):
    settings = Settings(node="n1")
    node = OpenPbsNode(TorqueSite(Paths(tmp_path, tmp_path), settings), settings)
    words = ("id=7.srv", "owner=ada", "exec_host=n1/0", "request=vt1:AAAA")
    job = node.job((*words, "queue=gpu", "account=a=b"), {})
    assert (job.queue, job.account) == ("gpu", "a=b")
    assert (node.job(words, {}).queue, node.job(words, {}).account) == ("", "")


@pytest.mark.parametrize("dialect", [TORQUE, OPENPBS])
def test_queue_and_account_are_read_from_options_and_directives(tmp_path, monkeypatch, dialect):
    monkeypatch.chdir(tmp_path)
    Path("j.sh").write_text("#!/bin/sh\n#PBS -q slow -A own\n#PBS -A chem\n")
    Path("plain.sh").write_text("#!/bin/sh\n")
    submitter = PbsSubmitter(dialect, Settings(), Path("/x"))
    assert submitter.split(["j.sh"]).facts == {"queue": "slow", "account": "chem"}
    found = submitter.split(["-q", "gpu@server", "j.sh"]).facts
    assert found == {"queue": "gpu", "account": "chem"}
    assert submitter.split(["-q", "@server", "plain.sh"]).facts == {}


def test_limits_support_queue_and_account():
    assert {system.facts for system in vtorque_batch_systems()} == {frozenset(("queue", "account"))}
