"""Values of a job, or its refusals, for requests and sites written by hand."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from vtorque_admin.example import example
from vtorque_core.api import vm_options
from vtorque_core.api.values import Extra, FileData, Option, hookimpl
from vtorque_core.api.vm_options import ARCH, DISK, IMG, KEEP, RAM, VCPUS, VM_PROLOGUE
from vtorque_core.base.errors import ConfigError, Refusal, Refused
from vtorque_core.base.settings import setting
from vtorque_core.base.sizes import BOOLEAN_WORDS, boolean, count
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import check_options, check_share, decide, needs
from vtorque_core.config.request import Request, make_request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml

FILE = Path("/etc/vtorque/vtorque.toml")
SCRIPT = FileData("pre.sh", b"#!/bin/sh\n")
FPGA = Option("fpga", count, 0, "cards")
SITE = """
[options.ram]
default = "2G"
min = "512M"
max = "4G"
[options.img]
default = "micro"
allow = ["micro", "deb-*"]
deny = ["deb-old*"]
[options.keep]
deny = [true]
[options.vcpus]
allow = [1, 2, 4]
[options.disk]
allow = ["/data/*"]
[options.vm_epilogue]
deny = ["*"]
"""


def hook(name, function):
    function.__name__ = name
    return hookimpl(function)


def module(**hooks):
    made = types.ModuleType("fake")
    for name, function in hooks.items():
        setattr(made, name, hook(name, function))
    return made


@pytest.fixture
def plugins():
    loaded = Plugins()
    loaded.register("core", vm_options, "vtorque-core")
    loaded.register("acme", module(vtorque_options=lambda: [FPGA]), "vtorque-acme 1.0.0")
    return loaded


def decision(plugins, *pairs, site=SITE, **files):
    request = Request(tuple(p.split("=", 1) for p in pairs), files, "/bin/csh")
    return decide(request, build(parse_toml(site.encode(), FILE), plugins), plugins)


def refusals(plugins, *pairs, site=SITE, **files):
    with pytest.raises(Refused) as caught:
        decision(plugins, *pairs, site=site, **files)
    assert str(caught.value).isprintable()
    return caught.value.refusals


def test_default_of_the_site_overrides_default_of_the_option(plugins):
    job = decision(plugins)
    assert (job[RAM], job[IMG], job[VCPUS], job[FPGA], job[VM_PROLOGUE]) == (
        2048,
        "micro",
        1,
        0,
        None,
    )
    assert job.given == frozenset() and job.shell == "/bin/csh"
    assert set(job.values) == set(plugins.options())


def test_values_are_typed(plugins):
    job = decision(
        plugins,
        "ram=4096M",
        "img=deb-12",
        "arch=AMD64",
        "disk=/data/u/d.raw",
        "keep=no",
        "fpga=2",
        vm_prologue=SCRIPT,
    )
    assert (job[RAM], job[IMG], job[ARCH], job[FPGA]) == (4096, "deb-12", "x86_64", 2)
    assert (job[DISK], job[KEEP], job[VM_PROLOGUE]) == ("/data/u/d.raw", False, SCRIPT)
    assert job.given == {"ram", "img", "arch", "disk", "keep", "fpga", "vm_prologue"}


@pytest.mark.parametrize(
    ("pair", "limit", "name"),
    [
        ("ram=8G", "4G", "max"),
        ("ram=1M", "512M", "min"),
        ("img=rocky", "micro, deb-*", "allow"),
        ("img=deb-old1", "not deb-old*", "deny"),
        ("keep=on", "not true", "deny"),
        ("vcpus=3", "1, 2, 4", "allow"),
        ("disk=/home/u/d.raw", "/data/*", "allow"),
    ],
)
def test_value_out_of_policy_names_value_limit_and_origin(plugins, pair, limit, name):
    (refusal,) = refusals(plugins, pair)
    key, value = pair.split("=")
    assert (refusal.key, refusal.value, refusal.limit) == (key, value, limit)
    assert refusal.where == f"[options.{key}] {name} in {FILE}"
    assert str(refusal).startswith(f"{pair}: is ")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("ram=much", "is not a size"),
        ("ram=0", "is not a whole number of MiB"),
        ("vcpus=0", "is not between 1 and 1024"),
        ("vcpus=99999", "is not between 1 and 1024"),
        ("vms_per_node=65", "is not between 1 and 64"),
        ("keep=1", "is ambiguous"),
        ("fs_type=nfs", "is not a file system type: write one of sharedfs, ramdisk"),
        ("arch=pdp11", "is not an architecture"),
        ("img=/root/x.img", "is not allowed"),
        ("img=../x", "is not allowed"),
        ("img=-x", "is not a name"),
        ("img=a'b", "is not a name"),
        ("img=<a>", "is not a name"),
        ("img=a\n", "is not a name"),
        ("distro=$(id)", "is not a name"),
        ("disk=d.raw", "is not an absolute path"),
        ("disk=/data/../etc/shadow", "contains '..'"),
        ("disk=/data/", "is a directory"),
        ("disk=/data/a\nb", "control character"),
        ("disk=/" + "a" * 2000, "more than 1024 bytes"),
    ],
)
def test_invalid_values_are_refused(plugins, pair, message):
    (refusal,) = refusals(plugins, pair)
    assert message in refusal.message and refusal.key == pair.split("=")[0]


def test_all_refusals_are_reported_together(plugins):
    found = refusals(plugins, "ram=8G", "vcpu=1", "img=rocky", "ram=1G", vm_epilogue=SCRIPT)
    assert [r.key for r in found] == ["ram", "vcpu", "img", "ram", "vm_epilogue"]
    assert found[1].fix == "did you mean vcpus?"
    assert found[3].message == "is given twice"
    assert found[4].where == f"[options.vm_epilogue] deny in {FILE}"


def test_file_for_a_text_option_and_text_for_a_file_option_are_refused(plugins):
    (refusal,) = refusals(plugins, "vm_prologue=/etc/shadow")
    assert "must be the content of a file, not its name" in refusal.message
    (refusal,) = refusals(plugins, ram=SCRIPT)
    assert "must be text, not a file" in refusal.message
    (refusal,) = refusals(plugins, nothing=SCRIPT)
    assert "there is no -vm key" in refusal.message


def test_unknown_keys_are_all_named_with_the_closest_key(plugins):
    request = make_request([("RAM", "1G"), ("vcpu", "2"), ("\x1bzzzzz", "3")], plugins.options())
    with pytest.raises(Refused) as caught:
        check_options(request, build(parse_toml(b""), plugins), plugins)
    first, second, third = map(str, caught.value.refusals)
    assert "RAM=1G: there is no -vm key" in first and "did you mean ram?" in first
    assert "did you mean vcpus?" in second
    assert "known keys: arch, disk," in third and third.isprintable()


def test_unknown_key_names_broken_plugins(plugins):
    plugins.broken["iocm"] = "ImportError"
    (refusal,) = refusals(plugins, "iocm_min=1")
    assert "could not be loaded here: iocm" in refusal.message


def test_key_of_two_plugins_names_both(plugins):
    site = build(parse_toml(b""), plugins)
    plugins.register("other", module(vtorque_options=lambda: [FPGA]), "vtorque-other 2.0.0")
    with pytest.raises(Refused, match=r"vtorque-acme 1\.0\.0 and by vtorque-other 2\.0\.0"):
        decide(Request(), site, plugins)


# -- Misbehaving plugins ---------------------------------------------------------------------------


def test_parse_args_hooks_get_values_and_refuse_together(plugins):
    def first(request):
        assert request[RAM] == 2048
        yield Refusal("is too\nodd", key="fpga", value=str(request[FPGA]))

    def second():
        raise Refused("no fpga today")

    plugins.register("b", module(vtorque_parse_args=first), "vtorque-b 1")
    plugins.register("a", module(vtorque_parse_args=second), "vtorque-a 1")
    assert [str(r) for r in refusals(plugins, "fpga=1")] == [
        "no fpga today",
        r"fpga=1: is too\nodd",
    ]


def test_parse_args_is_not_called_for_values_out_of_policy(plugins):
    def never(request):
        raise AssertionError

    plugins.register("a", module(vtorque_parse_args=never), "vtorque-a 1")
    (refusal,) = refusals(plugins, "ram=8G")
    assert refusal.key == "ram"


def raise_system_exit(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda request: 1 / 0,
            "plugin a (vtorque-a 1) failed in vtorque_parse_args: ZeroDivision",
        ),
        (lambda request: raise_system_exit(), "failed in vtorque_parse_args: SystemExit: 3"),
        (
            lambda request: ["no"],
            "plugin a (vtorque-a 1) failed in vtorque_parse_args: TypeError: returned str instead "
            "of a Refusal",
        ),
        (lambda request: 5, "failed in vtorque_parse_args: TypeError"),
        (lambda request: request.values.clear(), "failed in vtorque_parse_args: AttributeError"),
    ],
)
def test_failing_hook_refuses_the_job_and_is_named(plugins, answer, message):
    plugins.register("a", module(vtorque_parse_args=answer), "vtorque-a 1")
    (refusal,) = refusals(plugins)
    assert message in refusal.message


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def raise_mute(value):
    raise Mute


@pytest.mark.parametrize("parse", [lambda v: 1 / 0, raise_system_exit, raise_mute])
def test_failing_parser_refuses_the_job_and_is_named(plugins, parse):
    option = Option("odd", parse, None, "odd")
    plugins.register("b", module(vtorque_options=lambda: [option]), "vtorque-b 1")
    (refusal,) = refusals(plugins, "odd=1")
    assert refusal.key == "odd" and "plugin b failed to parse it" in refusal.message


def test_failing_show_refuses_the_job(plugins):
    option = Option("odd", str, None, "odd", show=lambda v: 1 / 0)
    plugins.register("b", module(vtorque_options=lambda: [option]), "vtorque-b 1")
    (refusal,) = refusals(plugins, "odd=1", site='[options.odd]\nallow = ["*"]')
    assert "plugin b failed to parse it: ZeroDivisionError" in refusal.message


def test_request_hooks_get_settings_of_declaring_modules(plugins):
    @dataclass(frozen=True)
    class Settings:
        """[plugin.a]"""

        most: int = setting(1, doc="most")

    def parse(request, site):
        if request[FPGA] > site[Settings].most:
            yield Refusal("too many", where="[plugin.a] most")

    def wanted(request, site):
        yield Extra(cpus=site[Settings].most)

    hooks = {"vtorque_parse_args": parse, "vtorque_needs": wanted}
    plugins.register("a", module(vtorque_settings=lambda: [Settings], **hooks), "vtorque-a 1")
    (refusal,) = refusals(plugins, "fpga=3", site="[plugin.a]\nmost = 2\n")
    assert refusal.where == "[plugin.a] most"
    few, many = (needed(plugins, site=f"[plugin.a]\nmost = {n}\n").cpus for n in (1, 5))
    assert many - few == 4


# -- A key for words or a file ---------------------------------------------------------------------

MAP = Option("map", boolean, False, "a word or a file", is_file=True, words=BOOLEAN_WORDS,
             show=lambda v: v.name if isinstance(v, FileData) else str(v).lower())  # fmt: skip


@pytest.fixture
def with_map(plugins):
    plugins.register("m", module(vtorque_options=lambda: [MAP]), "vtorque-m 1")
    return plugins


def test_option_for_word_or_file_accepts_both(with_map):
    assert decision(with_map)[MAP] is False
    assert decision(with_map, "map=Yes")[MAP] is True
    assert decision(with_map, map=SCRIPT)[MAP] == SCRIPT
    (refusal,) = refusals(with_map, "map=/etc/shadow")
    assert "must be the content of a file, not its name" in refusal.message
    (refusal,) = refusals(with_map, "map=1")
    assert "is ambiguous" in refusal.message
    (refusal,) = refusals(with_map, "map=yes", map=SCRIPT)
    assert refusal.message == "is given twice"


def test_option_for_word_or_file_can_be_limited_to_words(with_map):
    site = "[options.map]\ndefault = true\nallow = [true, false]\n"
    assert decision(with_map, site=site)[MAP] is True
    for name in ("pre.sh", "true"):
        (refusal,) = refusals(with_map, site=site, map=FileData(name, b""))
        assert (refusal.limit, refusal.value) == ("true, false", name)
    site = "[options.map]\ndeny = [true]\n"
    assert decision(with_map, site=site, map=SCRIPT)[MAP] == SCRIPT
    (refusal,) = refusals(with_map, "map=on", site=site)
    assert refusal.limit == "not true"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("deny = ['*']", "excludes false, the default of map"),
        ("allow = ['*.sh']", "is not a boolean"),
        ("default = '/x'", "is not a boolean"),
        ("max = true", "makes no sense for a key that is not a number"),
    ],
)
def test_numeric_limits_of_words_and_files_are_config_errors(with_map, text, why):
    with pytest.raises(ConfigError, match=why):
        decision(with_map, site=f"[options.map]\n{text}\n")


def test_default_of_a_word_or_file_option_is_in_the_example_config(with_map):
    assert '[options.map]\n#default = "false"' in example(with_map)


# -- Resources requested from the batch system -----------------------------------------------------


def needed(plugins, *pairs, site="", disk=0):
    made = build(parse_toml(site.encode(), FILE), plugins)
    request = Request(tuple(tuple(pair.split("=", 1)) for pair in pairs))
    return needs(decide(request, made, plugins), made, plugins, disk)


def test_needs_of_plugins_are_added_to_the_requested_resources(plugins):
    site = "[node]\nhost_reserve_cores = 1\nhost_reserve_ram = 100\nqemu_overhead = 10"
    asked = ("vcpus=3", "ram=1000", "vms_per_node=2", "fpga=2")
    before = needed(plugins, *asked, site=site)
    assert (before.cpus, before.mib) == (1 + 2 * 3, 100 + 2 * 1010)
    assert needed(plugins, *asked, site=site, disk=77).mib == before.mib + 2 * 77

    def wanted(request):
        yield Extra(cpus=request[FPGA])
        yield Extra(mib=64 * request[vm_options.VMS_PER_NODE])

    plugins.register("a", module(vtorque_needs=wanted), "vtorque-a 1")
    plugins.register("b", module(vtorque_needs=lambda: [Extra(1, 1)]), "vtorque-b 1")
    after = needed(plugins, *asked, site=site)
    assert (after.cpus - before.cpus, after.mib - before.mib) == (3, 129)


def test_needs_of_several_plugins_for_one_resource_are_summed(plugins):
    def wanted(request):
        yield Extra(resources={"gres/gpu": request[FPGA], "gres/nic": 1}, licenses={"matlab": 1})

    plugins.register("a", module(vtorque_needs=wanted), "vtorque-a 1")
    plugins.register("b", module(vtorque_needs=lambda: [Extra(resources={"gres/gpu": 1})]), "b 1")
    found = needed(plugins, "fpga=2")
    assert dict(found.resources) == {"gres/gpu": 3, "gres/nic": 1}
    assert dict(found.licenses) == {"matlab": 1}
    for name, need in (("gres/gpu", 3), ("matlab", 1)):
        check_share(found, None, None, {name: need})
        with pytest.raises(Refused, match=f"need {need} {name}, but the job requests {need - 1}"):
            check_share(found, None, None, {name: need - 1})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: 1 / 0, r"plugin a \(vtorque-a 1\) failed in vtorque_needs: ZeroDivisionError"),
        (raise_system_exit, "failed in vtorque_needs: SystemExit: 3"),
        (
            lambda: [3],
            r"\(vtorque-a 1\) failed in vtorque_needs: TypeError: returned int instead of an Ex",
        ),
        (lambda: [Extra(cpus=-1)], r"in vtorque_needs: Extra\(cpus=-1, mib=0, own=False, resource"),
        (
            lambda: [Extra(licenses={"matlab": -1})],
            "returned a negative value in vtorque_needs: Extra",
        ),
    ],
)
def test_failed_or_invalid_needs_hook_refuses_the_job(plugins, answer, message):
    plugins.register("a", module(vtorque_needs=answer), "vtorque-a 1")
    with pytest.raises(Refused, match=message):
        needed(plugins)


@pytest.mark.parametrize("value", ["docker://debian:12", "/home/u/image", "oci:layout"])
def test_own_image_without_plugin_for_it_is_refused(plugins, value):
    (found,) = refusals(plugins, f"img={value}", site="")
    assert (found.key, found.value) == ("img", value)
    assert "which this site does not accept" in found.message
