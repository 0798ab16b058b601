"""Files that ``vtorque setup`` writes: the job shell, and one line of the site config."""

import dataclasses
import subprocess
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_admin import edit_config as edit
from vtorque_admin import setup, setup_batch
from vtorque_core.base.errors import HostFault
from vtorque_core.config.site_config import Site
from vtorque_core.live.service import installation
from vtorque_core.plan.placement import node_hardware


def test_environment_of_the_user_does_not_change_the_jobshell_program(tmp_path):
    """In any directory, the program ends because it has no job, and runs no other program."""
    ran = tmp_path / "ran"
    for name in ("sitecustomize.py", "usercustomize.py", "vtorque_core.py", "click.py"):
        (tmp_path / name).write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "rc").write_text(f"touch {ran}\n")
    (tmp_path / "python3").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (tmp_path / "python3").chmod(0o755)
    shell = tmp_path / "jobshell"
    config = tmp_path / "a config's.toml"
    config.touch()
    shell.write_bytes(setup_batch.jobshell_script(installation(Site(), config)))
    shell.chmod(0o755)
    hostile = {
        "PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere",
        "PYTHONSTARTUP": str(tmp_path / "rc"),
        "ENV": str(tmp_path / "rc"), "BASH_ENV": str(tmp_path / "rc"), "PATH": str(tmp_path),
        "IFS": "/", "CDPATH": "/", "BASH_FUNC_exec%%": f"() {{ touch {ran}; }}",
    }  # fmt: skip
    done = subprocess.run(
        [shell, "--await-job", "1.x y"],
        env=hostile, cwd=tmp_path, capture_output=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 120, done.stderr
    assert b"1.x y" in done.stderr
    assert not ran.exists()


SYSTEMS = ['system = "local"', "system='local' # why", '  system  =  "a\\"b"', '"system" = "x"', ""]


@given(
    before=st.sampled_from(["", "# c\n", "[node]\ngrace = 3\n", '[plugin.a]\nsystem = "no"\n']),
    header=st.sampled_from(["[batch]", "[ batch ] # here"]),
    system=st.sampled_from(SYSTEMS),
    after=st.sampled_from(["", "\nvm_by_default = false\n", '\n\n[paths]\nstate = "/x"\n# end']),
)
def test_edit_changes_only_one_line_of_the_config(before, header, system, after):
    text = before + f"{header}\n{system}" + after
    new = edit.set_value(text, "batch", "system", "slurm")
    old, now = tomllib.loads(text), tomllib.loads(new)
    assert now["batch"].pop("system") == "slurm"
    old["batch"].pop("system", None)
    assert now == old
    lines = text.split("\n")
    assert len([a for a in new.split("\n") if a not in lines]) <= 1
    assert text.count("#") == new.count("#")


@pytest.mark.parametrize("text", ["", "# only a comment", "[node]\ngrace = 3"])
def test_edit_adds_a_missing_table(text):
    new = edit.set_value(text, "batch", "system", "pbs")
    assert new.startswith(text)
    assert tomllib.loads(new)["batch"] == {"system": "pbs"}


def test_table_that_cannot_be_edited_is_a_host_fault():
    with pytest.raises(HostFault, match='write system = "pbs"'):
        edit.set_value("batch = { vm_by_default = true }\n", "batch", "system", "pbs")
    assert 'batch.system = "pbs"' in edit.set_value(
        'batch.system = "local"\n', "batch", "system", "pbs"
    )


def test_setup_probes_the_topology_that_the_first_start_needs(monkeypatch):
    asked = []
    monkeypatch.setattr(node_hardware, "topology", asked.append)
    setup._probe_libvirt(Site(), pytest.fail)
    assert asked == [Site().node.libvirt_uri]


def test_setup_without_libvirt_prints_a_note():
    said = []
    site = Site()
    uri = "qemu+unix:///system?socket=/nonexistent/socket"
    node = dataclasses.replace(site.node, libvirt_uri=uri)
    setup._probe_libvirt(dataclasses.replace(site, node=node), said.append)
    (line,) = said
    assert line.endswith("the first job on this node will start 2 s later")
