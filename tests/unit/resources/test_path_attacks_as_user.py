"""What the batch system opens for a job, it opens as the job's user: really another user."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from vtorque_local import become_job, mom
from vtorque_local.qsub import QsubJob

ME = os.getuid()
NOBODY = 65534


def a_job() -> mom.Job:
    return mom.Job(NOBODY, [], [], True, QsubJob("t"), {"PATH": "/usr/bin:/bin"})


@pytest.mark.skipif(ME != 0, reason="only root can become another user")
@pytest.mark.parametrize("target", ["file", "new"])
def test_a_job_writes_its_output_as_the_user(tmp_path, target):
    """A link as the output's name: root would write where it leads."""
    top = Path(tempfile.mkdtemp())  # which the user can reach
    try:
        top.chmod(0o755)
        program, victim, theirs = top / "start.py", top / "victim", top / "theirs"
        program.write_bytes(Path(become_job.__file__).read_bytes())
        victim.mkdir(mode=0o755)
        (victim / "file").write_bytes(b"root's own")
        theirs.mkdir()
        os.chown(theirs, NOBODY, NOBODY)
        (theirs / "out").symlink_to(victim / target)

        def note(name: str, how: dict) -> bool:
            given = {
                "path": str(theirs / name),
                "name": "x",
                "text": "evil",
                "starter": os.getpid(),
            }
            argv = ["/usr/bin/python3", "-I", program, json.dumps(given)]
            subprocess.run(argv, check=False, timeout=180, capture_output=True, **how)
            found = victim / target if name == "out" else theirs / name
            return found.exists() and b"evil" in found.read_bytes()

        assert note("own", mom._as_user(a_job())), "it can write where it may"
        assert not note("out", mom._as_user(a_job()))
        assert note("out", {}), "root would have written"
    finally:
        shutil.rmtree(top)


@pytest.mark.skipif(ME != 0, reason="only root can become another user")
def test_a_job_has_no_id_of_roots():
    done = subprocess.run(
        ["/bin/sh", "-c", "id -u; id -g; id -G; umask"],
        capture_output=True, text=True, check=True, timeout=180, **mom._as_user(a_job()),
    )  # fmt: skip
    uid, gid, groups, umask = done.stdout.splitlines()
    assert (uid, gid) == (str(NOBODY), str(pwd.getpwuid(NOBODY).pw_gid))
    assert "0" not in groups.split() and umask == "0077"
