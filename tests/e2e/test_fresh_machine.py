"""Run README's commands in empty roots of Debian 12 and 13."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from doc_blocks import block

pytestmark = [pytest.mark.e2e, pytest.mark.full]

REPO = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_MACHINE = """
git ls-files -z --cached --others --exclude-standard | tar c --null -T - |
  timeout -s KILL 3600 scripts/machine --empty "$1" bash -euc "$2"
"""
VERSIONS = """
echo "all of it took $SECONDS s"
/usr/bin/python3 -V; grep PRETTY_NAME /etc/os-release
dpkg-query -W qemu-system-x86 libvirt-daemon-driver-qemu
"""


EXAMPLES = {
    "container": {
        "plugins": "images oci",
        "packages": "e2fsprogs mmdebstrap umoci uidmap",
        "image": "stack",
        "shown": "cat result-*.json",
        "wanted": [rf'\{{"masses": {each}00, "lowest": \[0\.\d+, .*' for each in (1, 2, 3)],
    },
    "study": {
        "plugins": "experiment[html]",
        "packages": "busybox",
        "image": "micro",
        "shown": "ls study.html",
        "wanted": ["study.html", r"wall, s +guest WORK=compute +6/6 .*"],
    },
}
"""Examples that one node without root can run. tests/e2e/slurm runs all of them on two nodes."""


@pytest.fixture(params=["bookworm", "trixie"])
def machine(request):
    """Return a function that runs a script as root in a new empty machine of that release.

    The script reads this checkout as a tar archive from standard input. pip and apt get this
    machine's settings from the environment, because a site may use a private package index.
    """

    def run(script):
        done = subprocess.run(
            ["bash", "-c", IN_MACHINE, "bash", request.param, script], cwd=REPO, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
        )  # fmt: skip
        sys.stdout.write(done.stdout)  # for pytest -rP: the log of a run
        assert done.returncode == 0
        return done.stdout

    return run


def environment():
    """Return this process's environment without its Python and its home."""
    ours = ("VIRTUAL_ENV", "PYTHON", "PYTEST", "PIP_FIND_LINKS", "XDG_", "TMPDIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root"}


def script(*lines):
    """Return a script that unpacks the checkout, runs these lines there, and prints versions."""
    head = "mkdir /srv/vtorque; cd /srv/vtorque; tar x --no-same-owner; exec </dev/null"
    return "\n".join([head, *lines, VERSIONS])


FOLLOW_HINT = r"""
hint=$(~/vtorque/bin/vmgr images sync 2>&1 || true)
echo "$hint"
make=$(sed -n "s/.*in a checkout: \(.*\))$/\1/p" <<<"$hint")
install=$(sed -n "s/.*: \(\/.*pip install .*\) (WHEELS: .*/\1/p" <<<"$hint")
bash -euxc "${make//WHEELS/wheels}"
bash -euxc "${install//WHEELS/wheels}"
~/vtorque/bin/vmgr images sync --help
"""


def test_readme_runs_a_job_without_root(machine):
    """A hint of vmgr for a missing distribution works as printed, too."""
    user = block("README.md", "scripts/wheels") + "cat job.sh.o1\n" + FOLLOW_HINT
    said = machine(
        script(
            "useradd -m -s /bin/bash ada; chown -R ada: .",
            block("README.md", "apt-get"),
            f"su ada -c 'bash -eu' <<'END OF USER'\n{user}END OF USER",
        )
    )
    assert re.search(r"^vvm\nada\n", said, re.MULTILINE)


def test_readme_sets_up_a_node(machine):
    page = (REPO / "README.md").read_text()
    (demo,) = re.findall(r"`(scripts/demo)`", page)
    (clean,) = re.findall(r"`(scripts/demo --clean)`", page)
    said = machine(script(demo, clean))
    assert "exit code 42" in said and "Hello from v" in said
    assert "Removed: /opt/vtorque" in said


def commands_of(name):
    """Return the README's commands, in the form that it gives for ``local``."""
    page = (REPO / f"examples/{name}/README.md").read_text()
    commands = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    if "`vsub -W block=true job.sh`" in page:
        commands = [
            each.replace("vsub -W job.sh", "vsub -W block=true job.sh") for each in commands
        ]
    return commands


def test_example_readme_runs_on_a_node(machine):
    """Only root can build an image of a distribution, so an admin does it on a node."""
    build, submit = commands_of("bones")
    said = machine(
        script(
            "useradd -m -s /bin/bash ada",
            "scripts/node packages; scripts/node up --name vtorque",
            "export PATH=/opt/vtorque/bin:$PATH; cp -r examples/bones ~ada; cd ~ada/bones",
            f"{build}chown -R ada: .",
            f"su ada -c 'bash -eux' <<'END OF USER'\n{submit}cat bones.o*\nEND OF USER",
        )
    )
    for number in range(1, 5):
        assert re.search(rf"^specimen {number}: 4\d% bone, [23]\d\d\d MPa$", said, re.MULTILINE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_readme_runs_without_root(machine, name):
    """Run the README's commands as a user."""
    example, commands = EXAMPLES[name], "".join(commands_of(name))
    wheels, venv, _ = block("README.md", "scripts/wheels").splitlines()
    wheels = wheels.replace(" wheels ", f" wheels {example['plugins']} ")
    user = [
        wheels,
        " ".join([venv, *(f"vtorque-{each}" for each in example["plugins"].split())]),
        f"export PATH=~/vtorque/bin:$PATH; cp -r examples/{name} ~; cd ~/{name}",
        f"{commands}vmgr images show {example['image']}; {example['shown']}",
    ]
    said = machine(
        script(
            "useradd -m -s /bin/bash ada; chown -R ada: .",
            block("README.md", "apt-get"),
            f"apt-get install -y --no-install-recommends {example['packages']}",
            "su ada -c 'bash -eux' <<'END OF USER'\n" + "\n".join(user) + "\nEND OF USER",
        )
    )
    for line in example["wanted"]:
        assert re.search(f"^{line}$", said, re.MULTILINE), line


def test_readme_runs_the_tests(machine):
    page = (REPO / "README.md").read_text()
    (fast,) = re.findall(r"`(scripts/test --fast)`", page)
    # A user has a clone, and therefore git.
    clone = "apt-get -qq update; apt-get -qq install -y git; git init -q .; git add -A"
    said = machine(script(clone, fast))
    assert re.search(r"^=+ \d+ passed", said, re.MULTILINE)
