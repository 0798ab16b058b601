"""Users other than root can read the help of commands that only root can run."""

import os

import pytest
from click.testing import CliRunner

from vtorque_admin.command import setup
from vtorque_cluster.command import cluster
from vtorque_core.api import UsageError
from vtorque_warm.command import warm

GROUPS = {"setup": setup, "cluster": cluster, "warm": warm}
COMMANDS = [(name, word) for name, group in GROUPS.items() for word in group.commands]
NEEDED = {"cluster": ["--nodes", "n1"]}


@pytest.mark.parametrize(("name", "word"), COMMANDS)
def test_help_is_printed_and_the_command_refused(monkeypatch, name, word):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(GROUPS[name], [word, "--help"])
    assert done.exit_code == 0 and done.output.startswith("Usage: ")
    done = CliRunner().invoke(GROUPS[name], [word, *NEEDED.get(name, [])])
    assert isinstance(done.exception, UsageError)
    assert "root" in str(done.exception)
