"""Merging domain elements: order does not matter, disagreement is named."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api.libvirt_domain import (
    Channel,
    Clock,
    Disk,
    Filesystem,
    Interface,
    KernelBoot,
    ListElement,
    MemoryBacking,
    MetadataEntry,
    Single,
    forbidden,
)
from vtorque_core.base.errors import Conflict, Refused
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge

MAC = "52:54:00:00:00:01"


def by(plugin: str, element: Any) -> Contributed:
    return Contributed(plugin, f"vtorque-{plugin} 1.0", element)


def test_elements_say_what_they_forbid():
    share = Filesystem("f", "/s", "t")
    elements = [share, MetadataEntry("a", "b"), replace(share, name="g")]
    assert forbidden("migrate", elements) == ["Filesystem"] == forbidden("save", elements)
    assert forbidden("suspend", elements) == []


def test_list_elements_append_core_first_then_by_plugin() -> None:
    merged = merge(
        [
            by("zeta", Disk("a", "/a", "raw")),
            by("beta", Disk("d", "/d", "raw")),
            by("beta", Disk("b", "/b", "raw")),
            by("core", Disk("root", "/root", "raw")),
        ]
    )
    assert list(merged.aliases(Disk)) == ["ua-core-root", "ua-beta-d", "ua-beta-b", "ua-zeta-a"]
    assert [i.number for i in merged.items] == [0, 1, 2, 3]


def test_all_orders_of_single_elements_give_one_result() -> None:
    given_ = [
        by("linux-guest", MemoryBacking(source="memfd", shared=True)),
        by("pinning", MemoryBacking(hugepages_kib=2048)),
        by("scam", MemoryBacking(nosharepages=True)),
        by("vrdma", MemoryBacking(locked=True, source="memfd")),
    ]
    results = {merge(order) for order in itertools.permutations(given_)}
    assert len(results) == 1
    assert results.pop().single(MemoryBacking) == MemoryBacking("memfd", True, True, 2048, True)


opinions = st.builds(
    MemoryBacking,
    source=st.sampled_from([None, "memfd", "file"]),
    shared=st.sampled_from([None, True, False]),
    hugepages_kib=st.sampled_from([None, 2048]),
)


@given(st.lists(opinions, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_order_never_matters_nor_does_it_hide_a_conflict(
    backings: list[MemoryBacking], random: Any
) -> None:
    contributions = [by(f"p{n}", backing) for n, backing in enumerate(backings)]
    shuffled = list(contributions)
    random.shuffle(shuffled)

    def result(order: list[Contributed]) -> MergedDomain | str:
        try:
            return merge(order)
        except Conflict as error:
            return str(error)

    outcome = result(contributions)
    assert result(shuffled) == outcome
    for field in ("source", "shared", "hugepages_kib"):
        said = {getattr(b, field) for b in backings} - {None}
        if len(said) > 1:
            assert isinstance(outcome, str)
        elif isinstance(outcome, MergedDomain):
            merged = outcome.single(MemoryBacking)
            assert getattr(merged, field) == (said.pop() if said else None)


def test_a_conflict_names_plugins_distributions_field_and_values() -> None:
    with pytest.raises(Conflict) as caught:
        merge([by("b", Clock(hpet=True)), by("a", Clock(hpet=False))])
    assert str(caught.value) == (
        "Clock.hpet: plugin a (vtorque-a 1.0) wants False, plugin b (vtorque-b 1.0) wants True; "
        "a job can have only one of them"
    )


def test_zero_and_false_are_opinions_and_different_ones() -> None:
    @dataclass(frozen=True)
    class Knob(Single):
        template: ClassVar[str] = "x:y"
        value: Any = None

    with pytest.raises(Conflict):
        merge([by("a", Knob(0)), by("b", Knob(False))])


def test_virtiofs_needs_shared_memory_and_says_so() -> None:
    share = by("linux-guest", Filesystem("home", "/home/u", "home"))
    assert merge([share]).single(MemoryBacking) == MemoryBacking(source="memfd", shared=True)
    with pytest.raises(Conflict, match=r"virtiofs.*plugin acme \(vtorque-acme 1.0\) wants 'file'"):
        merge([share, by("acme", MemoryBacking(source="file"))])


def test_without_virtiofs_memory_is_left_alone() -> None:
    assert merge([by("core", KernelBoot(kernel="/k"))]).single(MemoryBacking) is None


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (Disk("a", "/same", "raw"), Disk("b", "/same", "raw"), "path '/same'"),
        (Disk("a", "/1", "raw", serial="s"), Disk("b", "/2", "raw", serial="s"), "serial 's'"),
        (Disk("a", "/1", "raw", boot=1), Disk("b", "/2", "raw", boot=1), "boot 1"),
        (Filesystem("a", "/1", "home"), Filesystem("b", "/2", "home"), "tag 'home'"),
        (Channel("a", "p", "/1"), Channel("b", "p", "/2"), "port 'p'"),
        (Channel("a", "p", "/1"), Channel("b", "q", "/1"), "path '/1'"),
        (MetadataEntry("same", "1"), MetadataEntry("same", "2"), "name 'same'"),
        (
            Interface("a", "network", "n", MAC.upper()),
            Interface("b", "network", "n", MAC),
            f"mac '{MAC}'",
        ),
    ],
)
def test_what_a_guest_can_have_only_once(one: ListElement, other: ListElement, what: str) -> None:
    for order in ((by("p", one), by("q", other)), (by("q", other), by("p", one))):
        with pytest.raises(Conflict) as caught:
            merge(order)
        assert what in str(caught.value)
        assert "both plugin p (vtorque-p 1.0) and plugin q (vtorque-q 1.0)" in str(caught.value)


def test_one_plugin_naming_two_things_alike() -> None:
    with pytest.raises(Conflict, match=r"ua-p-x is provided by plugin p \(vtorque-p 1.0\) twice"):
        merge([by("p", Disk("x", "/1", "raw")), by("p", Channel("x", "port", "/2"))])


def test_two_plugins_whose_aliases_meet() -> None:
    with pytest.raises(Conflict, match=r"ua-a-b-c is provided by both"):
        merge([by("a-b", Disk("c", "/1", "raw")), by("a", Disk("b-c", "/2", "raw"))])


@pytest.mark.parametrize("name", ["", "a b", "x'y", "a\n", "ä", "a/b", "x" * 200])
def test_a_bad_name_is_refused_with_its_plugin(name: str) -> None:
    with pytest.raises(Refused, match=r"plugin p \(vtorque-p 1.0\)"):
        merge([by("p", Disk(name, "/1", "raw"))])


@pytest.mark.parametrize("thing", [None, "<disk/>", 3, {"name": "x"}, Disk])
def test_what_is_no_element_is_refused_with_its_plugin(thing: Any) -> None:
    with pytest.raises(Refused, match=r"plugin p \(vtorque-p 1.0\) returned"):
        merge([by("p", thing)])


def test_a_user_file_is_never_qcow2() -> None:
    with pytest.raises(ValueError, match="must be raw"):
        Disk("data", "/home/u/disk", "qcow2", user_owned=True)
    with pytest.raises(ValueError, match="only a qcow2"):
        Disk("root", "/x", "raw", base="/y")
