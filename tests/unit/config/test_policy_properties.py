"""Policy is total: any request under any valid site is accepted or refused, in one line."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_core.api import vm_options
from vtorque_core.api.values import FileData
from vtorque_core.base.errors import ConfigError, Refused
from vtorque_core.config.option_limits import effective_default, refusal
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide
from vtorque_core.config.request import Request, make_request, merge_pairs
from vtorque_core.config.site_config import build, problems
from vtorque_core.config.site_file import Raw
from vtorque_core.config.values import convert

PLUGINS = Plugins()
PLUGINS.register("core", vm_options, "vtorque-core")
OPTIONS = PLUGINS.options()
EMPTY = build(Raw(Path("/x")), PLUGINS)

keys = st.sampled_from(sorted(OPTIONS)) | st.text(max_size=12)
GOOD = {
    "ram": ["1G", "512M", "2", "1025M"],
    "vcpus": ["1", "2", "64"],
    "vms_per_node": ["1", "2"],
    "keep": ["true", "no"],
    "fs_type": ["ramdisk", "sharedfs"],
    "img": ["micro", "deb-12"],
    "disk": ["/data/x.raw"],
}
pairs = st.sampled_from([(key, value) for key, words in GOOD.items() for value in words])
plausible = pairs.map(lambda p: p[1]) | st.sampled_from(["0", "x86_64", "/a/../b", "*", "[", "d*"])
values = plausible | st.text(max_size=40)
files = st.dictionaries(
    keys, st.builds(FileData, st.text(max_size=9), st.binary(max_size=9)), max_size=2
)
fitting = st.lists(pairs, max_size=4, unique_by=lambda p: p[0])
anything = st.lists(st.tuples(keys, values), max_size=6)
requests = st.builds(Request, fitting.map(tuple), st.just({})) | st.builds(
    Request, (fitting | anything).map(tuple), files, st.none() | values
)
bounds = plausible | st.integers(0, 5000) | st.booleans()
tables = st.fixed_dictionaries(
    {},
    optional={
        "default": bounds,
        "min": bounds,
        "max": bounds,
        "allow": st.lists(bounds, max_size=4),
        "deny": st.lists(bounds, max_size=2),
    },
)
usual = st.sampled_from(
    [
        ("ram", {"max": "1G"}),
        ("ram", {"min": 1024, "max": "1G"}),
        ("vcpus", {"allow": [1, "6*"]}),
        ("keep", {"deny": [True]}),
        ("img", {"allow": ["deb-*"], "default": "deb-12"}),
        ("disk", {"deny": ["/data/*"]}),
        ("vm_prologue", {"deny": ["*"]}),
    ]
)
policies = st.dictionaries(st.sampled_from(sorted(OPTIONS)), tables, max_size=4) | st.lists(
    usual, max_size=5
).map(dict)


def valid_site(policy):
    """Return the site with those tables of ``policy`` that are valid."""
    good = {
        key: table
        for key, table in policy.items()
        if not problems(Raw(Path("/x"), "", {"options": {key: table}}), PLUGINS)
    }
    return build(Raw(Path("/x"), "", {"options": good}), PLUGINS)


@settings(deadline=None)
@given(requests, policies)
def test_any_request_is_decided_or_refused(request, policy):
    site = valid_site(policy)
    try:
        job = decide(request, site, PLUGINS)
    except Refused as error:
        assert error.refusals
        assert str(error).isprintable()
        return
    assert set(job.values) == set(OPTIONS)
    asked = [key for key, _ in request.pairs] + list(request.files)
    assert sorted(job.given) == sorted(asked)
    for key, value in job.values.items():
        option, limits = OPTIONS[key], site.options[key]
        if key in job.of_job:  # now a number, and one that the site allows
            assert value > 0 and refusal(option, limits, value, option.show(value), str) is None
        elif key in job.given:
            assert refusal(option, limits, value, "", str) is None
        else:
            assert value == effective_default(option, limits)


@settings(deadline=None)
@given(policies)
def test_empty_request_is_never_refused(policy):
    assert not decide(Request(), valid_site(policy), PLUGINS).given


@settings(deadline=None)
@given(requests, policies)
def test_encoded_request_is_decided_as_the_original(request, policy):
    """The request that travels to the node gets the same answer there."""
    site = valid_site(policy)
    try:
        arrived = Request.decode(request.encode())
    except Refused:
        return
    answers = []
    for one in (request, arrived):
        try:
            answers.append(decide(one, site, PLUGINS))
        except Refused as error:
            answers.append(error.refusals)
    assert answers[0] == answers[1]


@settings(deadline=None)
@given(st.sampled_from(sorted(k for k, o in OPTIONS.items() if not o.is_file)), values)
def test_shown_values_read_back(key, text):
    option = OPTIONS[key]
    try:
        value = option.parse(text)
    except ValueError:
        return
    assert option.parse(option.show(value)) == value


@settings(deadline=None)
@given(st.lists(values | st.tuples(keys, values).map("=".join), max_size=4))
def test_any_command_line_is_read_or_refused(arguments):
    try:
        pairs = merge_pairs(arguments)
        if pairs is not None:
            plain = [(k, v) for k, v in pairs if k not in ("vm_prologue", "vm_epilogue")]
            decide(make_request(plain, OPTIONS), EMPTY, PLUGINS)
    except Refused as error:
        assert str(error).isprintable()


toml = st.recursive(
    st.booleans() | st.integers() | st.floats() | values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["batch", "paths", "node", "images", "network", "shares", "plugins", "options", "plugin"]
)
node_keys = st.sampled_from(
    ["accel", "grace", "qemu_overhead", "subnet", "dns", "enable", "source", "target", "ram", "min"]
)


@settings(deadline=None)
@given(st.dictionaries(names, toml | st.dictionaries(node_keys, toml, max_size=3), max_size=3))
def test_any_config_is_built_or_an_error(data):
    try:
        build(Raw(Path("/x"), "", data), PLUGINS, node=True)
    except ConfigError as error:
        assert str(error).startswith("/x: [")
        assert str(error).isprintable()


@given(st.sampled_from([bool, int, float, str, Path, tuple[str, ...], dict[str, int]]), toml)
def test_conversion_returns_the_type_or_raises_value_error(kind, value):
    try:
        result = convert(kind, value)
    except ValueError:
        return
    assert isinstance(result, getattr(kind, "__origin__", kind))
