"""Lists of nodes, and refused settings."""

import pytest

from vtorque_pool.hostlist import expand
from vtorque_pool.settings import MachineShape, Settings


def test_list_is_expanded_as_by_slurm():
    assert expand("a[1-3],b,c[08-10,2]") == ("a1", "a2", "a3", "b", "c08", "c09", "c10", "c2")


@pytest.mark.parametrize("text", ["", "a[", "a[2-1]", "a[1-99999]", "a b", "a,$(id)", "a[1]]", "é"])
def test_invalid_list_is_refused(text):
    with pytest.raises(ValueError, match=r"not a list|not a range|empty|more than"):
        expand(text)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (
            [MachineShape("a", "n[1-2]", "x"), MachineShape("b", "n[2-3]", "x")],
            "node n2 belongs to two shapes, a and b",
        ),
        ([MachineShape("a", "n1", "y")], r"\[plugin.pool.clouds.y\] is missing"),
        ([MachineShape("a", "n1", "x"), MachineShape("a", "n2", "x")], "same name"),
    ],
)
def test_contradicting_settings_are_refused(shapes, problem):
    with pytest.raises(ValueError, match=problem):
        Settings("test", tuple(shapes), {"x": {"driver": "static"}})


def test_invalid_shape_is_named():
    for more in ({"min_nodes": 3}, {"cpus": 0}, {"price": -1.0}):
        with pytest.raises(ValueError, match="shape a"):
            MachineShape("a", "n[1-2]", "x", **more)
    with pytest.raises(ValueError, match="driver"):
        Settings("test", (), {"x": {}})
