"""Job scripts that workflow tools generate for PBS run unmodified, in a guest of local."""

import shutil
import subprocess

import pytest

import generated_scripts

pytestmark = pytest.mark.e2e

CASES = [
    pytest.param(each, id=each.name, marks=() if each.short else pytest.mark.full)
    for each in generated_scripts.PBS
]


@pytest.mark.parametrize("generated", CASES)
def test_generated_script_runs_in_a_guest(clean, generated):
    node = clean
    node.empty_home()
    shutil.rmtree(node.home / ".psij", ignore_errors=True)
    content = generated.content(node.home)
    generated_scripts.prepare(node.home, content)
    node.script(content, generated.name)
    subprocess.run(["chown", "-R", node.user, node.home], check=True)
    argv = ("vsub", "-W", "block=true", "-vm", "ram=192M", generated.name)
    done = node.as_user(*argv, check=False)
    try:
        assert (done.returncode, done.stderr) == (0, b"")
        generated_scripts.check(node.home, generated, done.stdout.decode().strip())
    finally:
        node.empty_home()
        shutil.rmtree(node.home / ".psij", ignore_errors=True)
