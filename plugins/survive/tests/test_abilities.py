"""Doctor's report of a node's abilities, by the versions of its tools."""

import platform

import pytest

from vtorque_core.api import run_tool
from vtorque_survive import abilities
from vtorque_survive.settings import Settings

OLD = {"virtiofsd": "--translate-uid", "qemu": "QEMU emulator version 7.2.22", "virsh": "9.0.0"}
NEW = {
    "virtiofsd": "--migration-verify-handles <MODE>",
    "qemu": "QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds)",
    "virsh": "11.3.0",
}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Return a function that sets the output of the node's tools; None: the tool is missing."""

    def say(place=str(tmp_path), reach="ssh {node}", **words):
        names = {"qemu": f"qemu-system-{platform.machine()}"}
        for tool, text in words.items():
            path = tmp_path / names.get(tool, tool)
            path.write_text(f"#!/bin/sh\necho '{text}'\n")
            path.chmod(0o755)
        monkeypatch.setattr(abilities, "VIRTIOFSD", str(tmp_path / "virtiofsd"))

        def run(program, *args, **more):
            return run_tool(str(tmp_path / program), *args, **more)

        monkeypatch.setattr(abilities, "run_tool", run)
        site = {Settings: Settings(checkpoints=place, remote_command=reach)}
        first, second, third = abilities.check(site)
        assert {first.status, third.status} == {"ok"}
        assert (second.status == "warning") == (
            bool(place) and second.message != "checkpoint: supported"
        )
        assert first.message.endswith(": supported")
        return second.message, third.message

    return say


def test_new_tools_support_checkpoint_and_migrate(tools):
    saves, moves = tools(**NEW)
    assert saves == "checkpoint: supported"
    assert moves == "migrate: supported, if the batch system can"


def test_empty_remote_command_disables_migration(tools):
    _, moves = tools(reach="", **NEW)
    assert moves == "migrate: not supported: [plugin.survive] remote_command is empty"


def test_empty_checkpoints_key_disables_checkpoints(tools):
    saves, _ = tools(place="", **NEW)
    assert saves.startswith("checkpoint: not supported: ") and saves.endswith(
        "checkpoints is empty"
    )


def test_missing_or_writable_checkpoint_directory_is_reported(tools, tmp_path):
    assert tools(place="/none/such", **NEW)[0].startswith(
        "checkpoint: not supported: /none: No such file"
    )
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    assert "theirs: can be written by others" in tools(place=str(theirs), **NEW)[0]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("virtiofsd", "virtiofsd does not support --migration-verify-handles"),
        ("qemu", "7.2 is too old: 8.2 is needed"),
        ("virsh", "virsh 9.0 is too old: 11.3 is the oldest tested version"),
    ],
)
def test_too_old_tool_is_named(tools, tool, said):
    saves, moves = tools(**NEW | {tool: OLD[tool]})
    assert saves.startswith("checkpoint: not supported: ") and saves.endswith(said)
    assert moves.startswith("migrate: not supported: ") and moves.endswith(said)


def test_missing_tool_is_named(tools):
    for message in tools(virsh="no number"):
        assert message.count("not found in") + message.count("No such file") == 2
        assert message.endswith("unknown is too old: 11.3 is the oldest tested version")


def test_unusable_file_system_for_checkpoints_is_named(tools):
    saves, _ = tools(place="/proc/self", **NEW)
    assert "file system of type proc. Other hosts that mount it may read" in saves
    assert "No such file" in tools(place="/none", **NEW)[0]
