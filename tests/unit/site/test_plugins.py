"""Discovery, isolation and order, with real distributions laid out in a directory."""

import subprocess
import sys
import textwrap

import pytest

from vtorque_core.errors import Conflict, HostFault, Refused
from vtorque_core.plugins import PluginError, Plugins

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


def test_a_plugin_is_found_and_its_option_registered(dists):
    dists("acme-fpga", "fpga", GOOD.format(key="fpga"))
    plugins = Plugins.load(node=False)
    assert plugins.options()["fpga"].parse("3") == 3
    assert plugins.distributions["fpga"] == "acme-fpga 1.0"


def test_order_is_by_name_whatever_the_directory_order(dists):
    for name in ("zeta", "alpha", "mid"):
        dists(f"d-{name}", name, GOOD.format(key=name))
    found = [c.plugin for c in Plugins.load(node=False).each("vtorque_options")]
    wanted = [n for n in dict.fromkeys(found) if n in {"core", "zeta", "alpha", "mid"}]
    assert wanted == ["core", "alpha", "mid", "zeta"]


def test_a_disabled_plugin_is_not_imported(dists):
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
def test_an_import_error_is_isolated_and_kept(dists, source):
    dists("bad", "bad", source)
    dists("good", "good", GOOD.format(key="good"))
    plugins = Plugins.load(node=False)
    assert "good" in plugins.names
    assert "bad" not in plugins.names
    assert plugins.broken["bad"]


def test_a_misspelt_hook_breaks_only_its_plugin(dists):
    dists("bad", "bad", GOOD.format(key="bad").replace("vtorque_options", "vtorque_optionz"))
    assert "no such hook: vtorque_optionz" in Plugins.load(node=False).broken["bad"]


def test_the_acting_half_is_loaded_on_the_node_only(dists):
    dists("acme", "acme", GOOD.format(key="acme"))
    module = dists("acme", "acme", "NODE = True", group="vtorque1.node")
    Plugins.load(node=False)
    assert module not in sys.modules
    Plugins.load(node=True)
    assert module in sys.modules


def test_a_broken_acting_half_takes_the_declaring_half_with_it(dists):
    dists("acme", "acme", GOOD.format(key="acme"))
    dists("acme", "acme", "1/0", group="vtorque1.node")
    plugins = Plugins.load(node=True)
    assert "ZeroDivisionError" in plugins.broken["acme"]
    assert "acme" not in plugins.options()


def test_two_distributions_of_one_option_are_both_named(dists):
    dists("d-one", "one", GOOD.format(key="same"))
    dists("d-two", "two", GOOD.format(key="same"))
    with pytest.raises(Conflict, match=r"d-one 1\.0.*d-two 1\.0"):
        Plugins.load(node=False).options()


def test_two_distributions_of_one_plugin_name_are_refused(dists):
    dists("d-one", "same", GOOD.format(key="x"))
    dists("d-two", "same", GOOD.format(key="y"))
    plugins = Plugins.load(node=False)
    assert "d-one 1.0" in plugins.broken["same"]
    assert "d-two 1.0" in plugins.broken["same"]


def test_a_hook_that_raises_halfway_loses_only_its_own_rest(dists):
    dists("bad", "bad", GOOD.format(key="bad") + "        raise OSError('half')\n")
    dists("good", "good", GOOD.format(key="good"))
    found = list(Plugins.load(node=False).each("vtorque_options"))
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
        Plugins.load(node=False).collect("vtorque_pre_boot", job=None)
    if seen is PluginError:
        assert "plugin bad (bad 1.0) failed in vtorque_pre_boot: KeyError" in str(caught.value)


def test_trace_prints_each_call(dists, monkeypatch, capsys):
    dists("acme", "acme", GOOD.format(key="acme"))
    monkeypatch.setenv("VTORQUE_TRACE", "1")
    list(Plugins.load(node=False).each("vtorque_options"))
    assert "vtorque: vtorque_options() acme: [Option(key='acme'" in capsys.readouterr().err


def test_an_unknown_strategy_says_what_there_is():
    with pytest.raises(Refused, match="no plugin brings the batch system 'pbs'"):
        Plugins.load(node=False).batch_system("pbs")


def test_loading_plugins_imports_nothing_heavy():
    code = (
        "import sys; from vtorque_core.plugins import Plugins; Plugins.load(node=False).options();"
        "print(','.join(m for m in ('libvirt','jinja2','rich','vtorque_core.api_domain',"
        "'cryptography','pycdlib') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
