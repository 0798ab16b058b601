"""Calls of the job shell to other nodes of the job."""

import subprocess

import pytest

from vtorque_pbs.pbsdsh import OpenPbsShell, TorqueShell

PLACES = "/usr/bin:/usr/local/bin:/opt/torque/bin:/opt/pbs/bin"


@pytest.fixture
def commands(tmp_path):
    """Return a directory that is in the submitting user's PATH only: it has pbsdsh."""
    program = tmp_path / "opt/batch/bin/pbsdsh"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n. {tmp_path}/says\n')
    program.chmod(0o755)
    return program.parent


@pytest.mark.parametrize(
    ("shell", "called"), [(TorqueShell(), "-u look ID"), (OpenPbsShell(), "-- look ID")]
)
@pytest.mark.parametrize(
    ("says", "code"),
    [
        (":", 0),
        ("exit 3", 3),
        ('echo "pbsdsh(): task 0 exit status 7" >&2', 1),
        ('echo "pbsdsh: task 0x00000002 exit status 7"', 1),
    ],
)
def test_pbsdsh_is_found_beside_qsub(tmp_path, commands, shell, called, says, code):
    """Torque gives a job's shell PATH=/bin:/usr/bin, wherever it is installed itself."""
    (tmp_path / "says").write_text(says)
    elsewhere = f"{tmp_path}/bin"  # for this host may have its own pbsdsh
    environ = {"PATH": elsewhere, "PBS_O_PATH": f"{elsewhere}:{commands}"}
    words = shell.node_command(["look", "ID"], environ)
    assert f"PATH=$PATH:{PLACES}:$PBS_O_PATH" in words[2]
    words[2] = words[2].replace(PLACES, elsewhere)
    done = subprocess.run(words, env=environ, check=False, capture_output=True)
    assert (done.returncode, (tmp_path / "called").read_text()) == (code, f"{called}\n")


@pytest.mark.parametrize(
    ("shell", "called"),
    [(TorqueShell(), "-n {} look ID\n"), (OpenPbsShell(), "-n {} -- look ID\n")],
)
def test_only_nodes_with_guests_are_called(tmp_path, commands, shell, called):
    """pbsdsh numbers nodes by their first line in the node file, on Torque and OpenPBS."""
    (tmp_path / "nodes").write_text("n1.site\nn1.site\nn3.site\nn3.site\nn2.site\n")
    (tmp_path / "says").write_text('case $* in "-n 0"*) exit 3 ;; esac')
    commands.joinpath("pbsdsh").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/called\n. {tmp_path}/says\n'
    )
    environ = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": f"{commands}:/usr/bin:/bin"}
    words = shell.node_command(["look", "ID"], environ, ["n1", "n2"])
    done = subprocess.run(words, env=environ, check=False, capture_output=True)
    assert done.returncode == 3
    assert (tmp_path / "called").read_text() == called.format(0) + called.format(4)
    assert "-n" not in shell.node_command(["look"], environ, ["n1", "n2", "n3"])[4]
