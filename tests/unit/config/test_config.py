"""The site config: typed values, their origin, and errors that name file, line and key."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from vtorque_admin.example import effective_values, example
from vtorque_core.api import vm_options
from vtorque_core.api.values import Option, hookimpl
from vtorque_core.base.distributions import how_to_get
from vtorque_core.base.errors import ConfigError
from vtorque_core.base.settings import setting
from vtorque_core.base.sizes import count
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import build, plugins_config, problems
from vtorque_core.config.site_file import Raw, parse_toml, read_toml

ROOT = Path(__file__).parents[3]
FILE = Path("/etc/vtorque/vtorque.toml")


@dataclass(frozen=True)
class Engine:
    size: int = 1


@dataclass(frozen=True)
class ExampleSettings:
    cards: tuple[str, ...] = setting((), doc="cards of this node")
    delay: float = setting(1.5, doc="wait", unit="s")
    cache: int = setting(64, doc="cache", unit="MiB")
    mode: Literal["fast", "safe"] = setting("safe", doc="how")
    token: Path | None = setting(None, doc="its secret", secret_file=True)
    env: Mapping[str, str] = field(default_factory=dict)
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self):
        if len(self.cards) > 3:
            raise ValueError("more than 3 cards")


@dataclass(frozen=True)
class NeedyPlugin:
    server: str = setting(doc="whom to ask")


def plugin(settings=None, *options):
    module = types.ModuleType("fake")
    if settings is not None:
        module.vtorque_settings = _impl("vtorque_settings", [settings])
    if options:
        module.vtorque_options = _impl("vtorque_options", list(options))
    return module


def _impl(name, items):
    def hook():
        return items

    hook.__name__ = name
    return hookimpl(hook)


@pytest.fixture
def plugins():
    loaded = Plugins()
    loaded.register("core", vm_options, "vtorque-core")
    loaded.register(
        "acme", plugin(ExampleSettings, Option("fpga", count, 0, "cards")), "vtorque-acme 1.0.0"
    )
    return loaded


def site_of(text: str, plugins: Plugins, node: bool = True):
    return build(parse_toml(text.encode(), FILE), plugins, node=node)


# -- values -----------------------------------------------------------------------------------


def test_missing_config_means_all_defaults(tmp_path, plugins):
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    site = build(read_toml(tmp_path / "none.toml", new=True), plugins)
    assert site.batch.system == "local" and site.batch.vm_by_default
    assert site.node.start_timeout == 300 and site.node.accel == "auto"
    assert site.shares["home"].source == "{home}" and site.shares["home"].user_owned
    assert site.paths.journal == Path("/var/lib/vtorque/journal")
    assert site[ExampleSettings] == ExampleSettings()
    assert set(site.options) == set(plugins.options())
    assert site.origin("node.accel") == "default"


def test_values_are_typed_and_know_their_origin(plugins):
    site = site_of(
        """
[node]
start_timeout = "5m"   # text
grace = 2.5
qemu_overhead = "1G"
host_reserve_ram = "0"

[paths]
state = "/srv/vt"
[options.ram]
max = "4G"
default = 512
[options]
vcpus.max = 8
[shares.data]
source = "/data/{user}"
target = "/data"
[plugin.acme]
delay = "500ms"
cache = 1
env = {A = "b"}
engine.size = 3
""",
        plugins,
    )
    assert (site.node.start_timeout, site.node.grace) == (300, 2.5)
    assert (site.node.qemu_overhead, site.node.host_reserve_ram) == (1024, 0)
    assert site.paths.state == Path("/srv/vt")
    assert (site.options["ram"].max, site.options["ram"].default) == (4096, 512)
    assert site.options["vcpus"].max == 8
    assert list(site.shares) == ["data"]
    assert site[ExampleSettings] == ExampleSettings(
        delay=0.5, cache=1, env={"A": "b"}, engine=Engine(3)
    )
    assert site.origin("node.start_timeout") == f"{FILE}:3"
    assert site.origin("options.ram.max") == f"{FILE}:11"
    assert site.origin("options.vcpus.max") == f"{FILE}:14"
    assert site.origin("plugin.acme.engine.size") == f"{FILE}:22"
    assert site.origin("node.accel") == "default"


def test_unknown_settings_class_raises_key_error(plugins):
    with pytest.raises(KeyError, match="Engine"):
        site_of("", plugins)[Engine]


# -- errors -----------------------------------------------------------------------------------

WHEEL = how_to_get("iocm")
ERRORS = [
    ("[nodes]", 1, "[nodes]: there is no such table; did you mean node?"),
    ("x = 1", 1, "[x]: there is no such table"),
    ("node = 1", 1, "[node]: must be a table"),
    ("options = 1", 1, "[options]: must be tables"),
    ("[options]\nram = 1", 2, "[options] ram: must be a table"),
    ("[node]\n\naccell = 'kvm'", 3, "[node] accell: there is no such key; did you mean accel?"),
    ("[node]\naccel = 'xen'", 2, "[node] accel: is 'xen', but must be one of auto, kvm, tcg"),
    ("[node]\nexclusive = 1", 2, "exclusive: is 1, but must be true or false"),
    ("[node]\nhost_reserve_cores = true", 2, "must be a whole number"),
    ("[node]\nhost_reserve_cores = -1", 2, "the minimum is 0"),
    ("[node]\ngrace = 'soon'", 2, "grace: is 'soon': is not a duration"),
    ("[node]\ngrace = nan", 2, "must be zero or more"),
    ("[node]\ngrace = []", 2, "must be a duration like 90s"),
    ("[node]\nqemu_overhead = '1X'", 2, "is not a size"),
    ("[node]\nqemu_overhead = -1", 2, "must be zero or more"),
    ("[node]\nqemu_overhead = 1.5", 2, "must be a whole number of MiB"),
    ("[paths]\nstate = 'var'", 2, "write an absolute path"),
    ("[paths]\nrun = '/run/../x'", 2, "write an absolute path"),
    ("[paths]\ncommands = 'bin'", 2, "write an absolute path"),
    ("[network]\nsubnet = ''", 2, "is not a subnet"),
    ("[network]\nsubnet = 'fd00::/64'", 2, "is not a subnet"),
    ("[networks]\nhpc = 1", 2, "must be a table [networks.hpc]"),
    ("[networks.hpc]\nkind = 'bridge'", 1, "must be set: name of the libvirt network"),
    ("[networks.hpc]\nsource = 'b'", 1, "must be set with addressing"),
    ("[networks.1]\nsource = 'b'\naddressing = 'none'", 1, "first a letter"),
    ("[networks.hpc]\nsource = 'b'\nsubnet = '10.86.9.0/24'", 3, "overlaps 10.86.0.0/16 of"),
    ("[networks.hpc]\nsource = 'b'\naddressing = 'none'\nmtu = 60", 4, "write 68 to 65535"),
    (
        "[networks.hpc]\nsource = 'e'\naddressing = 'none'\nkind = 'direct'",
        4,
        "set opt_in_unfiltered = true",
    ),
    (
        "[networks.hpc]\nsource = 'e'\naddressing = 'none'\nfilter = false",
        4,
        "set opt_in_unfiltered = true",
    ),
    (
        "[network]\nkind = 'none'\n[networks.hpc]\nsource = 'e'\naddressing = 'none'",
        2,
        "must not be none with [networks]",
    ),
    ("[network]\nsubnet = '10.0.0.1/8'", 2, "is not a subnet"),
    ("[network]\ndns = ['dns']", 2, "is not an address"),
    ("[network]\nsearch = ['a_b.example']", 2, "which is not a domain"),
    ("[network]\nsearch = ['a\\nnameserver 1.1.1.1']", 2, "which is not a domain"),
    ("[network]\nsearch = ['a', 'b', 'c', 'd', 'e', 'f', 'g']", 2, "the limit is 6"),
    ("[network]\nmac_prefix = '00:16:3e'", 2, "locally administered"),
    ("[network]\nmac_prefix = '03:00:00'", 2, "unicast"),
    ("[network]\ndns = '1.1.1.1'", 2, "must be a list in brackets"),
    ("[network]\nnode_number = '('", 2, "is not a regular expression"),
    ("[network]\nnode_number = '[0-9]+'", 2, "has 0 groups"),
    ("[network]\nnode_ports = ['2049']", 2, "has '2049': write tcp/PORT or udp/PORT"),
    ("[network]\nnode_ports = ['tcp/65536']", 2, "a port is 1 to 65535"),
    ("[network]\nkind = 'bridge'\nnode_ports = ['tcp/1']", 3, "has an effect only with kind"),
    ("[network]\nipv6 = true", 2, 'has an effect only with addressing = "dhcp" or "none"'),
    ("[network]\nfilter = false", 2, "set opt_in_unfiltered = true"),
    ("[network]\nkind = 'direct'", 2, "set opt_in_unfiltered = true"),
    ("[network]\naddressing = 'command'", 2, "needs command ="),
    ("[shares.a]\nsource = '/x'", 1, "[shares.a] target: must be set"),
    ("[shares.a]\nsource = '/{usr}'\ntarget = '/x'", 2, "unknown placeholder"),
    ("[shares.a]\nsource = 'x'\ntarget = '/x'", 2, "must be an absolute path or {home}"),
    ("[shares.a]\nsource = '/x'\ntarget = 'x'", 3, "absolute path in the guest"),
    ("[shares.a]\nsource = '/x'\ntarget = '/x'\nkind = 'nfs'", 2, "must be server:/export"),
    ("[shares.'a b']\nsource = '/x'\ntarget = '/x'", 1, "name must be 1 to 30"),
    ("[options.rma]\nmax = 1", 1, "there is no such -vm key; did you mean ram?"),
    ("[options.ram]\nmaxi = 1", 2, "[options.ram] maxi: there is no such key; did you mean max?"),
    ("[options.ram]\nmax = 'lots'", 2, "'lots' is not a size"),
    ("[options.ram]\nmax = 1.5", 2, "is 1.5, but must be text"),
    ("[options.ram]\nmax = '2G'\nmin = '3G'", 3, "min: is 3G, more than max = 2G"),
    (
        "[options.vms_per_node]\nmin = 2",
        2,
        "min: excludes 1, the default of vms_per_node: set default here too",
    ),
    (
        "[options.ram]\nmax = '2G'\ndefault = '3G'",
        3,
        "default: is 3G, which is more than allowed: 2G",
    ),
    ("[options.ram]\nallow = '1G'", 2, "must be a list in brackets"),
    ("[options.img]\ndefault = 'a'\nallow = ['b*']", 2, "default: is a, which is not allowed: b*"),
    ("[options.img]\ndefault = 'a'\ndeny = ['a']", 2, "default: is a, which is not allowed: not a"),
    ("[options.img]\nmin = 'a'", 2, "makes no sense for a key that is not a number"),
    ("[options.keep]\nmin = true", 2, "makes no sense for a key that is not a number"),
    ("[options.keep]\nallow = [1]", 2, "'1' is ambiguous"),
    ("[options.fs_type]\nallow = ['ramdisk']", 2, "excludes sharedfs, the default of fs_type"),
    ("[options.vm_prologue]\ndefault = '/x'", 2, "cannot be set for a key that names a file"),
    ("[options.vm_prologue]\nallow = ['*.sh']", 2, "must be [] or ['*']"),
    (
        "[plugin.acme]\ncard = []",
        2,
        "[plugin.acme] card: there is no such key; did you mean cards?",
    ),
    ("[plugin.acme]\ncards = [1]", 2, "cards: is 1, but must be text in quotes"),
    ("[plugin.acme]\ncards = ['', '', '', '']", 1, "[plugin.acme]: more than 3 cards"),
    ("[plugin.acme]\nengine = {siz = 1}", 2, "engine: siz: there is no such key"),
    ("[plugin.acme]\nenv = {a = 1}", 2, "must be text"),
    ("[plugin.acme]\nmode = 'quick'", 2, "one of fast, safe"),
    ("[plugin.core]\nx = 1", 1, "the plugin has no settings (vtorque-core)"),
    ("[plugin.iocm]", 1, f"plugin iocm is not installed: {WHEEL}, or remove this"),
    (
        "[plugin.strange]",
        1,
        "strange is not installed: ask its author for the distribution that provides it, or remove",
    ),
    (
        "[plugins]\nenable = ['acme', 'iocm']",
        2,
        f"plugin iocm is not installed: {WHEEL}",
    ),
    ("[plugins]\nenable = 'acme'", 2, "must be a list in brackets"),
    (
        "[plugins]\nenable = ['acme', 'iocn']",
        2,
        "[plugins] enable: has 'iocn', but there is no such plugin: did you mean iocm?",
    ),
    (
        "[plugins]\nenable = ['strange']",
        2,
        "there is no such plugin: ask its author for the distribution that provides it, or remove",
    ),
    (
        "[plugins]\n\ndisable = ['iocn']",
        3,
        "[plugins] disable: has 'iocn', but there is no such plugin: did you mean iocm?",
    ),
    (
        "[plugins]\ndisable = ['amce']",
        2,
        "has 'amce', but there is no such plugin: did you mean acme?",
    ),
    (
        "[plugins]\ndisable = ['\u202estrange']",
        2,
        "but there is no such plugin: nothing is disabled; remove it",
    ),
    (
        "[plugins]\ndisable = ['core']",
        2,
        "[plugins] disable: has 'core', which is vTorque itself and always on: remove it",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), ERRORS, ids=[e[0] for e in ERRORS])
def test_error_names_file_line_and_key(text, line, message, plugins):
    with pytest.raises(ConfigError) as caught:
        site_of(text, plugins)
    assert str(caught.value).startswith(f"{FILE}:{line}: [")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_all_problems_are_found_and_counted(plugins):
    raw = parse_toml(b"[node]\naccel = 1\ngrace = 'x'\n[batch]\nsystem = 1\n", FILE)
    assert len(problems(raw, plugins)) == 3
    with pytest.raises(ConfigError, match="and 2 more: vtorque config check"):
        build(raw, plugins)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[node]\naccel = \n", f"{FILE}:2: is not TOML: Invalid value"),
        (b"[node]\n[node]\n", f"{FILE}:2: is not TOML: Cannot declare"),
        (b"[node]\n# \xff\n", f"{FILE}:2: is not UTF-8"),
        (b"#" * (1 << 20) + b"#", "is longer than"),
        (b"x = " + b"[" * 100_000, f"{FILE}: is not TOML"),
    ],
)
def test_invalid_toml_is_a_config_error(content, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_toml(content, FILE)


def test_unreadable_config_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


def test_missing_required_setting_of_a_plugin_is_an_error(plugins):
    plugins.register("needy", plugin(NeedyPlugin), "vtorque-needy 1.0.0")
    with pytest.raises(ConfigError, match=r"\[plugin.needy\] server: must be set: whom to ask"):
        site_of("", plugins)
    assert site_of("[plugin.needy]\nserver='x'", plugins)[NeedyPlugin].server == "x"


def test_disabling_a_plugin_does_not_break_the_config(plugins):
    text = "[plugins]\ndisable = ['iocm']\n[plugin.iocm]\nx = 1\n[options.iocm_min]\nmax = 3\n"
    site = site_of(text, plugins)
    assert len(site.warnings) == 2
    assert f"{FILE}:5: [options.iocm_min]: no loaded plugin has that -vm key" in site.warnings[0]


def test_config_of_selected_plugins_needs_no_batch_system():
    """An example is a host that only builds images."""
    raw = parse_toml(b"[plugins]\nenable = ['linux-guest']\n", FILE)
    assert build(raw, Plugins.load(node=False, enable=["linux-guest"]))
    raw = parse_toml(b"[plugins]\ndisable = ['local']\n", FILE)
    with pytest.raises(ConfigError, match=r"\[batch\] system = 'local' \(default\)"):
        build(raw, Plugins.load(node=False, disable=["local"]))


@pytest.mark.parametrize("node", [False, True])
@pytest.mark.parametrize(
    ("table", "key"), [("disable = ['local']", "disable"), ("enable = ['report']", "enable")]
)
def test_batch_system_plugin_cannot_be_disabled(table, key, node):
    """From any plugin."""
    raw = parse_toml(f"[plugins]\n{table}\n[batch]\nsystem = 'local'\n".encode(), FILE)
    wanted = plugins_config(raw)
    loaded = Plugins.load(node=False, enable=wanted.enable, disable=wanted.disable)
    with pytest.raises(ConfigError) as caught:
        build(raw, loaded, node=node)
    said = str(caught.value)
    assert said.startswith(
        f"{FILE}:2: [plugins] {key}: leaves no plugin that provides [batch] system"
    )
    assert f"= 'local' ({FILE}:4)" in said and "choose another system" in said


def test_plugin_local_can_be_disabled_with_another_batch_system():
    raw = parse_toml(b"[plugins]\ndisable = ['local']\n[batch]\nsystem = 'slurm'\n", FILE)
    loaded = Plugins.load(node=False, disable=["local"])
    assert "local" in loaded.off
    assert build(raw, loaded).batch.system == "slurm"


def test_broken_plugin_does_not_break_the_config(plugins):
    plugins.broken["iocm"] = "ImportError: x"
    assert site_of("[plugin.iocm]\nx = 1\n[options.iocm_min]\nmax = 3\n", plugins).warnings
    plugins.register("bad", plugin(), "vtorque-bad 1.0.0")
    module = types.ModuleType("raising")

    def vtorque_settings():
        raise RuntimeError("no")

    module.vtorque_settings = hookimpl(vtorque_settings)
    plugins.register("raising", module, "vtorque-raising 1.0.0")
    site_of("[plugin.raising]\nx = 1\n", plugins)
    assert plugins.broken["raising"] == "vtorque_settings: RuntimeError: no"


def test_settings_of_node_modules_are_not_checked_on_the_submit_host(plugins):
    plugins.register("late", plugin(), "vtorque-late 1.0.0")
    assert site_of("[plugin.late]\nx = 1\n", plugins, node=False)
    with pytest.raises(ConfigError, match="no settings"):
        site_of("[plugin.late]\nx = 1\n", plugins, node=True)


def test_plugins_table_lists_enabled_and_disabled_plugins(plugins):
    wanted = plugins_config(parse_toml(b"[plugins]\nenable=['b','a']\ndisable=['c']\n"))
    assert (wanted.enable, wanted.disable) == (("b", "a"), ("c",))
    assert plugins_config(Raw(FILE)).enable is None
    with pytest.raises(ConfigError, match=r"\[plugins\] enabel"):
        plugins_config(parse_toml(b"[plugins]\nenabel=[]\n"))


# -- Trust -----------------------------------------------------------------------------------------


def test_root_rejects_an_untrusted_config_or_secret(tmp_path, plugins, monkeypatch):
    private = tmp_path / "vtorque.toml"
    private.write_text("[node]\n")
    private.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    private.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by others|is owned by"):
        read_toml(private)
    secret = private.parent / "secret"
    secret.write_text("x")
    secret.chmod(0o644)
    text = f"[plugin.acme]\ntoken = '{secret}'\n"
    with pytest.raises(ConfigError, match=rf"{FILE}:2: \[plugin.acme\] token: "):
        site_of(text, plugins)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert site_of(text, plugins)[ExampleSettings].token == secret


# -- Texts for people ------------------------------------------------------------------------------


def uncommented(text: str) -> str:
    return re.sub(r"^#(?=[a-z\[])", "", text, flags=re.MULTILINE)


def test_example_loads_with_all_defaults_and_names_every_key(plugins):
    text = example(plugins)
    default = site_of("", plugins)
    assert site_of(text, plugins).node == default.node
    written = site_of(uncommented(text), plugins)
    shown = effective_values(written, plugins)
    for key, value in effective_values(default, plugins).items():
        assert shown[key].value == value.value
        name = key.rpartition(".")[2]
        assert re.search(rf"^# ?{name} = ", text, re.MULTILINE) or name == "default"
    assert written.origin("node.accel").startswith(str(FILE))
    for table in ("[batch]", "[options.fpga]", "[plugin.acme]", "[shares.home]"):
        assert table in text


def test_optional_paths_may_be_empty(plugins):
    site = site_of("[paths]\ncommands = ''\n[images]\ncache = ''\n", plugins)
    assert (site.paths.commands, site.images.cache) == ("", "")


def test_macvtap_needs_only_the_opt_in(plugins):
    text = "[networks.hpc]\nsource = 'e'\nsubnet = '10.9.0.0/16'\nkind = 'direct'\n"
    (hpc,) = site_of(text + "opt_in_unfiltered = true\n", plugins).networks.values()
    assert hpc.kind == "direct"


def test_networks_inherit_the_node_number(plugins):
    text = (
        "[network]\nnode_number = 'r([0-9])'\n[networks.a]\nsource = 'b'\nsubnet = '10.9.0.0/16'\n"
    )
    assert site_of(text, plugins).networks["a"].node_number == "r([0-9])"


def test_example_sets_required_settings(plugins):
    plugins.register("needy", plugin(NeedyPlugin), "vtorque-needy 1.0.0")
    assert site_of(example(plugins), plugins)[NeedyPlugin].server == ""


def test_manual_contains_the_example():
    core = Plugins()
    core.register("core", vm_options, "vtorque-core")
    assert f"```toml\n{example(core)}```" in (ROOT / "doc" / "generated" / "config.md").read_text()
