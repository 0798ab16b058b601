"""Limits per user, group and queue: entries that apply to a job, and what vsub may refuse."""

from __future__ import annotations

import os
import pwd
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_admin.example import effective_values
from vtorque_core.api import hooks, vm_options
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.api.strategies import BatchSystem, GuestType
from vtorque_core.api.values import Option, hookimpl
from vtorque_core.api.vm_options import IMG, RAM, VCPUS
from vtorque_core.base.errors import ConfigError, HostFault, Refused
from vtorque_core.base.sizes import count
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide, facts_of_job, facts_of_user, for_job, require_facts
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build, problems
from vtorque_core.config.site_file import parse_toml
from vtorque_jobs.explain import report

FILE = Path("/etc/vtorque/vtorque.toml")
FPGA = Option("fpga", count, 0, "cards")
SITE = """\
batch.system = "played"
[options.vcpus]
max = 4
[options.ram]
deny = ["1G", "3G"]
default = "2G"

[[limits]]
queue = "gpu*"
[limits.options.vcpus]
default = 2
max = 16
[limits.plugins]
acme = false

[[limits]]
queue = ["gpu-big", "cpu"]
group = "chem"
[limits.options]
vcpus = {max = 32}
ram.deny = []
[limits.plugins]
acme = true

[[limits]]
user = "ada"
[limits.options.vcpus]
max = 3
"""


@pytest.fixture
def plugins():
    acme = types.ModuleType("acme")
    acme.called = []

    def needs(request, site):
        acme.called.append(request)
        return []

    needs.__name__ = "vtorque_needs"
    for name, found in {
        "vtorque_options": [FPGA],
        "vtorque_guest_types": [GuestType("odd", frozenset(), None)],
    }.items():
        setattr(acme, name, hookimpl(lambda found=found: found))
    acme.vtorque_needs = hookimpl(needs)
    batch = types.ModuleType("batch")
    system = BatchSystem("played", None, None, None, frozenset({"queue", "account"}))
    batch.vtorque_batch_systems = hookimpl(lambda: [system])
    loaded = Plugins()
    loaded.register("core", vm_options, "vtorque-core")
    loaded.register("acme", acme, "vtorque-acme 1.0.0")
    loaded.register("batch", batch, "vtorque-batch 1.0.0")
    return loaded


def site_of(text, plugins):
    return build(parse_toml(text.encode(), FILE), plugins)


def facts(user="bob", group="users", **more):
    told = {"queue": "", "partition": "", "account": "", "qos": ""} | more
    return {"user": (user,), "group": (group,)} | {name: (value,) for name, value in told.items()}


def most(plugins, text=SITE, **more):
    site, _ = for_job(site_of(text, plugins), plugins, facts(**more))
    return site.options["vcpus"].max


def test_later_entry_wins_for_each_value(plugins):
    assert most(plugins) == 4
    assert most(plugins, queue="gpu-small") == 16
    assert most(plugins, queue="gpu-big") == 16, "an entry applies although the group differs"
    assert most(plugins, queue="gpu-big", group="chem") == 32
    assert most(plugins, queue="cpu", group="chem") == 32
    assert most(plugins, queue="gpu-big", group="chem", user="ada") == 3
    site, _ = for_job(site_of(SITE, plugins), plugins, facts(queue="gpu-big", group="chem"))
    assert (site.options["vcpus"].default, site.options["ram"].default) == (2, 2048)
    assert site.options["ram"].deny == ()


def test_entry_matches_any_group_of_the_user(plugins):
    job = BatchJob("7", "bob", "n1", ("n1",), b"", queue="cpu", account="x")
    user = JobUser("bob", 7, 7, (("users", 7), ("chem", 8)), "/home/bob", "/bin/sh")
    known = facts_of_job(job, user)
    assert known == facts(queue="cpu", account="x") | {"group": ("users", "chem")}
    site, _ = for_job(site_of(SITE, plugins), plugins, known)
    assert site.options["vcpus"].max == 32


def test_facts_of_user_contain_all_groups():
    me = pwd.getpwuid(os.getuid())
    known = facts_of_user()
    assert known["user"] == (me.pw_name,)
    assert len(known["group"]) == len({*os.getgrouplist(me.pw_name, me.pw_gid)})
    with pytest.raises(KeyError):
        facts_of_user("nobody-of-this-name")


def refused(plugins, *pairs, text=SITE, known=None, **more):
    site, its = for_job(site_of(text, plugins), plugins, known or facts(**more))
    with pytest.raises(Refused) as caught:
        decide(Request(tuple(p.split("=", 1) for p in pairs)), site, its)
    return str(caught.value)


def test_refusal_names_the_entry_that_applies(plugins):
    assert refused(plugins, "vcpus=5") == (
        "vcpus=5: is more than allowed "
        "(limit: 4, set by [options.vcpus] max in /etc/vtorque/vtorque.toml)"
    )
    assert refused(plugins, "vcpus=33", queue="gpu-big", group="chem") == (
        "vcpus=33: is more than allowed (limit: 32, set by [[limits]] 2 "
        '(queue = ["gpu-big", "cpu"], group = "chem") [options.vcpus] max in '
        "/etc/vtorque/vtorque.toml)"
    )


def test_contradicting_entries_refuse_a_job_with_defaults(plugins):
    text = SITE + '[[limits]]\naccount = "poor"\n[limits.options.vcpus]\nmax = 1\n'
    said = refused(plugins, text=text, queue="gpu", account="poor")
    assert said.startswith("vcpus=2: is more than allowed (limit: 1, set by [[limits]] 4 ")
    assert said.endswith(
        'that is the default, set by [[limits]] 1 (queue = "gpu*") [options.vcpus] default in '
        "/etc/vtorque/vtorque.toml: name another value, and tell the admin"
    )
    site, its = for_job(site_of(text, plugins), plugins, facts(queue="gpu", account="poor"))
    assert decide(Request((("vcpus", "1"),)), site, its)[VCPUS] == 1


def test_disabled_plugin_of_a_job_is_not_called(plugins):
    site, its = for_job(site_of(SITE, plugins), plugins, facts(queue="gpu"))
    assert "acme" not in its.names
    assert "acme" in plugins.names, "the plugin is disabled for other jobs, too"
    assert not list(its.each(hooks.vtorque_needs, request=None, site=site))
    assert "fpga" not in decide(Request(), site, its).values
    where = '[[limits]] 1 (queue = "gpu*") [plugins] acme in /etc/vtorque/vtorque.toml'
    said = f"plugin acme is disabled for this job (set by {where})"
    assert refused(plugins, "fpga=1", queue="gpu") == f"fpga=1: {said}"
    with pytest.raises(
        Refused, match=r"no installed plugin provides the guest type 'odd'.*; "
    ) as caught:
        its.guest_type("odd")
    assert said in str(caught.value)
    with pytest.raises(Refused) as caught:
        its.guest_type("none")
    assert "acme" not in str(caught.value)
    assert "there is no -vm key" in refused(plugins, "wings=1", queue="gpu")


def test_later_entry_enables_a_plugin_again(plugins):
    site, its = for_job(site_of(SITE, plugins), plugins, facts(queue="gpu-big", group="chem"))
    assert its.names == plugins.names
    assert decide(Request((("fpga", "2"),)), site, its)[FPGA] == 2


def test_unknown_facts_at_submission_refuse_nothing(plugins):
    """vsub does not know the queue, for which an entry on the node may allow more."""
    text = SITE.replace("acme = true", "") + (
        '[[limits]]\nuser = "eve"\n[limits.plugins]\nacme = false\n'
        '[[limits]]\naccount = "rich"\n[limits.plugins]\nacme = true\n'
    )
    known = {"user": ("bob",), "group": ("chem",)}
    site, its = for_job(site_of(text, plugins), plugins, known)
    wanted = decide(Request((("vcpus", "500"), ("ram", "3G"), ("fpga", "1"))), site, its)
    assert (wanted[VCPUS], wanted[RAM]) == (500, 3072)
    assert decide(Request(), site, its)[VCPUS] == 1, "the default depends on unknown facts"
    assert "limit: 3," in refused(plugins, "vcpus=5", text=text, known=known | {"user": ("ada",)})
    eve = {"user": ("eve",), "group": ("chem",)}
    assert "acme" in for_job(site_of(text, plugins), plugins, eve)[1].names
    poor = eve | {"account": ("poor",)}
    assert "acme" not in for_job(site_of(text, plugins), plugins, poor)[1].names


NAMES = st.sampled_from(["", "cpu", "gpu-big", "gpu", "x"])


@settings(deadline=None)
@given(
    queue=NAMES, account=NAMES, user=st.sampled_from(["ada", "bob"]),
    group=st.sampled_from(["chem", "users"]), known=st.sets(st.sampled_from(["queue", "account"])),
    asked=st.integers(1, 40),
)  # fmt: skip
def test_request_accepted_by_the_node_is_accepted_by_vsub(
    queue, account, user, group, known, asked
):
    loaded = plugins.__wrapped__()
    site = site_of(SITE, loaded)
    of_job = facts(user, group, queue=queue, account=account)
    of_vsub = {k: v for k, v in of_job.items() if k in {"user", "group", *known}}
    request = Request((("vcpus", str(asked)),))
    try:
        decide(request, *for_job(site, loaded, of_job))
    except Refused:
        return
    decide(request, *for_job(site, loaded, of_vsub))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits = 3", ":2: [limits]: must be tables [[limits]]"),
        ("limits = [3]", ":2: [limits]: must be tables [[limits]]"),
        ("[limits]\nmax = 1", ":2: [limits]: must be tables [[limits]]"),
        ("[[limits]]\nquue = 'a'", ":3: [[limits]] 1 quue: there is no such key; did you mean"),
        ("[[limits]]\n[limits.options.ram]\nmax = '4G'", ":2: [[limits]] 1: does not select"),
        ("[[limits]]\nqueue = []", ":3: [[limits]] 1 queue: must be a name, a glob, or a list"),
        ("[[limits]]\nqueue = [1]", ":3: [[limits]] 1 queue: must be a name, a glob, or a list"),
        ("[[limits]]\nqos = 'a'", ":3: [[limits]] 1 qos: played does not report this about"),
        ("[[limits]]\nuser='a'\noptions=1", ":4: [[limits]] 1 [options]: must be tables"),
        ("[[limits]]\nuser='a'\noptions.ram=1", ":4: [[limits]] 1 [options] ram: must be a table"),
        ("[[limits]]\nuser='a'\nplugins=1", ":4: [[limits]] 1 plugins: must be a table of plugins"),
        (
            "[[limits]]\nuser='a'\n[[limits]]\nuser='b'\n[limits.options.rma]",
            ":6: [[limits]] 2 [options.rma]: there is no such -vm key; did you mean ram",
        ),
        (
            "[[limits]]\nuser='a'\n[[limits]]\nuser='b'\n[limits.options.ram]\n\nmx = 1",
            ":8: [[limits]] 2 [options.ram] mx: there is no such key; did you mean max",
        ),
        (
            "[[limits]]\nuser='a'\n[limits.options.vcpus]\nmax = 0.5",
            ":5: [[limits]] 1 [options.vcpus] max: is 0.5, but must be",
        ),
        (
            "[[limits]]\nuser='a'\n[limits.options.ram]\nmax = '1G'",
            ":5: [[limits]] 1 [options.ram] max: excludes 2G, the default of ram: set default here",
        ),
        (
            "[[limits]]\nuser='a'\n[limits.options.ram]\ndefault = '8G'",
            ":5: [[limits]] 1 [options.ram] default: is 8G, which is more than allowed: 4G",
        ),
        (
            "[[limits]]\nuser='a'\n[limits.options.ram]\nmax = '512M'\ndefault = '512M'",
            ":5: [[limits]] 1 [options.ram] max: is 512M, less than min = 1G",
        ),
        (
            "[[limits]]\nuser='a'\n[limits.options.ram]\nmin = '8G'",
            ":5: [[limits]] 1 [options.ram] min: is 8G, more than max = 4G",
        ),
        (
            "[[limits]]\nuser='a'\nplugins.acme = 1",
            ":4: [[limits]] 1 [plugins] acme: is 1, but must be true or false",
        ),
        (
            "[[limits]]\nuser='a'\nplugins.acne = true",
            ":4: [[limits]] 1 [plugins] acne: there is no such plugin; did you mean acme?",
        ),
        ("[[limits]]\nuser='a'\nplugins.core = false", "core: is vTorque itself and always on"),
        (
            "[[limits]]\nuser='a'\nplugins.batch = false",
            "batch: provides [batch] system = 'played', which every job needs",
        ),
    ],
)  # fmt: skip
def test_invalid_entry_is_reported_with_its_line(plugins, text, said):
    head = "batch.system = 'played'\n"
    below = "\n[options.ram]\nmin = '1G'\ndefault = '2G'\nmax = '4G'\n"
    found = problems(parse_toml((head + text + below).encode(), FILE), plugins)
    assert any(said in problem for problem in found), found
    with pytest.raises(ConfigError):
        site_of(head + text + below, plugins)


def test_globally_disabled_plugin_cannot_be_enabled_by_an_entry(plugins):
    plugins.off.append("other")
    switch = "batch.system = 'played'\n[[limits]]\nuser='a'\n[limits.plugins]\nother = "
    assert site_of(switch + "false", plugins).limits
    with pytest.raises(ConfigError, match=r"other: is disabled for all jobs in \[plugins\]"):
        site_of(switch + "true", plugins)


def test_batch_hook_without_the_queue_is_a_host_fault(plugins):
    """From an older vTorque: a limit must not be lost silently."""
    site = site_of(SITE, plugins)
    with pytest.raises(HostFault, match=r"the job's queue, which \[\[limits\]\] 1 .*setup install"):
        require_facts(site, facts())
    require_facts(site, facts(queue="x"))
    require_facts(site_of("", plugins), facts())


def test_config_show_prints_the_entries(plugins):
    shown = effective_values(site_of(SITE, plugins), plugins)
    assert shown["limits.1"].origin == f"{FILE}:8"
    assert shown["limits.1"].text == (
        '{"queue" = "gpu*", "options" = {"vcpus" = {"default" = 2, "max" = 16}}, '
        '"plugins" = {"acme" = false}}'
    )


def test_explain_names_the_line_that_sets_each_value(plugins):
    site = site_of(SITE, plugins)
    found = report(site, plugins, {"user": ("bob",), "group": ("chem",), "queue": ("gpu-big",)})
    assert found["options"]["vcpus"] == {
        "default": {"value": "2", "line": 11},
        "max": {"value": "32", "line": 20},
    }
    assert found["options"]["ram"]["default"] == {"value": "2G", "line": 6}
    assert found["options"][IMG.key] == {"default": {"value": "", "line": None}}
    assert found["off"] == {}
    assert [(e["line"], e["counts"]) for e in found["entries"]] == [
        (8, True),
        (16, True),
        (25, False),
    ]
    found = report(site, plugins, {"user": ("bob",), "group": ("users",), "queue": ("gpu",)})
    assert found["off"] == {"acme": 14}
    assert "fpga" not in found["options"]
    found = report(site, plugins, {"user": ("bob",), "group": ("users",)})
    assert found["options"]["vcpus"]["max"] == {"value": "4", "line": 3}
    first = found["entries"][0]
    assert (first["counts"], first["unknown"]) == (None, ["queue"])
