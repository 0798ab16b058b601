"""slurm.conf and the hooks: set, kept, taken back; what the hooks themselves do."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api_setup import Check, Installation
from vtorque_slurm import conf
from vtorque_slurm.conf import value, with_line, without_line
from vtorque_slurm.settings import Settings
from vtorque_slurm.steps import epilog, prolog, steps

GOOD = "PrologFlags=Contain\nBatchStartTimeout=500\n"
LINES = st.lists(
    st.sampled_from(
        ["Prolog=/a", "prolog = \"/b\" # c", "#Prolog=/c", " Prolog=/d", "PrologFlags=Alloc",
         "Epilog=/e", "", "é=\udcff", "NodeName=n[1-2] \\", "  CPUs=2"]
    ),
    max_size=8,
)  # fmt: skip


@given(LINES, st.booleans())
def test_a_line_is_taken_back_byte_for_byte(lines, ends):
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    edited = with_line(text, "Prolog", "/x/*")
    assert without_line(edited, "Prolog") == text
    active = [line for line in edited.splitlines() if re.match(r"\s*prolog\s*=", line, re.I)]
    assert [line.partition(" ")[0] for line in active] == ["Prolog=/x/*"]
    both = with_line(edited, "Epilog", "/y/*")
    assert without_line(without_line(both, "Prolog"), "Epilog") == text
    added = both + "NodeName=new\n"
    kept = without_line(without_line(added, "Prolog"), "Epilog")
    assert kept.endswith("NodeName=new\n"), "an admin's later edit stays"


def test_the_last_value_counts_also_of_included_files(tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("prolog=/a # x\nInclude more.conf\n")
    (tmp_path / "more.conf").write_text("PROLOG = /b\n")
    assert value(path, "Prolog") == "/b"
    assert value(path, "Epilog") == ""


def install(tmp_path, text, **settings):
    path = tmp_path / "slurm.conf"
    path.write_text(text)
    path.chmod(0o640)
    place = Installation(tmp_path / "vtorque", tmp_path / "v.toml", tmp_path / "shell")
    return path, lambda: steps(
        Settings(conf=str(path), **settings), place, tmp_path / "j", tmp_path / "p"
    )


@pytest.mark.parametrize(
    ("text", "hooks"),
    [
        (GOOD, {"vtorque/prolog.d/50-vtorque", "vtorque/epilog.d/50-vtorque"}),
        (
            GOOD + "Prolog=/usr/local/sbin/prolog.sh",
            {"vtorque/prolog.d/50-vtorque", "vtorque/prolog.d/90-site",
             "vtorque/epilog.d/50-vtorque"},
        ),
        (GOOD + "Epilog={}/epilog.d/*.sh\n",
         {"vtorque/prolog.d/50-vtorque", "epilog.d/50-vtorque.sh"}),
    ],
)  # fmt: skip
def test_hooks_beside_the_sites_own(tmp_path, text, hooks):
    (tmp_path / "epilog.d").mkdir()
    path, plan = install(tmp_path, text.replace("{}", str(tmp_path)))
    before = path.read_bytes()
    for _ in range(2):
        for step in plan():
            if not step.done():
                step.apply()
        found = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if not f.is_dir()}
        assert found == {*hooks, "slurm.conf"}
        assert path.stat().st_mode & 0o777 == 0o640
    for step in reversed(plan()):
        if not isinstance(step, Check):
            step.undo()
    assert path.read_bytes() == before
    assert {f.name for f in tmp_path.iterdir()} == {"slurm.conf", "epilog.d"}


def test_what_an_admin_has_to_set(tmp_path):
    _, plan = install(tmp_path, "PrologEpilogTimeout=60\nPrologFlags=DeferBatch\n")
    problems = [step.problem for step in plan() if isinstance(step, Check)]
    assert problems[0] == ""
    assert "PrologFlags=Alloc" in problems[1]
    assert "BatchStartTimeout is now 10" not in problems[2]
    assert "BatchStartTimeout is 10 s, guests may need 420 s" in problems[2]
    assert "PrologEpilogTimeout is 60 s" in problems[3]
    _, plan = install(tmp_path, GOOD)
    assert not [s.problem for s in plan() if isinstance(s, Check) and s.problem]
    _, plan = install(tmp_path, GOOD, prolog_time=300.0)
    (problem,) = [s.problem for s in plan() if isinstance(s, Check) and s.problem]
    assert problem == (
        "[plugin.slurm] prolog_time is 300 s, but a start may take 360 s: set it to 360 or more"
    )


def test_a_file_of_the_sites_with_our_name(tmp_path):
    """Slurm would run a copy that is kept beside ours, too."""
    own = tmp_path / "prolog.d/50-vtorque"
    own.parent.mkdir()
    own.write_bytes(b"#!/bin/sh\n")
    path, plan = install(tmp_path, GOOD + f"Prolog={tmp_path}/prolog.d/*\n")
    before = path.read_bytes()
    for _ in range(2):
        for step in plan():
            if not step.done():
                step.apply()
        assert {f.name for f in own.parent.iterdir()} == {"50-vtorque", "50-vtorque.sh"}
    own.rename(own.with_name("60-site"))
    assert all(step.done() for step in plan()), "ours stays where it is"
    for step in reversed(plan()):
        if not isinstance(step, Check):
            step.undo()
    assert [f.name for f in own.parent.iterdir()] == ["60-site"]
    assert path.read_bytes() == before


def test_a_pattern_without_room_for_us(tmp_path):
    _, plan = install(tmp_path, GOOD + "Prolog=/etc/slurm/site-*\n")
    assert "matches no file name of ours" in next(
        s.problem for s in plan() if isinstance(s, Check) and "Prolog of" in s.text
    )


@pytest.fixture
def hooks(tmp_path):
    """Return a function that runs one of the hooks; vtorque notes its arguments and fails."""
    program = tmp_path / "vtorque"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nexit 3\n')
    program.chmod(0o755)
    place = Installation(program, Path("/etc/v.toml"), Path("/shell"))
    journal, proofs = tmp_path / "jour nal", tmp_path / "proof"
    journal.mkdir()
    proofs.mkdir()
    scripts = {"prolog": prolog(place), "epilog": epilog(place, journal, proofs)}

    def call(kind, **environ):
        said = tmp_path / "said"
        said.unlink(missing_ok=True)
        done = subprocess.run(
            ["sh", "-c", scripts[kind]], env=environ, capture_output=True, check=False
        )
        assert done.returncode == 0, "a failing hook drains the node"
        return said.read_text().strip() if said.exists() else ""

    return call


def test_the_prolog_calls_vtorque_for_vm_jobs_only(hooks):
    called = "hook --config /etc/v.toml prologue\nhook --config /etc/v.toml epilogue 7"
    assert hooks("prolog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="mine vt1:AAAA") == called
    for comment in ({}, {"SLURM_JOB_COMMENT": "vt2:x $(id) `id` *"}):
        assert hooks("prolog", SLURM_JOB_ID="7", **comment) == ""


def test_the_epilog_looks_for_what_is_left_not_at_the_comment(hooks, tmp_path):
    called = "hook --config /etc/v.toml epilogue 7"
    assert hooks("epilog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="vt1:AAAA") == ""
    (tmp_path / "jour nal/77.0.jsonl").touch()
    assert hooks("epilog", SLURM_JOB_ID="7") == ""
    (tmp_path / "jour nal/7.1.jsonl").touch()
    assert hooks("epilog", SLURM_JOB_ID="7", SLURM_JOB_COMMENT="changed") == called
    (tmp_path / "jour nal/7.1.jsonl").unlink()
    (tmp_path / "proof/7.json").touch()
    assert hooks("epilog", SLURM_JOB_ID="7") == called


def test_a_missing_slurm_conf_is_said(tmp_path):
    with pytest.raises(conf.HostFault, match=r"\[plugin.slurm\] conf"):
        value(tmp_path / "none", "Prolog")
