"""Discovery, isolation and order, with real distributions laid out in a directory."""

import inspect
import re
import subprocess
import sys
import textwrap
import types
from typing import get_args

import pytest

from vtorque_core.api import hooks
from vtorque_core.api.acquired import Resource
from vtorque_core.api.claims import Claim, PoolClaim
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import Conflict, HostFault, Refused
from vtorque_core.config.hook_items import item_types, problem
from vtorque_core.config.plugins import PluginError, Plugins

GOOD = """
    from vtorque_core.api import Option, count, hookimpl

    @hookimpl
    def vtorque_options():
        yield Option("{key}", parse=count, default=0, help="a number")
"""


@pytest.fixture
def dists(tmp_path, monkeypatch):
    """Return a function that lays out one installed distribution."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def add(dist, plugin, source, group="vtorque1"):
        module = f"{dist.replace('-', '_')}_{plugin}_{group.replace('.', '_')}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        with (info / "entry_points.txt").open("a") as points:
            points.write(f"[{group}]\n{plugin} = {module}\n")
        made.append(module)
        return module

    yield add
    for module in made:
        sys.modules.pop(module, None)


def test_plugin_is_discovered_and_its_option_registered(dists):
    dists("acme-fpga", "fpga", GOOD.format(key="fpga"))
    plugins = Plugins.load(node=False)
    assert plugins.options()["fpga"].parse("3") == 3
    assert plugins.distributions["fpga"] == "acme-fpga 1.0"


def test_plugins_are_ordered_by_name(dists):
    for name in ("zeta", "alpha", "mid"):
        dists(f"d-{name}", name, GOOD.format(key=name))
    found = [c.plugin for c in Plugins.load(node=False).each(hooks.vtorque_options)]
    wanted = [n for n in dict.fromkeys(found) if n in {"core", "zeta", "alpha", "mid"}]
    assert wanted == ["core", "alpha", "mid", "zeta"]


def test_disabled_plugin_is_not_imported(dists):
    module = dists("acme", "acme", "raise SystemExit('imported')")
    plugins = Plugins.load(node=False, disable=["acme"])
    assert module not in sys.modules
    assert "acme" not in plugins.broken


def test_enable_lists_exactly_the_plugins_and_disable_wins(dists):
    dists("a", "aa", GOOD.format(key="aa"))
    dists("b", "bb", GOOD.format(key="bb"))
    plugins = Plugins.load(node=False, enable=["aa", "bb"], disable=["bb"])
    assert plugins.names == ("core", "aa")


@pytest.mark.parametrize("source", ["import no_such_module", "raise SystemExit(3)", "1/0", "def ("])
def test_import_error_is_isolated_and_kept(dists, source):
    dists("bad", "bad", source)
    dists("good", "good", GOOD.format(key="good"))
    plugins = Plugins.load(node=False)
    assert "good" in plugins.names
    assert "bad" not in plugins.names
    assert plugins.broken["bad"]


def test_misspelled_hook_breaks_only_its_plugin(dists):
    dists("bad", "bad", GOOD.format(key="bad").replace("vtorque_options", "vtorque_optionz"))
    assert "vtorque_optionz is not a hook of vTorque" in Plugins.load(node=False).broken["bad"]


def test_unmarked_hook_breaks_its_plugin_and_is_named(dists):
    """The mistake was not reported."""
    forgotten = GOOD.format(key="bad").replace("@hookimpl\n", "\n")
    module = dists("acme-bad", "bad", forgotten)
    dists("good", "good", GOOD.format(key="good"))
    plugins = Plugins.load(node=False)
    said = plugins.broken["bad"]
    assert f"plugin bad (acme-bad 1.0): {module}.vtorque_options (line 5) has no @hookimpl" in said
    assert "add @hookimpl, or rename it without vtorque_" in said
    assert "good" in plugins.names and "bad" not in plugins.names


def test_misspelled_unmarked_hook_is_named(dists):
    source = GOOD.format(key="bad").replace("@hookimpl\n", "\n").replace("options", "optionz")
    dists("bad", "bad", source)
    assert "vtorque_optionz (line 5) has no @hookimpl" in Plugins.load(node=False).broken["bad"]


def test_imported_hook_specification_needs_no_mark(dists):
    dists("good", "good", "import vtorque_core\nfrom vtorque_core.api.hooks import vtorque_plan\n")
    assert "good" in Plugins.load(node=False).names


HOOKS = [name for name in vars(hooks) if name.startswith("vtorque_")]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("answer", ["['no']", "'no'", "[object()]"])
def test_wrong_type_from_a_hook_is_reported_with_the_expected_types(hook, answer):
    plugins = Plugins()
    module = types.ModuleType("bad")
    exec(f"def {hook}():\n    return {answer}\n", module.__dict__)  # noqa: S102 - our own text
    setattr(module, hook, hookimpl(getattr(module, hook)))
    plugins.register("bad", module, "acme-bad 1.0")
    kwargs = dict.fromkeys(inspect.signature(getattr(hooks, hook)).parameters)
    (found,) = plugins.each(getattr(hooks, hook), **kwargs)
    assert isinstance(found.error, TypeError) and found.item is None
    with pytest.raises(PluginError) as caught:
        plugins.collect(getattr(hooks, hook), **kwargs)
    said, kind = str(caught.value), "object" if "object" in answer else "str"
    start = f"plugin bad (acme-bad 1.0) failed in {hook}: TypeError: returned {kind} instead of "
    assert said.startswith(start)
    for each in item_types(hook):
        assert each is object or each.__name__ in said.removeprefix(start)


def test_items_before_a_wrong_item_are_kept(dists):
    dists("bad", "bad", GOOD.format(key="bad") + "        yield 'fpga'\n")
    plugins = Plugins.load(node=False)
    found = [c for c in plugins.each(hooks.vtorque_options) if c.plugin == "bad"]
    assert found[0].item.key == "bad"
    assert str(found[1].error) == "returned str instead of an Option"
    plugins.options()
    assert "instead of an Option" in plugins.broken["bad"]


def test_none_is_accepted_only_from_hooks_without_a_result(dists):
    dists(
        "bad",
        "bad",
        """
        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_options():
            pass

        @hookimpl
        def vtorque_pre_boot(job):
            pass
        """,
    )
    plugins = Plugins.load(node=False)
    errors = [c.error for c in plugins.each(hooks.vtorque_options, only="bad")]
    assert "returned NoneType instead of an Option" in str(errors)
    assert [c.item for c in plugins.each(hooks.vtorque_pre_boot, only="bad", job=None)] == [None]


@pytest.mark.parametrize("hook", ["vtorque_resources", "vtorque_settings"])
def test_hook_that_returns_classes_rejects_an_instance(hook):
    assert problem(hook, Resource()).startswith("returned Resource instead of a class")
    assert problem(hook, Resource) == ""


def test_hook_for_resources_rejects_another_class():
    said = problem("vtorque_resources", int)
    assert said == "returned the class int instead of a class derived from Resource"


@pytest.mark.parametrize("hook", HOOKS)
def test_accepted_types_match_the_hook_specifications(hook):
    """The view of a reader and mypy, with the names of a union resolved."""
    said = inspect.get_annotations(getattr(hooks, hook))["return"]
    names = set(re.findall(r"(?:\w+\.)?(\w+)", said)) - {"Iterable", "type", "None", "str"}
    if "Claim" in names:
        names = names - {"Claim"} | {each.__name__ for each in get_args(Claim)}
    spelt = {"object": "Any", "list": "Sequence", "tuple": "Sequence"}
    found = {spelt.get(each.__name__, each.__name__) for each in item_types(hook)}
    if hook == "vtorque_options":
        names.discard("Any")
    assert found == names


def test_node_module_is_loaded_on_the_node_only(dists):
    dists("acme", "acme", GOOD.format(key="acme"))
    module = dists("acme", "acme", "NODE = True", group="vtorque1.node")
    Plugins.load(node=False)
    assert module not in sys.modules
    Plugins.load(node=True)
    assert module in sys.modules


def test_broken_node_module_disables_the_whole_plugin(dists):
    dists("acme", "acme", GOOD.format(key="acme"))
    dists("acme", "acme", "1/0", group="vtorque1.node")
    plugins = Plugins.load(node=True)
    assert "ZeroDivisionError" in plugins.broken["acme"]
    assert "acme" not in plugins.options()


def test_option_of_two_distributions_names_both(dists):
    dists("d-one", "one", GOOD.format(key="same"))
    dists("d-two", "two", GOOD.format(key="same"))
    with pytest.raises(Conflict, match=r"d-one 1\.0.*d-two 1\.0"):
        Plugins.load(node=False).options()


def test_plugin_name_of_two_distributions_is_refused(dists):
    dists("d-one", "same", GOOD.format(key="x"))
    dists("d-two", "same", GOOD.format(key="y"))
    plugins = Plugins.load(node=False)
    assert "d-one 1.0" in plugins.broken["same"]
    assert "d-two 1.0" in plugins.broken["same"]


def test_hook_that_raises_loses_only_its_remaining_items(dists):
    dists("bad", "bad", GOOD.format(key="bad") + "        raise OSError('half')\n")
    dists("good", "good", GOOD.format(key="good"))
    found = list(Plugins.load(node=False).each(hooks.vtorque_options))
    assert [c.item.key for c in found if c.plugin == "bad" and c.item] == ["bad"]
    assert [str(c.error) for c in found if c.error] == ["half"]
    assert any(c.plugin == "good" for c in found)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [("HostFault('x')", HostFault), ("Refused('x')", Refused), ("KeyError('x')", PluginError)],
)
def test_collect_names_the_plugin_of_a_foreign_error(dists, raised, seen):
    dists(
        "bad",
        "bad",
        f"""
        from vtorque_core.api import HostFault, Refused, hookimpl

        @hookimpl
        def vtorque_pre_boot(job):
            raise {raised}
        """,
    )
    with pytest.raises(seen) as caught:
        Plugins.load(node=False).collect(hooks.vtorque_pre_boot, job=None)
    if seen is PluginError:
        assert "plugin bad (bad 1.0) failed in vtorque_pre_boot: KeyError" in str(caught.value)


def test_trace_prints_each_call(dists, monkeypatch, capsys):
    dists("acme", "acme", GOOD.format(key="acme"))
    monkeypatch.setenv("VTORQUE_TRACE", "1")
    list(Plugins.load(node=False).each(hooks.vtorque_options))
    said = capsys.readouterr().err
    assert re.search(r"(?m)^vtorque: acme: vtorque_options\(\) [0-9.]+ ms$", said)
    assert "  -> Option(key='acme', " in said


def test_trace_shows_arguments_results_errors_and_time(vtorque_guest, monkeypatch, capsys):
    monkeypatch.setenv("VTORQUE_TRACE", "1")
    module = types.ModuleType("acme")

    @hookimpl
    def vtorque_plan(guest, site):
        yield PoolClaim("acme", ("x" * 1000,))
        raise KeyError("card")

    module.vtorque_plan = vtorque_plan
    plugins = Plugins()
    plugins.register("acme", module, "acme 1.0")
    list(plugins.each(hooks.vtorque_plan, guest=vtorque_guest(), site={}))
    call, result, error = capsys.readouterr().err.splitlines()
    known = r"vtorque: acme: vtorque_plan\(guest=GuestPlan\(vt-42.srv.0-n1-0\), site=dict\(\)\) "
    assert re.fullmatch(known + r"[0-9.]+ ms", call)
    assert result.startswith("  -> PoolClaim(pool='acme', items=('xxx")
    assert re.search(r"xx\.\.\. \(\d+ characters\)$", result)
    assert error == "  raised KeyError: 'card'"


def test_unknown_batch_system_is_refused():
    with pytest.raises(Refused, match="no installed plugin provides the batch system 'pbs'"):
        Plugins.load(node=False).batch_system("pbs")


def test_loading_plugins_imports_no_heavy_module():
    code = (
        "import sys; from vtorque_core.config.plugins import Plugins;"
        "Plugins.load(node=False).options();"
        "heavy = ('libvirt', 'jinja2', 'rich', 'vtorque_core.api.libvirt_domain',"
        "'cryptography', 'pycdlib');"
        "print(','.join(m for m in heavy if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
