"""Experiment files: syntax, errors, and the resulting points."""

import contextlib
import copy
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_core.api import Refused
from vtorque_experiment import definition, matrix, schema

WHOLE = """
title = "Does it scale?"
script = "job.sh"
repetitions = 3
seed = 7
exit_codes = [0, 4]
report = true
batch = ["-l", "walltime=1:00:00"]
vm.img = "micro"
env.OMP_NUM_THREADS = 2
matrix.bare = [true, false]
matrix.vm.vcpus = [1, 2]
matrix.env.SIZE = [1000, 4000]
matrix.batch.queue = ["-q short", "-q long"]
exclude = [{"vm.vcpus" = 1, "env.SIZE" = 4000}]
[take]
triad = {pattern = 'Triad: ([0-9.]+)', unit = "MB/s", better = "more"}
loss = {metric = "loss"}
time = {json = "result.time", file = "out.json", which = "min"}
cpu = {report = "total.cpu"}
[limits]
jobs = 8
hours = 2.5
"""


def of(text):
    return definition.parse_definition(tomllib.loads(text), "e.toml")


def why(text):
    with pytest.raises(Refused) as found:
        of(text)
    return str(found.value)


def test_complete_definition_is_parsed():
    found = of(WHOLE)
    assert found.scripts == ("job.sh",) and found.exit_codes == (0, 4) and found.limits.jobs == 8
    assert [take.name for take in found.takes] == ["triad", "loss", "time", "cpu"]
    assert list(found.matrix) == ["bare", "vm.vcpus", "batch.queue", "env.SIZE"]


def test_bare_metal_has_no_vm_axis():
    cells = matrix.cells(of(WHOLE))
    bare = [cell for cell in cells if cell["bare"]]
    assert len(bare) == 4 and not any("vm.vcpus" in cell for cell in bare)
    assert len(cells) == 4 + 6  # (1, 4000) is left out in both queues
    assert matrix.label(bare[0]) == "bare queue=-q short SIZE=1000"


def test_empty_value_omits_the_key():
    text = 'script = "a"\nmatrix.bare = [true, false]\nmatrix.vm.iocm = ["", true]'
    assert matrix.cells(of(text)) == [
        {"bare": True},
        {"bare": False},
        {"bare": False, "vm.iocm": True},
    ]


def test_each_repetition_has_all_combinations_in_random_order():
    points = list(matrix.order_points(10, 4, 3))
    assert [point.number for point in points] == list(range(1, 41))
    blocks = [[p.cell for p in points if p.repetition == r] for r in range(4)]
    assert all(sorted(block) == list(range(10)) for block in blocks)
    assert len({tuple(block) for block in blocks}) == 4
    assert points == list(matrix.order_points(10, 4, 3)) != list(matrix.order_points(10, 4, 4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'the job script is missing (set by e.toml); add script = "job.sh"'),
        ('scrpt = "a"', 'scrpt="a": there is no such key (set by e.toml); did you mean script?'),
        ('script = "a"\nmatrix.vm.ram = []', "matrix.vm.ram=[]: it has less than 1 item (set by"),
        ('script = "a"\nrepetitions = 0', "repetitions=0: it is less than the minimum of 1 (set"),
        ('script = "a"\nrepetitions = "x"', 'repetitions="x": it is not of type "integer"'),
        ('script = "a"\nlimits.hours = "2h"', "(set by e.toml); Hours, a number: 2, or 0.5 for"),
        ('script = "a"\nmatrix.bare = true', "(set by e.toml); write [true]"),
        ('script = "a"\nmatrix.env.A = "b"', '(set by e.toml); write ["b"]'),
        ('script = "a"\nmatrix.vcpus = [1]', "(set by e.toml); did you mean vm.vcpus?"),
        ('script = "a"\nmatrix.SIZE = [1]', "(set by e.toml); did you mean env.SIZE?"),
        ('script = "a"\nmatrix.bear = [true]', "(set by e.toml); did you mean bare?"),
        ('script = "a"\nmatrix."vm.ram" = [1]', "(set by e.toml); known: bare, batch, env"),
        ('script = "a"\nbare = [true]', "(set by e.toml); did you mean matrix.bare?"),
        ('script = "a"\njobs = 2', "(set by e.toml); did you mean limits.jobs?"),
        ('script = "a"\nlimits.poll = 1', "limits.poll=1: it is less than the minimum of 10"),
        ('script = "a"\ntake.x = {pattern = "("}', "take.x.pattern=(: is not a regular expression"),
        ('script = "a"\ntake.x = {pattern = "[0-9]+ s"}', "take.x.pattern=[0-9]+ s: has no group"),
        ('script = "a"\ntake.x = {pattern = "(?:[0-9]+)"}', "has no group for the number"),
        ('script = "a"\ntake.x = {metric = "my loss"}', "my loss: names of metrics have no"),
        ('script = "a"\ntake.x = {unit = "s"}', "needs exactly one of pattern, json, metric"),
        ('script = "a"\ntake.wall = {metric = "x"}', "is a number that every point has"),
        ('script = "a"\ntake.x = {report = "x"}', "needs the job's report, which is not kept"),
        ('script = "a"\ntake.x = {json = "x", file = "../y"}', "is outside the point's directory"),
        ('script = "a"\nexclude = [{"env.A" = 1}]', "exclude=env.A: is not an axis of the matrix"),
        ('script = "a"\nvm.ram = "1,keep=true"', "contains a comma or newline"),
        ('script = "a"\nenv.A = 1\nmatrix.env.A = [1]', "env.A=1: is also set in the matrix"),
        ('script = "a"\nmatrix.env."A B" = [1]', "a name in [matrix.env]"),
        ('script = "a"\nmatrix.env.A = [1, 1]', "matrix.env.A=[1, 1]: it has non-unique elements"),
        ('script = "a"\ntitle = 2026-01-01', "Unsupported type: 'date' (set by e.toml); write it"),
        ('script = "a"\nmatrix.script = ["b"]', "script=a: is set twice"),
    ],
)  # fmt: skip
def test_invalid_definition_is_refused_with_the_reason(text, said):
    assert said in why(text)


def test_missing_or_invalid_toml_file_is_refused(tmp_path):
    with pytest.raises(Refused, match="No such file"):
        definition.read(tmp_path / "e.toml")
    (tmp_path / "e.toml").write_text("a = = b")
    with pytest.raises(Refused, match="is not TOML"):
        definition.read(tmp_path / "e.toml")
    (tmp_path / "e.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="is not TOML"):
        definition.read(tmp_path / "e.toml")


def test_no_points_or_too_many_points_are_refused():
    with pytest.raises(Refused, match="excludes all combinations"):
        matrix.cells(of('script = "a"\nmatrix.env.A = [1]\nexclude = [{"env.A" = 1}]'))
    values = ", ".join(map(str, range(1001)))
    with pytest.raises(Refused, match=r"has too many points \(limit: 1000000"):
        matrix.cells(of(f'script = "a"\nmatrix.env.A = [{values}]\nmatrix.env.B = [{values}]'))


_JSON = st.recursive(
    st.booleans() | st.integers(-3, 300) | st.floats(0, 20) | st.text("aX_. ", max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["vm", "env", "A", "json", "jobs"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
_KEYS = sorted(schema.load_schema()["properties"])


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from([*_KEYS, "x"]), _JSON, max_size=3), st.sampled_from(_KEYS))
def test_any_file_is_parsed_or_refused(changes: dict[str, Any], dropped: str):
    values = copy.deepcopy(tomllib.loads(WHOLE))
    values.pop(dropped, None)
    with contextlib.suppress(Refused):
        found = definition.parse_definition(values | changes, "e.toml")
        assert list(matrix.order_points(2, found.repetitions, found.seed or 0))


def test_whole_number_may_have_a_decimal_point():
    """JSON Schema (draft 2020-12, 4.2.3), and so editors, take such a number as an integer."""
    found = of('script = "a"\nrepetitions = 2.0\nlimits.jobs = 3.0\nseed = 7.0\nexit_codes = [1.0]')
    numbers = [found.repetitions, found.limits.jobs, found.seed, *found.exit_codes]
    assert numbers == [2, 3, 7, 1] and all(type(each) is int for each in numbers)
