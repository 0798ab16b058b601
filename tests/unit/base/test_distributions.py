"""Messages that name distributions to install: only vTorque's, and never from an index."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from vtorque_core.api import hooks
from vtorque_core.base.distributions import BATCH_SYSTEMS, CORE, PLUGINS, how_to_get, how_to_install
from vtorque_core.base.errors import Refused
from vtorque_core.config.plugins import Plugins

ROOT = Path(__file__).parents[3]


def brought() -> dict[str, str]:
    """Return plugin name to distribution, according to the projects of this repository."""
    found = {}
    for file in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        for group in ("vtorque1", "vtorque1.node"):
            names = project.get("entry-points", {}).get(group, {})
            found |= dict.fromkeys(names, project["name"])
    return found


def test_list_of_distributions_matches_the_repository():
    assert brought() == PLUGINS
    assert CORE not in PLUGINS.values()
    assert len({*PLUGINS.values()}) == len(list(ROOT.glob("plugins/*/pyproject.toml")))


def test_list_of_batch_systems_matches_the_repository():
    plugins = Plugins.load(node=False)
    assert {
        c.item.name: c.plugin for c in plugins.each(hooks.vtorque_batch_systems)
    } == BATCH_SYSTEMS


def test_missing_batch_system_plugin_is_named_with_its_install_command():
    with pytest.raises(Refused, match=r"batch system 'local'.*WHEELS 'vtorque-local'"):
        Plugins.load(node=False, disable=["local"]).batch_system("local")
    with pytest.raises(Refused, match="no installed plugin provides") as raised:
        Plugins.load(node=False).batch_system("acme")
    assert "pip" not in str(raised.value)


def test_install_command_of_own_distributions_uses_a_wheel_directory():
    assert how_to_get("iocm") == (
        f"{sys.prefix}/bin/pip install --no-index --find-links WHEELS 'vtorque-iocm' "
        "(WHEELS: a directory of wheels; in a checkout: scripts/wheels WHEELS iocm)"
    )
    assert "'vtorque-iocm==1.0'" in how_to_install("vtorque-iocm", "1.0")


def test_install_command_is_never_given_for_foreign_distributions():
    for said in (how_to_get("acme"), how_to_install("vtorque-acme", "1.0")):
        assert "pip" not in said and "author" in said
    assert "vtorque-acme" not in how_to_get("acme")


def test_messages_contain_no_other_pip_command():
    """A plugin may declare its own extra, by the same two options."""
    files = [*ROOT.glob("vtorque_core/**/*.py"), *ROOT.glob("plugins/*/vtorque_*/**/*.py")]
    said = {
        (file.name, line.strip())
        for file in files
        for line in file.read_text().splitlines()
        if re.search(r"pip3? install (?!--no-index --find-links)", line) and '"' in line
    }
    assert said == set()
