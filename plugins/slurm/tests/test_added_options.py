"""Options that are added to those of a user."""

import pytest

from vtorque_core.api.batch_system import Needs
from vtorque_slurm import options
from vtorque_slurm.added_options import additions, constraint
from vtorque_slurm.resources import SlurmRequest
from vtorque_slurm.settings import Settings


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (None, "vt"), ("", "vt"), ("a", "a&vt"), ("a&b", "a&b&vt"), ("a|b", "(a|b)&vt"),
        ("[a|b]", "[a|b]&vt"), ("(a|b)&c", "(a|b)&c&vt"), ("a*2&b", "a*2&b&vt"),
        ("(a&b)|c", "((a&b)|c)&vt"),
    ],
)  # fmt: skip
def test_constraint_of_the_user_is_kept(own, merged):
    assert constraint(own, "vt") == merged


@pytest.mark.parametrize(("mib", "added"), [(1280, ["--mem=1280M"]), (None, [])])
def test_memory_is_requested_unless_guests_use_the_allocation(mib, added):
    given = SlurmRequest(options.split(["-c", "8", "job.sh"], ()), {})
    found = additions(given, Needs(8, mib), "word", Settings())
    assert found == ["--comment=word", *added]


@pytest.mark.parametrize(
    ("site", "args", "added"),
    [
        ("", [], []),
        ("user", [], ["--exclusive=user"]),
        ("node", [], ["--exclusive"]),
        ("user", ["--exclusive"], []),
        ("node", ["--exclusive=user"], []),
        ("user", ["-s"], []),
    ],
)
def test_exclusive_setting_is_added_unless_the_user_sets_it(site, args, added):
    given = SlurmRequest(options.split(["-c", "8", *args, "job.sh"], ()), {})
    found = additions(given, Needs(8, None), "word", Settings(exclusive=site))
    assert found == ["--comment=word", *added]
