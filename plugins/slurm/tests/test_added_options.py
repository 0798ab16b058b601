"""What a site's constraint makes of a user's."""

import pytest

from vtorque_core.api.batch_system import Needs
from vtorque_slurm import options
from vtorque_slurm.added_options import additions, constraint
from vtorque_slurm.resources import Given


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


@pytest.mark.parametrize(("mib", "added"), [(1280, ["--mem=1280M"]), (None, [])])
def test_memory_is_asked_for_unless_guests_have_what_such_a_job_has(mib, added):
    given = Given(options.split(["-c", "8", "job.sh"], ()), {})
    found = additions(given, Needs(8, mib), "word", "")
    assert found == ["--comment=word", *added]
