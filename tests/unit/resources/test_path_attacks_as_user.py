"""The batch system opens files of a job as the job's owner, really another user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from noting import noting
from vtorque_local import become_job, mom

ME = os.getuid()
NOBODY = 65534


@pytest.mark.skipif(ME != 0, reason="only root can become another user")
@pytest.mark.parametrize("target", ["file", "new"])
def test_output_file_is_written_as_the_user(tmp_path, target):
    """The user cannot write through a linked directory; a link to a file is never followed."""
    top = Path(tempfile.mkdtemp())  # reachable for the user
    try:
        top.chmod(0o755)
        program, victim, users = top / "start.py", top / "victim", top / "users"
        program.write_bytes(Path(become_job.__file__).read_bytes())
        victim.mkdir(mode=0o755)
        (victim / "file").write_bytes(b"root's own")
        users.mkdir()
        os.chown(users, NOBODY, NOBODY)
        (users / "link").symlink_to(victim)
        (users / "out").symlink_to(victim / target)

        def note(name: str, rights: list[str]) -> bool:
            argv, files = noting(users / name, "evil")
            argv = ["/usr/bin/python3", "-I", str(program), *map(str, files)]
            run = subprocess.run([*rights, *argv], check=False, timeout=180, pass_fds=files)
            assert run.returncode in (0, 1)
            found = users / name if name == "own" else victim / target
            return found.exists() and b"evil" in found.read_bytes()

        assert note("own", mom._switch_user_command(NOBODY)), (
            "the user cannot write to the user's own directory"
        )
        assert not note(f"link/{target}", mom._switch_user_command(NOBODY))
        assert not note("out", []), "root follows a link to a file"
        assert note(f"link/{target}", []), (
            "root cannot write through the directory, either: the test shows nothing"
        )
    finally:
        shutil.rmtree(top)


@pytest.mark.skipif(ME != 0, reason="only root can become another user")
def test_job_has_no_id_of_root():
    done = subprocess.run(
        [*mom._switch_user_command(NOBODY), "/bin/sh", "-c",
         "id -u; id -g; id -G; grep Cap /proc/self/status"],
        capture_output=True, text=True, check=True, timeout=180,
    )  # fmt: skip
    uid, gid, groups, *rights = done.stdout.splitlines()
    assert (uid, gid) == (str(NOBODY), str(pwd.getpwuid(NOBODY).pw_gid))
    assert "0" not in groups.split()
    assert [line for line in rights[:3] if int(line.split()[1], 16)] == [], (
        "the job has capabilities"
    )
