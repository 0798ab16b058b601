"""Suggestions for a name that does not exist."""

import pytest

from vtorque_core.api.vm_options import DISTRO, IMG, RAM, VCPUS
from vtorque_core.base.suggest import closest_names
from vtorque_core.config.request import unknown_key

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
def test_swapped_letters_come_before_other_similar_names(typo, meant):
    assert closest_names(typo, KEYS) == meant


def test_case_does_not_matter():
    assert closest_names("debain12", ["Debian12", "rocky9"]) == ["Debian12"]


def test_several_suggestions_are_named_once_with_swapped_letters_first():
    assert closest_names("rma", [*KEYS, "rmax"], 3) == ["ram", "rmax", "vrdma"]


def test_long_untrusted_name_is_cut():
    assert closest_names("ram" * 100_000, KEYS) == []


def test_unknown_key_message_suggests_the_similar_key():
    assert str(unknown_key("rma", "1G", KEYS)).endswith("did you mean ram?")
