"""The profile of a guest's login shells, in a real shell."""

import subprocess

import pytest

from vtorque_linux_guest.boot import etc_files
from vtorque_linux_guest.guest.environment import job_environment_text


@pytest.mark.parametrize("theirs", [{"OMPI_MCA_plm": "isolated"}, None])
def test_variable_that_the_job_does_not_get_is_not_set_in_its_shells(tmp_path, monkeypatch, theirs):
    """The user's variable suppresses it (``EnvVar.unless``); other guests have no such file."""
    monkeypatch.setattr(etc_files, "SPOOL", str(tmp_path))
    if theirs is not None:
        text = job_environment_text({**theirs, "VTORQUE_RANK": "0", "HOME": "/h"})
        (tmp_path / etc_files.ENVIRONMENT).write_text(text)
    profile = etc_files.profile_text({"PRTE_MCA_plm": "ssh", "VTORQUE_RANK": "0", "HOME": "/x"})
    seen = "echo ${PRTE_MCA_plm-none} ${OMPI_MCA_plm-none} $VTORQUE_RANK $HOME"
    done = subprocess.run(
        ["/bin/sh", "-euc", profile + seen], capture_output=True, text=True, check=True, timeout=60
    )
    expected = "ssh none 0 /x\n" if theirs is None else "none isolated 0 /x\n"
    assert done.stdout == expected
