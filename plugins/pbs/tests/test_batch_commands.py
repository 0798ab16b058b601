"""A detached start does not wait for qrerun, which waits for the job's end on this node."""

import pytest

from patience import LONG, eventually
from vtorque_core.api import HostFault
from vtorque_pbs import batch_commands
from vtorque_pbs.settings import Settings


@pytest.mark.parametrize(("script", "fails"), [("exit 0", False), ("exit 3", True)])
def test_immediate_error_of_qrerun_is_reported(tmp_path, monkeypatch, script, fails):
    monkeypatch.setattr(batch_commands, "RERUN_TIME", LONG)
    (tmp_path / "qrerun").write_text(f"#!/bin/sh\n[ $1 = 5.vm ] && {script}\n")
    (tmp_path / "qrerun").chmod(0o755)
    commands = batch_commands.Commands(Settings(bindir=str(tmp_path)), ())
    if fails:
        with pytest.raises(HostFault, match="ended with exit code 3"):
            commands.rerun("5.vm")
    else:
        commands.rerun("5.vm")


def test_waiting_qrerun_is_not_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_commands, "RERUN_TIME", 0.2)
    done, go = tmp_path / "done", tmp_path / "go"
    wait = f"while ! [ -e {go} ]; do sleep 0.02; done"
    (tmp_path / "qrerun").write_text(f"#!/bin/sh\n{wait}\ntouch {done}\n")
    (tmp_path / "qrerun").chmod(0o755)
    batch_commands.Commands(Settings(bindir=str(tmp_path)), ()).rerun("5.vm")
    assert not done.exists()
    go.touch()
    eventually(done.exists)  # it was continued


def test_ssh_gets_one_quoted_command_without_the_user_configuration(tmp_path, monkeypatch):
    by_ssh = batch_commands.ssh_command
    sites = tmp_path / "ssh_config"
    monkeypatch.setattr(batch_commands, "_SSH_CONFIG", sites)
    assert by_ssh("7.srv", "n1", ["vmgr", "a b", "$(id)"], terminal=False) == [
        "ssh", "-F", "none", "-T", "--", "n1", "vmgr 'a b' '$(id)'",
    ]  # fmt: skip
    sites.touch()
    line = by_ssh("7.srv", "n1", ["vmgr"], terminal=True)
    assert line[:5] == ["ssh", "-F", str(sites), "-t", "--"]
