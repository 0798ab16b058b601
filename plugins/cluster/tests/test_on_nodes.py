"""Commands on many nodes through the real ClusterShell, with a fake ssh that runs them here."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from programs import fake_program
from vtorque_cluster import on_nodes
from vtorque_core.api import UsageError

FAKE_SSH = """#!/bin/sh
# A fake ssh: no network. The last two arguments are the node and the command, as with ssh.
while [ $# -gt 2 ]; do case $1 in -o*) echo "$1" >> "$FAKE_SSH_LOG";; esac; shift; done
printf '%s %s\\n' "$1" "$2" >> "$FAKE_SSH_LOG"
case $1 in
  m7) echo "ssh: connect to host m7 port 22: No route to host" >&2; exit 255;;
  n2) cat > "$FAKE_SSH_LOG.n2"; echo "copying files"; echo "no space" >&2; exit 1;;
  n4) echo "no space"; exit 1;;
  *) [ -n "$FAKE_SSH_ONLY_SAYS" ] && exec echo done; exec sh -c "$2";;
esac
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    fake = fake_program(tmp_path / "fake-ssh-bin" / "ssh", FAKE_SSH)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_equal_answers_are_merged_with_failures_first(log):
    ended = []
    nodes = on_nodes.nodes_of("n[1-4],m7")
    answers = on_nodes.run(
        nodes, ["echo", "it's $HOME"], b"", 2, lambda node, code: ended.append((node, code))
    )
    assert [(a.nodes, a.count, a.code, a.text) for a in answers] == [
        ("m7", 1, 255, "ssh: connect to host m7 port 22: No route to host"),
        ("n[2,4]", 2, 1, "no space"),
        ("n[1,3]", 2, 0, "it's $HOME"),
    ]
    assert sorted(ended) == [("m7", 255), ("n1", 0), ("n2", 1), ("n3", 0), ("n4", 1)]


def test_whole_output_is_returned_on_request(log):
    answers = on_nodes.run(["n1", "n2"], ["seq", "30"], b"", 2, lambda *_: None, whole=True)
    assert [(a.nodes, a.code, a.text.split("\n")) for a in answers] == [
        ("n2", 1, ["copying files"]),
        ("n1", 0, [str(n) for n in range(1, 31)]),
    ]
    (shown,) = on_nodes.run(["n1"], ["seq", "30"], b"", 2, lambda *_: None)
    assert shown.text.split("\n") == [str(n) for n in range(11, 31)]


def test_secret_is_sent_by_stdin_and_not_in_arguments(log):
    secret = b"s3cr3t" + bytes(range(256)) * 20
    answers = on_nodes.run(["n1", "n2", "n3"], ["sha256sum"], secret, 8, lambda *_: None)
    good = next(a for a in answers if a.ok)
    assert good.nodes == "n[1,3]"
    import hashlib

    assert good.text.split()[0] == hashlib.sha256(secret).hexdigest()
    assert Path(f"{log}.n2").read_bytes() == secret
    assert b"s3cr3t" not in log.read_bytes()
    assert "-oBatchMode=yes" in log.read_text()


def test_node_that_does_not_finish_times_out(log):
    ended = []
    nodes = ["n1", "n2"]
    answers = on_nodes.run(nodes, ["sleep", "60"], b"", 8, lambda *it: ended.append(it), 0.5)
    assert ("n1", None) in ended
    assert [(a.nodes, a.code, a.ok) for a in answers] == [("n1", None, False), ("n2", 1, False)]


def test_command_that_ignores_stdin_does_not_hang(log):
    answers = on_nodes.run(["n1", "n3"], ["true"], b"x" * 200_000, 8, lambda *_: None)
    assert [(a.nodes, a.code) for a in answers] == [("n[1,3]", 0)]


@pytest.mark.parametrize("text", ["n[1-", "", "-oProxyCommand=x"])
def test_invalid_node_set_is_refused(text):
    with pytest.raises(UsageError, match="--nodes"):
        on_nodes.nodes_of(text)


CLI = """
import os, sys
os.geteuid = lambda: 0
from vtorque_cluster.command import cluster
from vtorque_core.cli.run_click import run
run(cluster, "vtorque cluster")
"""


def test_progress_errors_and_a_summary_are_printed(log, tmp_path):
    """Plain lines without a terminal; the nodes run the program of this installation."""
    argv = [sys.executable, "-c", CLI, "uninstall", "--nodes", "n[1-2],n4,m7", "--fanout", "1"]
    # The program itself must not run: it would set up, or undo, the machine of the test.
    env = {**os.environ, "PYTHONWARNINGS": "error", "FAKE_SSH_ONLY_SAYS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    assert "/4 n4: failed, exit code 1" in done.stderr
    assert "\x1b" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "m7:", "  ssh: connect to host m7 port 22: No route to host", "n[2,4]:", "  no space",
    ]  # fmt: skip
    assert lines[-1].endswith("1 of 4 nodes done; failed: m7,n[2,4]")
    program = Path(sys.prefix, "bin", "vtorque")
    assert f"m7 {program} setup uninstall" in log.read_text().splitlines()


def test_progress_on_a_terminal_is_a_live_line(log):
    def read(descriptor):
        data = bytearray()
        try:
            while chunk := os.read(descriptor, 4096):
                data += chunk
        except OSError:  # EIO: the last one that had it open has closed it (Linux)
            pass
        return bytes(data)

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        argv = [sys.executable, "-c", CLI, "uninstall", "--nodes", "n2,m7"]
        os.execv(sys.executable, argv)  # noqa: S606
    shown = read(terminal)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert b"/2 n2: failed" in shown
    assert b"\x1b[" in shown
    assert b"0 of 2 nodes done; failed: m7,n2" in shown
