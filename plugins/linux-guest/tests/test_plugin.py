"""What the plugin declares, and what doing so imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vtorque_core import api_context
from vtorque_core.names import Paths
from vtorque_linux_guest import health, node, plugin
from vtorque_linux_guest.driver import LinuxDriver
from vtorque_linux_guest.settings import Settings


class Site:
    paths = Paths()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getitem__(self, kind: type) -> Settings:
        return self.settings


def test_all_context_items_are_supported_under_their_names() -> None:
    classes = {
        name
        for name, value in vars(api_context).items()
        if isinstance(value, type)
        and issubclass(value, api_context.ContextItem)
        and value is not api_context.ContextItem
    }
    (guest_type,) = plugin.vtorque_guest_types()
    assert guest_type.name == "linux"
    assert guest_type.supports == classes
    assert isinstance(guest_type.driver(), LinuxDriver)


def test_builders_are_what_they_say() -> None:
    names = {
        builder.name: type(builder.builder()).__name__
        for builder in plugin.vtorque_image_builders()
    }
    assert names == {"micro": "MicroBuilder", "debian": "DebianBuilder", "linux": "LinuxBuilder"}


def test_settings_and_resources_are_declared_on_the_node() -> None:
    assert list(node.vtorque_settings()) == [Settings]
    assert [kind.kind for kind in node.vtorque_resources()] == ["linux-seed"]


def test_declaring_imports_nothing_that_acts() -> None:
    code = (
        "import sys, vtorque_linux_guest.plugin as p;"
        "list(p.vtorque_guest_types()); list(p.vtorque_image_builders());"
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('vtorque_linux_guest', 'vtorque_core', 'pycdlib', 'cryptography', 'socket')))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert set(shown.stdout.split()) <= {
        "vtorque_core",
        "vtorque_core.api",
        "vtorque_core.errors",
        "vtorque_core.units",
        "vtorque_linux_guest",
        "vtorque_linux_guest.plugin",
    }


def test_health_of_agent_and_scripts(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    missing = Site(Settings(agent=str(agent), prologue=str(tmp_path / "p"), epilogue="/none"))
    assert [r.status for r in health.agent_check(missing)] == ["warning"]
    agent.write_bytes(b"text")
    assert [r.status for r in health.agent_check(missing)] == ["failed"]
    agent.write_bytes(b"\x7fELF...")
    assert [r.status for r in health.agent_check(missing)] == ["ok"]
    assert [r.status for r in health.scripts_check(missing)] == ["ok", "ok"]
    (tmp_path / "p").mkdir()
    (tmp_path / "p").chmod(0o777)
    results = list(health.scripts_check(missing))
    assert [r.status for r in results] == ["failed", "ok"]
    assert results[0].fix
