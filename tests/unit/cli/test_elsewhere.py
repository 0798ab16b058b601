"""Commands about a job: who is asked first, what may be asked from elsewhere."""

import types
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from vtorque_core.api import OfJob, always, hookimpl
from vtorque_core.cli.elsewhere import asking
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.site.plugins import Plugins

CONFIG = Path("/etc/acme.toml")


@click.command()
@click.argument("job_id")
@click.argument("more", nargs=-1)
@click.option("-l", "--level", default="info")
@click.option("-f", "--follow", is_flag=True)
@click.option("--page", type=click.Path(allow_dash=True, path_type=Path))
@click.option("--own", is_flag=True)
@click.pass_obj
def look(config, job_id, more, level, follow, page, own):
    click.echo(f"here: {config} {job_id} {more} {level} {follow} {page} {own}")


OF_JOB = OfJob(("level", "follow", "more"), terminal=True, output="page")


def call(*argv, codes=(3,), of_job=OF_JOB):
    """Return what the command says, its exit code, and what the plugin was asked."""
    asked = []

    @hookimpl
    def vtorque_elsewhere(command, job_id, node, options, operands, config, terminal, output):
        asked.append(
            {"command": command, "job_id": job_id, "node": node,
             "options": options, "operands": operands, "config": config,
             "terminal": terminal, "output": output}
        )  # fmt: skip
        return codes

    module = types.ModuleType("acme")
    module.vtorque_elsewhere = vtorque_elsewhere
    plugins = Plugins()
    plugins.register("acme", module, "acme 1")
    command = asking(look, of_job, plugins, CONFIG)
    done = CliRunner().invoke(command, argv, obj="cfg")
    return done, asked


def test_who_can_run_it_elsewhere_is_asked_first():
    done, (asked,) = call("-f", "--level=warn", "--node", "n2", "42", "a", "-", "b")
    assert (done.exit_code, done.output) == (3, "")
    assert asked == {
        "command": "look", "job_id": "42", "node": "n2", "config": CONFIG, "terminal": False,
        "output": None,
        "options": {"level": ["--level=warn"], "follow": ["--follow"]},
        "operands": {"more": ["a", "-", "b"]},
    }  # fmt: skip


def test_it_runs_here_where_nobody_takes_it():
    done, (asked,) = call("42", codes=())
    assert done.output == "here: cfg 42 () info False None False\n"
    assert (asked["options"], asked["operands"]) == ({}, {}), "what is not given does not travel"


def test_a_file_stays_here_and_its_content_travels():
    _, (asked,) = call("--page", "/home/u/page.html", "42")
    assert asked["output"] == Path("/home/u/page.html")
    assert asked["options"] == {"page": ["--page=-"]}


@pytest.mark.parametrize(
    ("argv", "runs"),
    [
        (["--here", "--level=warn", "42", "a"], True),
        (["--here", "--page", "-", "42"], True),
        (["--here", "--page", "/home/u/.bashrc", "42"], False),
        (["--here", "--own", "42"], False),
    ],
)
def test_who_is_asked_from_elsewhere_does_what_may_travel(argv, runs):
    done, asked = call(*argv)
    assert asked == [], "and asks nobody further"
    assert done.output.startswith("here: ") == runs
    if not runs:
        assert "only where the command is called" in str(done.exception)


def test_a_command_of_no_plugin_stays_as_it_was():
    assert asking(look, OF_JOB, Plugins(), CONFIG) is look
    plugins = Plugins()
    module = types.ModuleType("acme")
    module.vtorque_options = always()
    plugins.register("acme", module, "acme 1")
    assert asking(look, OF_JOB, plugins, CONFIG) is look


def test_another_programs_words_are_not_vmgrs(tmp_path):
    """``vmgr ssh 42 0 -- prog --config x``: x is no site config."""
    bad = tmp_path / "bad.toml"
    bad.write_text("[nothing]\nx = 1\n")
    good = tmp_path / "good.toml"
    good.write_text("")
    words = ["--config", str(good), "clean", "--help", "--", "--config", str(bad)]
    assert CliRunner().invoke(vmgr, words).exit_code == 0
