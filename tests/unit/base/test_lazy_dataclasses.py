"""Dataclasses whose methods are compiled later."""

import dataclasses
import sys

import pytest

from vtorque_core.base import lazy_dataclasses


@dataclasses.dataclass(frozen=True)
class Plain:
    name: str
    sizes: tuple[int, ...] = ()


@pytest.fixture
def lazily(monkeypatch):
    """Give the decorator with deferred methods, and a list of the methods that were compiled."""
    if not hasattr(dataclasses, "_create_fn"):
        pytest.skip(f"Python {sys.version_info.minor} compiles all methods at once")
    compiled = []
    create = dataclasses._create_fn

    def counted(name, *args, **how):
        compiled.append(name)
        return create(name, *args, **how)

    monkeypatch.setattr(dataclasses, "_create_fn", counted)
    lazy_dataclasses.defer()
    return compiled


def test_defer_compiles_only_called_methods(lazily):
    @dataclasses.dataclass(frozen=True)
    class Guest:
        name: str

    assert lazily == []
    assert [Guest("a").name, Guest("b").name] == ["a", "b"]
    assert lazily == ["__init__"]


def test_defer_keeps_what_methods_do(lazily):
    @dataclasses.dataclass
    class Guest:
        name: str

    @dataclasses.dataclass(order=True)
    class Later(Guest):
        size: int = dataclasses.field(default=1, kw_only=True)

    one, other = Later("a", size=2), Later("b")
    assert one < other
    assert dataclasses.astuple(dataclasses.replace(other, size=5)) == ("b", 5)
    assert repr(one).endswith("Later(name='a', size=2)")


def test_defer_keeps_frozen_equality_hash_and_errors(lazily):
    @dataclasses.dataclass(frozen=True)
    class Guest:
        name: str
        sizes: tuple[int, ...] = ()

    one = Guest("a", (1,))
    assert one == Guest("a", (1,))
    assert one != Plain("a", (1,))
    assert len({one, Guest("a", (1,)), Guest("b")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"):
        one.name = "b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.name
    with pytest.raises(TypeError, match=r"Guest\.__init__\(\) missing 1 required .* 'name'"):
        Guest()
    with pytest.raises(TypeError, match=r"Guest\.__init__\(\) got an unexpected keyword"):
        Guest("a", colour="red")


def test_defer_does_not_change_earlier_classes(lazily):
    assert repr(dataclasses.replace(Plain("a"), name="b")) == "Plain(name='b', sizes=())"
    assert lazily == []
