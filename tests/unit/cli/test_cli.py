"""The click commands: help without a config, plugins' own commands, wrong usage in one line."""

import subprocess
import sys
import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import forked
import sparing
from vtorque_core.api import Command, Remote, constant_hook, hookimpl
from vtorque_core.cli.admin import vtorque
from vtorque_core.cli.run_click import run
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.config.plugins import Plugins
from vtorque_core.live import command_groups

BIN = Path(sys.executable).parent
ACME = """
from vtorque_core.api import Command, hookimpl

def load():
    import click

    @click.command()
    def cards():
        "List the Acme cards."
        click.echo("two cards")

    return cards

@hookimpl
def vtorque_commands():
    yield Command("vmgr cards", load=load)
"""


@pytest.fixture
def call(tmp_path):
    """Return a function that runs a command in a fork, with a separate site config."""
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')

    def call(*argv, **env):
        def main():
            sys.path.insert(0, str(tmp_path))  # distributions of the test
            run({"vmgr": vmgr, "vtorque": vtorque}[argv[0]], argv[0])

        given = ["--config", str(config)] if argv[0] == "vmgr" else []
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **env}
        return forked.call(main, [argv[0], *given, *argv[1:]], environ, tmp_path)

    return call


@pytest.mark.parametrize("program", ["vmgr", "vtorque"])
def test_help_works_with_a_broken_config(call, tmp_path, program):
    (tmp_path / "vtorque.toml").write_text("[[[")
    done = call(program, "-h")
    assert done.returncode == 0
    assert "Exit codes:" in done.stdout
    assert "jobshell" not in done.stdout


@pytest.mark.parametrize("words", sparing.each(3, ["vtorque plugins --nope", "vmgr nope", "vmgr"]))
def test_wrong_usage_exits_with_2(call, words):
    done = call(*words.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "said"), [("vmgr ps", "vmgr: "), ("vsub -h", "")])
def test_environment_variable_does_not_select_the_config(tmp_path, command, said):
    """The variable once sent a command for one node to another."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[[[")
    right = tmp_path / "right.toml"
    right.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    program, *argv = command.split()
    done = subprocess.run(
        [BIN / program, "--config", right, *argv], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "VTORQUE_CONFIG": str(wrong)}, check=False,
    )  # fmt: skip
    assert done.stderr.startswith(said) and "wrong.toml" not in done.stderr


def test_command_of_a_plugin_is_listed_and_runs(call, tmp_path):
    (tmp_path / "acme_cards.py").write_text(ACME)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vtorque1]\nacme = acme_cards\n")
    assert "List the Acme cards." in call("vmgr", "-h").stdout
    assert call("vmgr", "cards").stdout == "two cards\n"
    assert "cards" not in call("vtorque", "-h").stdout
    (tmp_path / "acme_cards.py").write_text(ACME.replace("import click", "import acme_lost"))
    assert call("vmgr", "logs", "-h").stderr == "", "vmgr logs reports the broken plugin"
    done = call("vmgr", "-h")
    assert done.returncode == 0 and "Show the log" in done.stdout, (
        "commands of other plugins are missing"
    )
    assert "a command of plugin acme is disabled: No module named 'acme_lost'" in done.stderr


@pytest.mark.parametrize("form", sparing.each(2, ["--config={}", "--config {}"]))
def test_vtorque_command_depends_on_the_given_config(call, tmp_path, form):
    """Another node of this machine may have other plugins."""
    config = tmp_path / "vtorque.toml"
    option = form.format(config).split()
    config.write_text("[plugins]\ndisable = ['local']\n[batch]\nsystem = 'slurm'\n")
    assert "No such command 'local'" in call("vtorque", "local", "stop", *option).stderr
    config.write_text(f"[paths]\nrun = '{tmp_path}'\n")
    done = call("vtorque", "local", "stop", *option)
    assert f"does not answer at {tmp_path}/local.sock" in done.stderr
    config.write_text("[[[")
    done = call("vtorque", "local", "stop", *option)
    assert done.stderr.startswith(f"vtorque: {config}") and done.returncode == 2


def test_plugin_command_with_invalid_or_missing_config_runs_and_reports_it_itself(call, tmp_path):
    config = tmp_path / "other.toml"
    config.write_text("[node]\ngrace = true\n")
    done = call("vtorque", "doctor", "--config", str(config))
    assert (done.returncode, done.stdout) == (2, "")
    assert "grace: is True, but must be" in done.stderr
    done = call("vtorque", "setup", "install", "--config", str(tmp_path / "none.toml"), "--help")
    assert done.returncode == 0 and "--dry-run" in done.stdout


def test_broken_plugin_is_named_and_fails_the_listing(call, tmp_path):
    (tmp_path / "acme_bad.py").write_text("import no_such_module\n")
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vtorque1]\nacme = acme_bad\n")
    config = tmp_path / "vtorque.toml"
    config.write_text('[plugins]\nenable = ["acme"]\n')
    listing = ("vtorque", "plugins", "--config", str(config))
    done = call(*listing)
    assert done.returncode == 1
    assert "no_such_module" in done.stdout
    config.write_text('[plugins]\ndisable = ["acme"]\n')
    assert call(*listing).returncode == 0


def test_completion_is_offered(call):
    done = call("vmgr", _VMGR_COMPLETE="bash_source")
    assert "_vmgr_completion" in done.stdout


def test_config_option_after_a_double_dash_is_not_parsed(tmp_path):
    """``vmgr ssh 42 0 -- prog --config x``: x is no site config."""
    bad = tmp_path / "bad.toml"
    bad.write_text("[nothing]\nx = 1\n")
    good = tmp_path / "good.toml"
    good.write_text("")
    words = ["--config", str(good), "clean", "--help", "--", "--config", str(bad)]
    assert CliRunner().invoke(vmgr, words).exit_code == 0


def test_elsewhere_hook_is_called_for_job_commands_only(monkeypatch, tmp_path):
    """Only a command about a job may run on another node; a hook that raises is ignored."""

    @click.command()
    @click.argument("job_id")
    def look(job_id):
        click.echo(f"here: {job_id}")

    @hookimpl
    def vtorque_remote_command(command, of_job, config):
        asked.append((command.name, of_job, config))
        yield click.Command("look", callback=lambda: click.echo("there"))

    asked = []
    plugins, module = Plugins(), types.ModuleType("acme")
    module.vtorque_commands = constant_hook(
        Command("vmgr look", lambda: look, Remote(("job_id",))),
        Command("vmgr own", lambda: own),
    )
    own = click.Command("own", callback=lambda: click.echo("own"))
    module.vtorque_remote_command = vtorque_remote_command
    plugins.register("acme", module, "acme 1")
    monkeypatch.setattr(command_groups, "load", lambda *_, **__: (None, plugins))
    config = tmp_path / "vtorque.toml"
    said = [CliRunner().invoke(vmgr, ["--config", str(config), name]) for name in ("look", "own")]
    assert [done.output for done in said] == ["there\n", "own\n"]
    assert set(asked) == {("look", Remote(("job_id",)), config)}
