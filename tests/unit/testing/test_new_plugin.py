"""``vtorque plugins new``: each kind is well-formed from the start, and works as its kind.

The quick test checks them; the long one builds them, installs them and runs their own tests. The
one of a device is tested in each run: tests/e2e/test_first_plugin.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vtorque_core.api import Refused
from vtorque_core.cli.admin import vtorque
from vtorque_testing.new_plugin import KINDS, write

ROOT = Path(__file__).parents[3]
FOUND = """
from vtorque_admin import author_errors
from vtorque_core.config.plugins import Plugins

plugins = Plugins.load(node=True)
assert not plugins.broken, plugins.broken
print(plugins.distributions["acme"], list(author_errors.find_errors(plugins, "acme")))
"""
LONG = "a-name-of-thirty-letters-ab-cd"
CODE = {"device": 60, "guest": 150}  # lines


def run(*argv, **options):
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=1800,
        **{"env": {**os.environ, "PYTHONPATH": ""}, **options},
    )  # fmt: skip
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def made(kind, top, name="acme"):
    done = CliRunner().invoke(
        vtorque, ["plugins", "new", name, f"--{kind}", "--directory", str(top)]
    )
    assert done.exit_code == 0, done.output
    return top / f"vtorque-{name}"


def code_lines(path):
    """Return how many lines of a file are code: no blank, no comment, no docstring of one line."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(1 for line in lines if line and not line.startswith(("#", '"""')))


def test_each_kind_is_well_formed_with_any_name(tmp_path):
    for kind in KINDS:
        for name in ("acme", LONG):
            top = tmp_path / f"{kind}-{name}"
            top.mkdir()
            made(kind, top, name)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [p for p in files if re.search(r"@[A-Z]+@", p.read_text())]
    run(sys.executable, "-m", "ruff", "check", tmp_path, cwd=tmp_path)


def test_device_and_guest_type_are_short(tmp_path):
    for kind, most in CODE.items():
        package = made(kind, tmp_path, f"acme-{kind}") / f"vtorque_acme_{kind}"
        assert sum(map(code_lines, package.glob("*.py"))) <= most, kind


@pytest.mark.parametrize("name", ["", "Acme", "acme_x", "-a", "a-", "../a", "a b", "1a", "a" * 31])
def test_invalid_name_is_refused(tmp_path, name):
    with pytest.raises(Refused, match="is not a name for a plugin"):
        write(name, KINDS["device"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_existing_directory_is_not_overwritten(tmp_path):
    made("device", tmp_path)
    with pytest.raises(Refused, match="exists already"):
        write("acme", KINDS["device"], tmp_path)


def test_missing_kind_is_a_usage_error(tmp_path):
    done = CliRunner().invoke(vtorque, ["plugins", "new", "acme", "--directory", str(tmp_path)])
    assert done.exit_code == 2
    assert "choose the kind: --device" in done.output


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build wheels of this checkout, of its dependencies, and of the authors' build tools."""
    top = tmp_path_factory.mktemp("wheels")
    plugins = ("admin", "images", "linux-guest", "joblog", "telemetry")
    sources = [ROOT, ROOT / "testing", *(ROOT / "plugins" / name for name in plugins)]
    tools = ("editables", "hatchling", "mypy", "pytest", "ruff")
    constraints = str(ROOT / "constraints.txt")
    environ = {**os.environ, "PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "-w", top, "--find-links", top)
    run(*pip, "--no-deps", "--no-build-isolation", *sources)
    run(*pip, *top.glob("*.whl"), *tools, env=environ)
    return top


@pytest.fixture(scope="module")
def types(tmp_path_factory):
    """Return mypy's cache: the core's files are the same for all kinds."""
    return tmp_path_factory.mktemp("types")


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_generated_plugin_builds_and_passes_its_tests_in_an_empty_environment(
    tmp_path, wheels, types, kind
):
    """With the core, without a network: installed as by its author, then as on a node."""
    distribution = made(kind, tmp_path)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    environ = {**os.environ, "PYTHONPATH": "", "MYPY_CACHE_DIR": str(types)}

    def alone(*argv, cwd=distribution):
        lonely = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
        return run(*lonely, *argv, cwd=cwd, env=environ)

    def pip(verb, *argv):
        alone(sys.executable, "-m", "pip", "--python", python, verb, "-q", "--no-index",
              "--find-links", wheels, *argv, cwd=tmp_path)  # fmt: skip

    pip("install", "--no-compile", "hatchling", "editables")
    pip("install", "--no-compile", "--no-build-isolation", "-e", f"{distribution}[test]")
    alone(python, "-m", "ruff", "check", ".")
    alone(python, "-m", "mypy")
    said = alone(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full")
    assert " passed" in said and ("skipped" not in said or kind == "batch")

    pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, distribution)
    pip("install", "--no-deps", *tmp_path.glob("*.whl"))
    assert alone(python, "-c", FOUND, cwd=tmp_path) == "vtorque-acme 0.1.0 []\n"
    listed = alone(python, "-m", "vtorque_core.cli.vtorque", "plugins", cwd=tmp_path)
    assert re.search(r"(?m)^acme +on +0.1.0", listed)
    assert [*python.parents[1].glob("lib/*/site-packages/vtorque_acme/*.py")]  # not the checkout's
