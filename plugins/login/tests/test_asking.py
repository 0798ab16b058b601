"""Commands about a job: forwarding to its node, and options that may be forwarded."""

import dataclasses
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from vtorque_core.api import Remote
from vtorque_login import remote_command
from vtorque_login.asking import wrap_command

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


OF_JOB = Remote(("level", "follow", "more"), terminal=True, output="page")


@pytest.fixture
def call(monkeypatch):
    """Return the command's output, its exit code, and the requests; ``code``: the answer."""

    def called(*argv, code=3, of_job=OF_JOB):
        asked = []

        def run(what, config):
            asked.append({**dataclasses.asdict(what), "config": config})
            return code

        monkeypatch.setattr(remote_command, "run", run)
        done = CliRunner().invoke(wrap_command(look, of_job, CONFIG), argv, obj="cfg")
        return done, asked

    return called


def test_elsewhere_hook_gets_the_command_and_its_options(call):
    done, (asked,) = call("-f", "--level=warn", "--node", "n2", "42", "a", "-", "b")
    assert (done.exit_code, done.output) == (3, "")
    assert asked == {
        "command": "look", "job_id": "42", "node": "n2", "config": CONFIG, "terminal": False,
        "output": None, "reads": True,
        "options": {"level": ["--level=warn"], "follow": ["--follow"]},
        "operands": {"more": ["a", "-", "b"]},
    }  # fmt: skip


def test_command_runs_locally_if_no_hook_handles_it(call):
    done, (asked,) = call("42", code=None)
    assert done.output == "here: cfg 42 () info False None False\n"
    assert (asked["options"], asked["operands"]) == ({}, {}), (
        "options were sent that were not given"
    )


def test_output_file_is_written_locally(call):
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
def test_forwarded_command_accepts_only_transferable_options(call, argv, runs):
    done, asked = call(*argv)
    assert asked == [], "the command was sent to another host"
    assert done.output.startswith("here: ") == runs
    if not runs:
        assert "only supported on the job's node" in str(done.exception)
