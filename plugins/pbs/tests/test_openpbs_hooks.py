"""The hooks of OpenPBS in an interpreter like that of its pbs_mom."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_core.api.setup_steps import Installation
from vtorque_core.base.names import safe_name
from vtorque_pbs.openpbs import hooks

FAKE_PBS = """
import json, sys
import syslog  # of Debian's Python a part, which no file takes the place of
syslog.syslog = print
class Thing:
    def __init__(self, **values): self.__dict__.update(values)
def event():
    given = json.load(open({job!r}))
    job = Thing(**given)
    return Thing(job=job, accept=lambda: print("accepted"))
def logjobmsg(job, text): raise SystemError("PY_SSIZE_T_CLEAN macro must be defined")
"""


def test_openpbs_hooks_call_vtorque_with_the_data_of_the_job(tmp_path):
    """In pbs_mom's interpreter, hooks only check and call; data are arguments, not code."""
    log = tmp_path / "log"
    program = tmp_path / "vtorque"
    program.write_text(f'#!/bin/sh\nfor a; do printf "%s\\0" "$a"; done >> {log}\nexit 0\n')
    program.chmod(0o755)
    place = Installation(program, tmp_path / "c'.toml", tmp_path / "shell")
    job_file = tmp_path / "job.json"
    (tmp_path / "pbs.py").write_text(FAKE_PBS.format(job=str(job_file)))
    journal, proof = tmp_path / "journal", tmp_path / "proof"
    journal.mkdir()

    def run(content, job):
        job_file.write_text(json.dumps(job))
        (tmp_path / "hook.py").write_bytes(content)
        done = subprocess.run(
            [sys.executable, "hook.py"], cwd=tmp_path, capture_output=True, check=True, text=True
        )
        words = log.read_text().split("\0")[:-1] if log.exists() else None
        log.unlink(missing_ok=True)
        return done.stdout, words

    job = {
        "id": "5[1].vm", "Job_Owner": "u@h", "euser": None, "Job_Name": "a'b", "interactive": None,
        "Variable_List": {"A": "1"}, "exec_host2": "vm:15002/0*2",
        "run_count": 2, "Rerunable": True,
        "Resource_List": {"select": None, "place": None},  # like on a mom
        "schedselect": "1:ncpus=2:vtorque=True",
        "exec_vnode": "(vm:ncpus=2)", "queue": "gpu", "Account_Name": None,
    }  # fmt: skip
    begin = hooks.begin(place)
    assert run(begin, job) == ("accepted\n", None)
    assert run(begin, job | {"Variable_List": None}) == ("accepted\n", None)
    said, words = run(begin, job | {"Variable_List": {"VTORQUE_REQUEST": "vt1:'\n$(x)"}})
    assert said == "accepted\n"
    assert words[:4] == ["hook", "--config", str(place.config), "prologue"]
    assert {"id=5[1].vm", "owner=u", "request=vt1:'\n$(x)", "run_count=2"} <= set(words[4:])
    assert {"queue=gpu", "select=1:ncpus=2:vtorque=True"} <= set(words)
    assert not [word for word in words if word.startswith("account=")]
    end = hooks.end(place, journal, proof, 60)
    assert run(end, job) == ("accepted\n", None)
    Path(journal, f"{safe_name('5[1].vm')}.0.jsonl").touch()
    assert run(end, job)[1][3:] == ["epilogue", "5[1].vm"]
    said, _ = run(begin, {"id": "5.vm", "Variable_List": {"VTORQUE_REQUEST": "vt1:x"}})
    assert said.startswith("vtorque 5.vm: the guests were not started: AttributeError")
    assert said.endswith("accepted\n"), (
        "the hook rejected the job, which OpenPBS would start 21 times"
    )
    program.write_text("#!/bin/sh\nexit 3\n")
    assert run(end, job)[0] == "vtorque 5[1].vm: not all resources were released: 3\naccepted\n"
    assert os.path.lexists(journal)


BARE = """
import sys, types
pbs = sys.modules["pbs"] = types.ModuleType("pbs")
job = types.SimpleNamespace(id="5.vm", Variable_List={"A": "1"})
pbs.event = lambda: types.SimpleNamespace(job=job, accept=lambda: print("accepted"))
import os  # the interpreter's own site module loads it
before = set(sys.modules)
exec(sys.stdin.read())
print(*set(sys.modules) - before)
"""


@pytest.mark.parametrize("hook", ["begin", "end"])
def test_openpbs_hooks_load_nothing_for_a_bare_metal_job(tmp_path, hook):
    """At most 5 ms above an empty hook: re, glob and syslog alone took the real pbs_mom 9 ms."""
    place = Installation(tmp_path / "vtorque", tmp_path / "c.toml", tmp_path / "shell")
    journal, proof = tmp_path / "journal", tmp_path / "proof"  # missing since the last boot
    text = hooks.begin(place)
    if hook == "end":
        journal.mkdir()
        (journal / "55.vm.0.jsonl").touch()
        text = hooks.end(place, journal, proof, 60)
    done = subprocess.run(
        [sys.executable, "-I", "-c", BARE], input=text, capture_output=True, check=True
    )
    assert done.stdout == b"accepted\n\n"
