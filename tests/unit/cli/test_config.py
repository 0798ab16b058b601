"""``vtorque config``: its output for valid and invalid files."""

import json
import re

import pytest
from click.testing import CliRunner

from vtorque_admin.config_command import config as cli
from vtorque_core.config import site_file


@pytest.fixture
def file(tmp_path):
    """A config that root would trust, too."""
    tmp_path.chmod(0o755)
    path = tmp_path / "vtorque.toml"
    path.write_text("[node]\n")
    return path


def run(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


def test_check_reports_problems(file):
    done = run("check", "--file", file)
    assert (done.exit_code, done.stdout) == (0, f"{file}: ok\n")
    file.write_text("[node]\naccel = 'x'\ngrace = []\n")
    done = run("check", "--file", file)
    assert done.exit_code == 1
    assert (
        done.stderr.startswith(f"{file}:2: [node] accel: ") and len(done.stderr.splitlines()) == 2
    )
    report = json.loads(run("check", "--json", "--file", file).stdout)
    assert len(report["problems"]) == 2


def test_check_without_a_site_config_prints_that_defaults_apply(tmp_path, monkeypatch):
    monkeypatch.setattr(site_file, "CONFIG_PATH", tmp_path / "x")
    done = run("check", "--file", tmp_path / "x")
    assert done.exit_code == 0 and "all defaults" in done.stdout


def test_show_prints_values(file):
    file.write_text('[node]\ngrace = 5\n[options.ram]\nmax = "4G"\nallow = ["?G"]\n')
    values = json.loads(run("show", "--json", "--file", file).stdout)["values"]
    assert values["node.grace"] == {"value": 5.0, "unit": "s", "origin": f"{file}:2"}
    assert values["options.ram.allow"]["value"] == ["?G"]
    assert values["node.accel"] == {"value": "auto", "unit": None, "origin": "default"}
    text = run("show", "--file", file).stdout
    assert re.search(rf'^node.grace = "5s" +# {file}:2$', text, re.MULTILINE)
    file.write_text("[node]\ngrace = []\n")
    done = run("show", "--file", file)
    assert done.exception.exit_code == 2 and "[node] grace" in str(done.exception)


def test_templates_of_the_site_are_listed_and_checked(file):
    own = file.parent / "templates" / "disk.xml.j2"
    own.parent.mkdir(mode=0o755)
    own.touch(mode=0o644)
    assert run("check", "--file", file).exit_code == 0
    replaced = "vtorque_core.plan.domain:templates/disk.xml.j2"
    assert f"{own}  # in place of {replaced}\n" in run("show", "--file", file).stdout
    shown = json.loads(run("show", "--json", "--file", file).stdout)
    assert shown["templates"] == {str(own): replaced}
    own.rename(own.with_name("dsik.xml.j2")).chmod(0o666)
    problems = run("check", "--file", file).stderr.splitlines()
    assert len(problems) == 2 and "no template has that name" in problems[0]


def test_print_example_prints_the_example():
    done = run("example")
    assert done.exit_code == 0 and "[options.ram]" in done.stdout
