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
    find_forbidding,
)
from vtorque_core.base.errors import Conflict, Refused
from vtorque_core.plan.domain.merge import Contributed, MergedDomain, merge

MAC = "52:54:00:00:00:01"


def by(plugin: str, element: Any) -> Contributed:
    return Contributed(plugin, f"vtorque-{plugin} 1.0", element)


def test_elements_forbid_save_or_migrate():
    share = Filesystem("f", "/s", "t")
    elements = [share, MetadataEntry("a", "b"), replace(share, name="g")]
    assert (
        find_forbidding("migrate", elements) == ["Filesystem"] == find_forbidding("save", elements)
    )
    assert find_forbidding("suspend", elements) == []


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


def test_order_of_single_elements_does_not_matter() -> None:
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
def test_order_of_opinions_neither_matters_nor_hides_a_conflict(
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


def test_conflict_names_plugins_distributions_field_and_values() -> None:
    with pytest.raises(Conflict) as caught:
        merge([by("b", Clock(hpet=True)), by("a", Clock(hpet=False))])
    assert str(caught.value) == (
        "Clock.hpet: plugin a (vtorque-a 1.0) wants False, plugin b (vtorque-b 1.0) wants True; "
        "a job can have only one value"
    )


def test_values_zero_and_false_conflict() -> None:
    @dataclass(frozen=True)
    class Knob(Single):
        template: ClassVar[str] = "x:y"
        value: Any = None

    with pytest.raises(Conflict):
        merge([by("a", Knob(0)), by("b", Knob(False))])


def test_virtiofs_requires_shared_memory() -> None:
    share = by("linux-guest", Filesystem("home", "/home/u", "home"))
    assert merge([share]).single(MemoryBacking) == MemoryBacking(source="memfd", shared=True)
    with pytest.raises(Conflict, match=r"virtiofs.*plugin acme \(vtorque-acme 1.0\) wants 'file'"):
        merge([share, by("acme", MemoryBacking(source="file"))])


def test_memory_backing_is_unset_without_virtiofs() -> None:
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
def test_unique_value_of_two_plugins_is_a_conflict(
    one: ListElement, other: ListElement, what: str
) -> None:
    for order in ((by("p", one), by("q", other)), (by("q", other), by("p", one))):
        with pytest.raises(Conflict) as caught:
            merge(order)
        assert what in str(caught.value)
        assert "both plugin p (vtorque-p 1.0) and plugin q (vtorque-q 1.0)" in str(caught.value)


def test_same_name_twice_in_one_plugin_is_a_conflict() -> None:
    with pytest.raises(Conflict, match=r"ua-p-x is provided by plugin p \(vtorque-p 1.0\) twice"):
        merge([by("p", Disk("x", "/1", "raw")), by("p", Channel("x", "port", "/2"))])


def test_same_alias_of_two_plugins_is_a_conflict() -> None:
    with pytest.raises(Conflict, match=r"ua-a-b-c is provided by both"):
        merge([by("a-b", Disk("c", "/1", "raw")), by("a", Disk("b-c", "/2", "raw"))])


@pytest.mark.parametrize("name", ["", "a b", "x'y", "a\n", "ä", "a/b", "x" * 200])
def test_invalid_name_is_refused_with_its_plugin(name: str) -> None:
    with pytest.raises(Refused, match=r"plugin p \(vtorque-p 1.0\)"):
        merge([by("p", Disk(name, "/1", "raw"))])


@pytest.mark.parametrize("thing", [None, "<disk/>", 3, {"name": "x"}, Disk])
def test_item_that_is_not_an_element_is_refused_with_its_plugin(thing: Any) -> None:
    with pytest.raises(Refused, match=r"plugin p \(vtorque-p 1.0\) returned"):
        merge([by("p", thing)])


def test_user_file_is_never_qcow2() -> None:
    with pytest.raises(ValueError, match="must be raw"):
        Disk("data", "/home/u/disk", "qcow2", user_owned=True)
    with pytest.raises(ValueError, match="raw file cannot have a backing"):
        Disk("root", "/x", "raw", base="/y")
