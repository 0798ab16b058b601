"""``vtorque plugins``: its output for each plugin."""

import json
import sys
import textwrap

import pytest
from click.testing import CliRunner

from vtorque_admin.plugins_command import plugins as command

ACME = """
    import click
    from vtorque_core.api import BatchSystem, Command, GuestType, ImageBuilder, Option, count
    from vtorque_core.api import hookimpl

    @hookimpl
    def vtorque_options():
        yield Option("fpga", count, 0, "cards")
        yield Option("board", count, 0, "boards")

    @hookimpl
    def vtorque_guest_types():
        yield GuestType("acmeos", frozenset(), driver=None)

    @hookimpl
    def vtorque_batch_systems():
        yield BatchSystem("acmeq", None, None, None)

    @hookimpl
    def vtorque_image_builders():
        yield ImageBuilder("acme-disk", None)

    @hookimpl
    def vtorque_commands():
        yield Command("vmgr cards", load=lambda: click.Command("cards"))
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that lists plugins with this config; ``acme`` has the given source."""
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "acme_tools-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tools\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[vtorque1]\nacme = acme_cards\n")

    def run(*argv, config="", source=ACME):
        sys.modules.pop("acme_cards", None)
        (tmp_path / "acme_cards.py").write_text(textwrap.dedent(source))
        (tmp_path / "vtorque.toml").write_text(config)
        return CliRunner().invoke(command, ["--config", str(tmp_path / "vtorque.toml"), *argv])

    yield run
    sys.modules.pop("acme_cards", None)


def line_of(text, name):
    """Return a plugin's cells, including the lines below the table."""
    found = next(line for line in text.splitlines() if line.split()[0] == name)
    return found.split(None, 3)


def test_line_lists_contributions_of_a_plugin(call):
    done = call()
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].split() == ["NAME", "STATE", "VERSION", "BRINGS"]
    assert line_of(done.stdout, "acme") == [
        "acme",
        "on",
        "2.5",
        "-vm board, fpga; guest types acmeos; batch systems acmeq; image builders acme-disk; "
        "commands vmgr cards",
    ]
    assert line_of(done.stdout, "local")[3] == "batch systems local; commands vtorque local"
    assert "vtorque_" not in done.stdout


def test_verbose_lists_hooks(call):
    done = call("-v")
    said = line_of(done.stdout, "acme")[3]
    assert said.endswith("batch_systems, commands, guest_types, image_builders, options")


@pytest.mark.parametrize("key", ["disable = ['acme']", "enable = ['local']"])
def test_disabled_plugin_names_the_line_that_disables_it(call, tmp_path, key):
    done = call(config=f"[plugins]\n{key}\n", source="raise SystemExit('imported')")
    assert done.exit_code == 0
    assert line_of(done.stdout, "acme")[1:] == ["off", "2.5", "-"]
    word = key.split()[0]
    assert f"acme is off: [plugins] {word} ({tmp_path}/vtorque.toml:2)\n" in done.stdout


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (ACME.replace('click.Command("cards")', "1 / 0"), "vtorque_commands: ZeroDivisionError"),
        (ACME.replace("Option(", "dict("), "vtorque_options: "),
    ],
)
def test_broken_plugin_names_the_error(call, source, why):
    done = call(source=source)
    assert done.exit_code == 1
    assert line_of(done.stdout, "acme")[1] == "broken"
    assert f"acme is broken: {why}" in done.stdout


def test_unknown_plugin_in_the_config_is_reported(call):
    done = call(config="[plugins]\ndisable = ['amce']\n")
    assert done.exit_code == 1
    assert line_of(done.stdout, "acme")[1] == "on"
    assert "[plugins] disable: has 'amce'" in done.stderr and "did you mean acme?" in done.stderr


def test_json_lists_all_fields(call):
    rows = {row["name"]: row for row in json.loads(call("--json").stdout)}
    assert rows["acme"] == {
        "name": "acme",
        "state": "on",
        "distribution": "acme-tools",
        "version": "2.5",
        "why": "",
        "brings": {
            "-vm": ["board", "fpga"],
            "guest types": ["acmeos"],
            "batch systems": ["acmeq"],
            "image builders": ["acme-disk"],
            "commands": ["vmgr cards"],
        },
        "hooks": [
            "vtorque_batch_systems",
            "vtorque_commands",
            "vtorque_guest_types",
            "vtorque_image_builders",
            "vtorque_options",
        ],
        "wrong": [],
    }
    assert next(iter(rows)) == "core" and rows["core"]["distribution"] == "vtorque-core"
