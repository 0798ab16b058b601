"""What a site's constraint makes of a user's."""

import pytest

from vtorque_slurm.added_options import constraint


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (None, "vt"), ("", "vt"), ("a", "a&vt"), ("a&b", "a&b&vt"), ("a|b", "(a|b)&vt"),
        ("[a|b]", "[a|b]&vt"), ("(a|b)&c", "(a|b)&c&vt"), ("a*2&b", "a*2&b&vt"),
        ("(a&b)|c", "((a&b)|c)&vt"),
    ],
)  # fmt: skip
def test_the_users_own_constraint_stays(own, merged):
    assert constraint(own, "vt") == merged
