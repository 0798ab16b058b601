"""What is proposed in place of a name that does not exist."""

import pytest

from vtorque_core.api.vm_options import DISTRO, IMG, RAM, VCPUS
from vtorque_core.base.suggest import closest
from vtorque_core.site.request import unknown_key

KEYS = (DISTRO.key, "disk", IMG.key, RAM.key, VCPUS.key, "vrdma")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("rma", ["ram"]),
        ("arm", ["ram"]),
        ("RMA", ["ram"]),
        ("vpcus", ["vcpus"]),
        ("vcpu", ["vcpus"]),
        ("dsik", ["disk"]),
        ("vrmda", ["vrdma"]),
        ("vrdm", ["vrdma"]),
        ("xyz", []),
        ("", []),
        ("r", []),
    ],
)
def test_swapped_letters_come_before_what_is_merely_alike(typo, meant):
    assert closest(typo, KEYS) == meant


def test_case_does_not_matter():
    assert closest("debain12", ["Debian12", "rocky9"]) == ["Debian12"]


def test_several_are_each_named_once_and_the_swapped_first():
    assert closest("rma", [*KEYS, "rmax"], 3) == ["ram", "rmax", "vrdma"]


def test_a_long_name_from_a_stranger_is_cut():
    assert closest("ram" * 100_000, KEYS) == []


def test_a_users_typo_is_answered_with_the_key_that_was_meant():
    assert str(unknown_key("rma", "1G", KEYS)).endswith("did you mean ram?")
