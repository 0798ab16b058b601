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


@pytest.mark.full
def test_array_of_nextflow_runs_in_guests(clean):
    """Each element runs another task's ``.command.run``. A failed task has its exit status."""
    node = clean
    node.empty_home()
    (wrapper,) = (each for each in generated_scripts.PBS if "nextflow" in each.name)
    tasks = {"array": "", "good": "tr -d '\\n' < reads.txt | wc -c > counts.txt", "bad": "exit 3"}
    tasks["array"] = generated_scripts.NEXTFLOW_ARRAY.format(
        directories=" ".join(f"{node.home}/work/{each}" for each in ("good", "bad")),
        index="PBS_ARRAYID",
    )
    (node.home / "reads.txt").write_text("ACGT\n")
    for name, script in tasks.items():
        directory = node.home / "work" / name
        directory.mkdir(parents=True)
        text = wrapper.content(node.home).replace("3f/9ac1d2", name)
        if name == "array":
            text = text.replace(f"-o {directory}/.command.log", "-o /dev/null\n#PBS -t 0-1")
        (directory / ".command.run").write_text(text)
        (directory / ".command.sh").write_text(f"#!/bin/bash -ue\n{script}\n")
    subprocess.run(["chown", "-R", node.user, node.home], check=True)
    try:
        argv = ("vsub", "-N", "nf-align_1", "-vm", "ram=192M", ".command.run")
        done = node.as_user(*argv, cwd=node.home / "work/array")
        assert done.stdout.count(b"\n") == 1
        codes = [node.home / "work" / name / ".exitcode" for name in ("good", "bad")]
        node.wait_for(lambda: all(each.exists() for each in codes), what="exit status")
        assert [each.read_text() for each in codes] == ["0", "3"]
        assert (node.home / "work/good/counts.txt").read_text().strip() == "4"
    finally:
        node.empty_home()
