"""``vtorque cluster doctor``: its summary of the answers of many nodes."""

from __future__ import annotations

import json

import pytest

from vtorque_cluster.examined import find_differences
from vtorque_cluster.on_nodes import NodesAnswer
from vtorque_core.api.health import ALIKE


def said(*lines: tuple[str, ...]) -> str:
    keys = ("check", "status", "message", "fix")
    return json.dumps([dict(zip(keys, (*line, ""), strict=False)) for line in lines])


def test_equal_failures_of_nodes_are_merged() -> None:
    full = ("image pool", "failed", "no room", "remove images")
    fine = ("KVM", "ok", "works")
    answers = [
        NodesAnswer("n[1,3]", 2, 1, said(full, fine)),
        NodesAnswer("n2", 1, 1, said(("KVM", "failed", "none"), full)),
        NodesAnswer("n4", 1, 0, said(fine, ("libvirt", "warning", "old"))),
        NodesAnswer("m7", 1, 255, "ssh: no route to host"),
        NodesAnswer("m8", 1, None, ""),
    ]
    assert find_differences(answers) == {
        "image pool: no room\n-> remove images": ["n1", "n3", "n2"],
        "KVM: none": ["n2"],
        "ssh: no route to host": ["m7"],
        "no answer in time": ["m8"],
    }


def test_values_that_must_be_equal_on_all_nodes_are_compared() -> None:
    alike = ("subordinate ids: 2147000000 + uid", "site secret: 00ff")
    others = ("subordinate ids: 2147000000 + uid", "site secret: 1234")
    answers = [
        NodesAnswer(nodes, 2, 0, said(*((ALIKE, "ok", line) for line in lines)))
        for nodes, lines in (("n[1-2]", alike), ("n[3-4]", others))
    ]
    assert find_differences(answers[:1]) == {}
    assert find_differences(answers) == {
        "site secret differs from the other nodes: 00ff": ["n1", "n2"],
        "site secret differs from the other nodes: 1234": ["n3", "n4"],
    }


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"check": 1}]', "{}", "null"])
def test_invalid_answer_is_shown(text: str) -> None:
    found = find_differences([NodesAnswer("n1", 1, 0, text)])
    assert found in ({text or "no output": ["n1"]}, {})
    assert (found == {}) == (text == "{}")
