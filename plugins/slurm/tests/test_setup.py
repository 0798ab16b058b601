"""slurm.conf and the hooks: set, kept, and restored by undo."""

import pytest

from vtorque_admin.steps import Check
from vtorque_core.api.setup_steps import Installation
from vtorque_slurm.settings import Settings
from vtorque_slurm.setup import steps

GOOD = "PrologFlags=Contain\nBatchStartTimeout=500\n"


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
def test_hooks_are_installed_beside_those_of_the_site(tmp_path, text, hooks):
    (tmp_path / "epilog.d").mkdir()
    path, plan = install(tmp_path, text.replace("{}", str(tmp_path)))
    before = path.read_bytes()
    for _ in range(2):
        for step in plan():
            if not step.is_applied():
                step.apply()
        found = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if not f.is_dir()}
        assert found == {*hooks, "slurm.conf"}
        assert path.stat().st_mode & 0o777 == 0o640
    for step in reversed(plan()):
        if not isinstance(step, Check):
            step.undo()
    assert path.read_bytes() == before
    assert {f.name for f in tmp_path.iterdir()} == {"slurm.conf", "epilog.d"}


def test_settings_that_an_admin_must_change_are_reported(tmp_path):
    _, plan = install(tmp_path, "PrologEpilogTimeout=60\nPrologFlags=DeferBatch\n")
    problems = [step.problem for step in plan() if isinstance(step, Check)]
    assert problems[0] == ""
    assert "PrologFlags=Alloc" in problems[1]
    assert "BatchStartTimeout=10 (s) is now" not in problems[2]
    assert "BatchStartTimeout=10 (s) is too short, because guests may need 420 s" in problems[2]
    assert "PrologEpilogTimeout=60 (s) is too short" in problems[3]
    _, plan = install(tmp_path, GOOD)
    assert not [s.problem for s in plan() if isinstance(s, Check) and s.problem]
    _, plan = install(tmp_path, GOOD, prolog_time=300.0)
    (problem,) = [s.problem for s in plan() if isinstance(s, Check) and s.problem]
    assert problem == (
        "[plugin.slurm] prolog_time is 300 s, but a start may take 360 s: set it to 360 or more"
    )


def test_site_file_with_the_same_name_is_kept(tmp_path):
    """Slurm would also run a backup in that directory, so the site's file keeps its name."""
    own = tmp_path / "prolog.d/50-vtorque"
    own.parent.mkdir()
    own.write_bytes(b"#!/bin/sh\n")
    path, plan = install(tmp_path, GOOD + f"Prolog={tmp_path}/prolog.d/*\n")
    before = path.read_bytes()
    for _ in range(2):
        for step in plan():
            if not step.is_applied():
                step.apply()
        assert {f.name for f in own.parent.iterdir()} == {"50-vtorque", "50-vtorque.sh"}
    own.rename(own.with_name("60-site"))
    assert all(step.is_applied() for step in plan()), "vTorque's file would be moved"
    for step in reversed(plan()):
        if not isinstance(step, Check):
            step.undo()
    assert [f.name for f in own.parent.iterdir()] == ["60-site"]
    assert path.read_bytes() == before


def test_prolog_pattern_without_room_is_reported(tmp_path):
    _, plan = install(tmp_path, GOOD + "Prolog=/etc/slurm/site-*\n")
    assert "does not match vTorque's file names: the" in next(
        s.problem for s in plan() if isinstance(s, Check) and "Prolog of" in s.text
    )
