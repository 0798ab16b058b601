"""``vtorque cluster`` as root: the real program and ClusterShell, with a fake ssh.

The fake ssh runs each node's command on this host, with that node's config and directories.
"""

import os
import re
import stat
import subprocess
import sys

import pytest

from programs import fake_program

pytestmark = pytest.mark.e2e

FAKE_SSH = """#!/bin/sh
# A fake ssh: no network. NODE in the command becomes the node's name.
while [ $# -gt 2 ]; do shift; done
printf '%s %s\\n' "$1" "$2" >> "$FAKE_SSH_LOG"
exec sh -c "$(printf '%s' "$2" | sed "s/NODE/$1/g")"
"""
CONFIG = """# {node}
[paths]
state = "{top}/state"
run = "{top}/run"
commands = "{top}/bin"

[network]
kind = "none"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that runs ``vtorque cluster`` for the nodes n1 to n3."""
    fake = fake_program(tmp_path / "fake-ssh-bin" / "ssh", FAKE_SSH)
    # The directory NODE is the host of the command.
    for node in ("NODE", "n1", "n2", "n3"):
        top = tmp_path / node
        top.mkdir()
        (top / "vtorque.toml").write_text(CONFIG.format(node=node, top=top))
    environ = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    environ["FAKE_SSH_LOG"] = str(tmp_path / "log")

    def run(*argv):
        # Not the command: it has a fixed PATH, which leads to the real ssh.
        program = [sys.executable, "-c", "from vtorque_core.cli.admin import vtorque; vtorque()"]
        config = tmp_path / "NODE" / "vtorque.toml"
        return subprocess.run(
            [*program, "cluster", *argv, "--nodes", "n[1-3]", "--config", config],
            env=environ, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_all_nodes_get_the_same_secret_and_a_running_job_keeps_its_old_one(cluster, tmp_path):
    secrets = [tmp_path / node / "state" / "site.secret" for node in ("NODE", "n1", "n2", "n3")]
    assert cluster("install", "--dry-run").returncode == 0
    assert not any(path.exists() for path in secrets)
    journal = tmp_path / "n3" / "state" / "journal"
    journal.mkdir(parents=True)
    (journal / "1.vm.0.jsonl").write_text("")
    secrets[3].write_bytes(b"another" * 10)
    done = cluster("install", "--batch", "local")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "n3:" in lines
    assert any("1 jobs or warm guests still hold resources on this node" in line for line in lines)
    assert lines[-1] == "2 of 3 nodes done; failed: n3"
    assert len({path.read_bytes() for path in secrets[:3]}) == 1
    assert len(secrets[0].read_bytes()) == 64
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets[:3]} == {0o600}
    assert secrets[3].read_bytes() == b"another" * 10
    (journal / "1.vm.0.jsonl").unlink()
    done = cluster("install", "--batch", "local")
    assert (done.returncode, done.stdout) == (0, "3 of 3 nodes done\n"), done.stderr
    assert len({path.read_bytes() for path in secrets}) == 1
    assert 'system = "local"' not in (tmp_path / "n1" / "vtorque.toml").read_text()
    log = (tmp_path / "log").read_bytes()
    assert secrets[0].read_bytes() not in log
    secrets[2].write_bytes(b"a third" * 10)
    done = cluster("doctor")
    assert done.returncode == 1
    told = re.findall(r"^(\S+):\n  site secret differs from the other", done.stdout, re.MULTILINE)
    assert sorted(told) == ["n2", "n[1,3]"], done.stdout + done.stderr
    done = cluster("uninstall", "--purge")
    assert done.returncode == 0, done.stdout
    assert not any(path.exists() for path in secrets[1:])
