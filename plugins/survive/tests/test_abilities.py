"""What doctor says that a node could do, by what its tools say of themselves."""

import platform

import pytest

from vtorque_core.api import run_tool
from vtorque_survive import abilities

OLD = {"virtiofsd": "--translate-uid", "qemu": "QEMU emulator version 7.2.22", "virsh": "9.0.0"}
NEW = {
    "virtiofsd": "--migration-mode <MODE>",
    "qemu": "QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds)",
    "virsh": "11.3.0",
}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Return a function that has the node's tools say this; None: there is no such tool."""

    def say(**words):
        names = {"qemu": f"qemu-system-{platform.machine()}"}
        for tool, text in words.items():
            path = tmp_path / names.get(tool, tool)
            path.write_text(f"#!/bin/sh\necho '{text}'\n")
            path.chmod(0o755)
        monkeypatch.setattr(abilities, "VIRTIOFSD", str(tmp_path / "virtiofsd"))

        def run(program, *args, **more):
            return run_tool(str(tmp_path / program), *args, **more)

        monkeypatch.setattr(abilities, "run_tool", run)
        first, second = abilities.check(None)
        assert {first.status, second.status} == {"ok"} and first.message.endswith("yes")
        return second.message

    return say


def test_tools_that_could(tools):
    assert tools(**NEW).endswith("for them yet; these tools could")


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("virtiofsd", "virtiofsd has no --migration-mode"),
        ("qemu", "is of version 7.2, 8.2 is needed"),
        ("virsh", "virsh is of version 9.0, 11.3 is the oldest that was tried"),
    ],
)
def test_each_that_could_not_is_said(tools, tool, said):
    message = tools(**NEW | {tool: OLD[tool]})
    assert "these tools could not: " in message and message.endswith(said)


def test_what_is_missing_is_said(tools):
    message = tools(virsh="no number")
    assert message.count("not found in") + message.count("No such file") == 2
    assert message.endswith("version unknown, 11.3 is the oldest that was tried")
