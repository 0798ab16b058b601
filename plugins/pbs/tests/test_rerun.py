"""A detached start does not wait for qrerun, which waits for the job's end on this node."""

import time

import pytest

from vtorque_core.api import HostFault
from vtorque_pbs import run
from vtorque_pbs.settings import Settings


@pytest.mark.parametrize(("script", "fails"), [("exit 0", False), ("exit 3", True)])
def test_what_the_server_says_at_once(tmp_path, script, fails):
    (tmp_path / "qrerun").write_text(f"#!/bin/sh\n[ $1 = 5.vm ] && {script}\n")
    (tmp_path / "qrerun").chmod(0o755)
    commands = run.Commands(Settings(bin=str(tmp_path)), ())
    if fails:
        with pytest.raises(HostFault, match="ended with 3"):
            commands.rerun("5.vm")
    else:
        commands.rerun("5.vm")


def test_a_qrerun_that_waits_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RERUN_TIME", 0.2)
    done = tmp_path / "done"
    (tmp_path / "qrerun").write_text(f"#!/bin/sh\nsleep 0.6\ntouch {done}\n")
    (tmp_path / "qrerun").chmod(0o755)
    run.Commands(Settings(bin=str(tmp_path)), ()).rerun("5.vm")
    assert not done.exists()
    time.sleep(1)
    assert done.exists(), "it was not let go on"
