"""Job scripts as they are found in the wild run in a guest as under the bare batch system."""

import re

import pytest

from vtorque_testing.wild_scripts import SCRIPTS

pytestmark = pytest.mark.e2e

DEBIAN = ("-vm", "img=debian,ram=512M")  # one CPU, as scripts with ppn=1 ask for
# What CI runs: one of each kind that the contract has not.
SHORT = {"blank-first-line.sh", "trap-term.sh", "background-left.sh", "awk-shebang.awk"}
# What the user's login shell, which runs the script on bare metal, says when a signal ended it.
LOGIN_SHELL = re.compile(rb"^-bash: line 1: +[0-9]+ .*/[0-9]+\.[^/]*\.SC\n", re.MULTILINE)
MICRO = [wild for wild in SCRIPTS if wild.runs == "micro"]
FULL = [wild for wild in SCRIPTS if wild.runs == "debian"]


def compare(node, wild, *vm):
    """Run the script on bare metal and in a guest; both have to end and write alike."""
    bare = node.job(wild.content, "-vm", "none", name="wild")
    expected = bare.code, bare.out, LOGIN_SHELL.sub(b"", bare.err)
    guest = node.job(wild.content, *vm, name="wild", timeout=300)
    assert (guest.code, guest.out, guest.err) == expected
    assert bare.out or bare.err or bare.code, "it does nothing that could differ"


@pytest.mark.parametrize("wild", [w for w in MICRO if w.name in SHORT], ids=lambda wild: wild.name)
def test_a_script_in_a_guest(clean, wild):
    compare(clean, wild)


@pytest.mark.full
@pytest.mark.parametrize(
    "wild", [w for w in MICRO if w.name not in SHORT], ids=lambda wild: wild.name
)
def test_every_script_in_a_guest(clean, wild):
    compare(clean, wild)


@pytest.fixture(scope="module")
def debian(node):
    """Have the image in the pool; built once, a minute and a half."""
    if node.root("vmgr", "images", "show", "debian", check=False).returncode:
        node.root("vmgr", "images", "build", "debian", "debian", timeout=600)


@pytest.mark.full
@pytest.mark.parametrize("wild", FULL, ids=lambda wild: wild.name)
def test_every_script_of_other_interpreters_in_a_debian_guest(debian, clean, wild):
    compare(clean, wild, *DEBIAN)
