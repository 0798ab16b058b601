"""A line of slurm.conf is set, and restored byte for byte."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import HostFault
from vtorque_slurm.conf_line import set_line, unset_line
from vtorque_slurm.slurm_conf import value

LINES = st.lists(
    st.sampled_from(
        ["Prolog=/a", "prolog = \"/b\" # c", "#Prolog=/c", " Prolog=/d", "PrologFlags=Alloc",
         "Epilog=/e", "", "é=\udcff", "NodeName=n[1-2] \\", "  CPUs=2"]
    ),
    max_size=8,
)  # fmt: skip


@given(LINES, st.booleans())
def test_line_is_added_and_removed_byte_for_byte(lines, ends):
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    edited = set_line(text, "Prolog", "/x/*")
    assert unset_line(edited, "Prolog") == text
    active = [line for line in edited.splitlines() if re.match(r"\s*prolog\s*=", line, re.I)]
    assert [line.partition(" ")[0] for line in active] == ["Prolog=/x/*"]
    both = set_line(edited, "Epilog", "/y/*")
    assert unset_line(unset_line(both, "Prolog"), "Epilog") == text
    added = both + "NodeName=new\n"
    kept = unset_line(unset_line(added, "Prolog"), "Epilog")
    assert kept.endswith("NodeName=new\n"), "an administrator's later edit was removed"


def test_last_value_is_used_also_from_included_files(tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text("prolog=/a # x\nInclude more.conf\n")
    (tmp_path / "more.conf").write_text("PROLOG = /b\n")
    assert value(path, "Prolog") == "/b"
    assert value(path, "Epilog") == ""


def test_missing_slurm_conf_is_reported(tmp_path):
    with pytest.raises(HostFault, match=r"\[plugin.slurm\] conf"):
        value(tmp_path / "none", "Prolog")
