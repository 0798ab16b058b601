"""State of a job on its nodes: ``vmgr ps --phase``, and the node of a rank."""

import json
from pathlib import Path

import pytest

from login_homes import python
from patience import eventually
from processes import alive
from vtorque_core.api import HostFault, VtorqueError
from vtorque_core.api.batch_system import JobInfo, JobOnNode
from vtorque_login import state

CONFIG = Path("/etc/acme.toml")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("{}", ""),
        ("no", ""),
        ("[]", ""),
        ('{"phase": "", "guests": [{"rank": 1e999, "hostname": ""}]}', ""),
        ('{"phase": "", "guests": [], "elsewhere": [1]}', ""),
        ('{"phase": "", "guests": [], "elsewhere": {"n3": []}}', ""),
        ("", "gone \x1b[2J"),
    ],
)
def test_node_with_an_invalid_answer_is_named(monkeypatch, said, error):
    code = f"import sys; print({said!r}); sys.stderr.write({error!r})"
    monkeypatch.setattr(state.service, "vmgr", lambda *_: python(code))
    with pytest.raises(VtorqueError, match=r"^n1: (gone \\x1b\[2J|no answer about the job)$"):
        state.query_node("7.srv", "n1", CONFIG, 20.0)


@pytest.mark.parametrize(
    ("code", "spare", "words"),
    [
        ("import os\nwhile True: os.write(1, b' ' * 65536)", 30.0, "larger than 1048576 bytes"),
        ("import os\nwhile True: os.write(2, b' ' * 65536)", 30.0, "larger than 1048576 bytes"),
        ("import signal; signal.pause()", 0.1, r"no answer within 0\.1 s"),
    ],
)
def test_node_with_endless_output_or_no_answer_is_killed(monkeypatch, tmp_path, code, spare, words):
    """Together with all its child processes."""
    pids = tmp_path / "pids"
    both = f"import os; os.fork(); open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n{code}"
    monkeypatch.setattr(state.service, "vmgr", lambda *_: python(both))
    monkeypatch.setattr(state, "_SPARE", spare)
    with pytest.raises(
        HostFault, match=f"^n1: {words}".replace("larger", "the job's state is larger")
    ):
        state.query_node("7.srv", "n1", CONFIG, 0.0)
    started = pids.read_text().split() if pids.exists() else []
    eventually(lambda: not any(alive(pid) for pid in started))


def test_nodes_are_queried_in_order(monkeypatch):
    """A node that cannot answer reports why, and the answers of the others are shown."""

    def vmgr(_config, _command, _node, node, _, job_id):
        said = {"phase": "boot", "guests": [{"rank": 0, "hostname": f"{job_id}-{node}"}]}
        said["image"] = "own:0123"
        if node == "n1":
            there = {"rank": 2, "hostname": "moved"}
            said["elsewhere"] = {"n4": {"phase": "paused", "guests": [there]}}
        code = f"print({json.dumps(said)!r})" if node != "n2" else "raise SystemExit('no way')"
        return python(code)

    monkeypatch.setattr(state.service, "vmgr", vmgr)
    jobs = [
        JobInfo("7", "a", "ada", "R", nodes=("n1", "n2")),
        JobInfo("8", "b", "ada", "Q"),
        JobInfo("9", "c", "ada", "R", nodes=("n3",)),
    ]
    assert list(state.query_jobs(jobs, CONFIG, 20.0)) == [
        JobOnNode("7", "n1", "boot", ("7-n1",), image="own:0123"),
        JobOnNode("7", "n4", "paused", ("moved",)),
        JobOnNode("7", "n2", error="n2: no way"),
        JobOnNode("9", "n3", "boot", ("9-n3",), image="own:0123"),
    ]
