"""Texts of vTorque's exceptions."""

from vtorque_core.base.errors import Refusal, Refused


def test_refused_with_a_message_and_parts_equals_refused_with_a_refusal():
    parts = {"key": "ram", "value": "900G", "limit": "8G", "where": "[node]", "fix": "ask for less"}
    given = Refused(Refusal("is too much", **parts))
    assert Refused("is too much", **parts).refusals == given.refusals
    assert str(given) == "ram=900G: is too much (limit: 8G, set by [node]); ask for less"


def test_refused_joins_messages_and_refusals():
    both = Refused("no image", Refusal("is given twice", key="ram", value="1G"))
    assert str(both) == "no image; ram=1G: is given twice"
