"""The dataclasses of what ``vsub`` imports behave as the standard ones."""

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compiled
from vtorque_core.base import record


def declare(decorator):
    @decorator
    class Thing:
        """A class with all that ours have."""

        name: str
        size: int = 3
        words: list[str] = field(default_factory=list)
        note: str = field(default="", compare=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("is less than 0")

    return Thing


Ours = declare(record.dataclass(frozen=True))
Standard = declare(dataclasses.dataclass(frozen=True))


@record.dataclass(frozen=True)
class Point:
    """At the top level, since pickle wants that."""

    x: int
    y: Any = None


def outcome(call):
    try:
        made = call()
    except (TypeError, ValueError) as error:
        return type(error)
    return dataclasses.asdict(made), repr(made)


ARGS = st.lists(st.sampled_from(["a", 1, -1]), max_size=5)
GIVEN = st.dictionaries(
    st.sampled_from(["name", "size", "words", "note", "none"]), st.sampled_from([1, -1, 7])
)


@given(ARGS, GIVEN)
def test_it_is_made_shown_and_refused_as_the_standard_one(args, given_):
    def call(cls):
        return lambda: cls(*args, **given_)

    assert outcome(call(Ours)) == outcome(call(Standard))


@pytest.mark.parametrize("cls", [Ours, Standard])
def test_it_is_frozen_compared_and_replaced(cls):
    thing = cls("a")
    for change in (lambda: setattr(thing, "size", 4), lambda: delattr(thing, "size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert thing == cls("a", note="n") != cls("b")
    assert thing != "a"
    assert dataclasses.replace(thing, size=4) == cls("a", 4)
    assert cls.size == 3 and not hasattr(cls, "words")
    assert cls("a").words is not cls("a").words
    with pytest.raises(ValueError, match="less than 0"):
        dataclasses.replace(thing, size=-1)
    match cls("a", 5):
        case cls(name, size):
            assert (name, size) == ("a", 5)


def test_it_is_hashed_copied_and_pickled():
    assert len({Point(1), Point(1), Point(2)}) == 2
    assert pickle.loads(pickle.dumps(Point(1, 2))) == copy.deepcopy(Point(1, 2)) == Point(1, 2)  # noqa: S301


def test_a_standard_one_inherits_from_it():
    @dataclasses.dataclass(frozen=True)
    class Far(Point):
        z: int = 9

    assert Far(1, 2) == Far(1, 2, 9) != Far(1, 2, 8)
    assert [f.name for f in dataclasses.fields(Far)] == ["x", "y", "z"]


def test_there_is_no_other_kind():
    with pytest.raises(TypeError):
        record.dataclass(frozen=False)


def test_it_compiles_no_method():
    methods = compiled.noted()
    declare(record.dataclass(frozen=True))
    assert methods == []
    declare(dataclasses.dataclass(frozen=True))
    assert "__init__" in methods


def test_a_field_is_hashed_as_it_says():
    """What cannot be hashed may be compared all the same; an own __eq__ needs no own __hash__."""

    def hashes(decorator):
        @decorator
        class Claim:  # noqa: PLW1641 - what is tested
            pool: str
            items: dict[str, int] = field(default_factory=dict, hash=False)

            def __eq__(self, other: object) -> bool:
                return self is other

        return hash(Claim("a", {"x": 1})) == hash(Claim("a", {}))

    assert hashes(record.dataclass(frozen=True)) and hashes(dataclasses.dataclass(frozen=True))
