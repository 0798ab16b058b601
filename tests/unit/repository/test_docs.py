"""The documentation names only existing things, and its example plugin runs."""

import dataclasses
import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import file_operations
from tracked_files import tracked
from vtorque_core.api import hooks, vm_options
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_context import EnvVar, GuestDevice
from vtorque_core.api.host_topology import flat
from vtorque_core.base import errors
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.cli.admin import vtorque
from vtorque_core.cli.vmgr import vmgr
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import decide
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_core.live.command_groups import PluginGroup
from vtorque_core.node.end.teardown import teardown
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_testing import fixtures
from vtorque_testing.planned import guest_plan

REPO = Path(__file__).parents[3]
DOC = REPO / "doc"
CARDS = ("0000:3b:00.0", "0000:5e:00.0")
CONFIG = """
[options.fpga]
max = 2
[plugin.acme-fpga]
cards = ["0000:3b:00.0", "0000:5e:00.0"]
image = "/etc/acme/shell.bit"
tool = "TOOL"
"""


def text(name):
    return (DOC / name).read_text(encoding="utf-8")


# -- the example of examples/plugin ------------------------------------------------------------


def files_of(markdown):
    """Return file name to text of all code blocks whose preceding line names a file."""
    blocks = re.findall(r"^`([\w/.]+)`:\n\n```\w*\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE)
    return dict(blocks)


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Return the documented plugin, registered, with a loader that records its calls."""
    files = files_of((REPO / "examples/plugin/README.md").read_text(encoding="utf-8"))
    for name, content in files.items():
        path = tmp_path / "dist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "dist/vtorque_acme_fpga/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "dist"))
    project = tomllib.loads(files["pyproject.toml"])["project"]
    plugins = Plugins()
    plugins.register("core", vm_options, "vtorque-core")
    for group in ("vtorque1", "vtorque1.node"):
        ((name, module),) = project["entry-points"][group].items()
        release = f"{project['name']} {project['version']}"
        plugins.register(name, importlib.import_module(module), release)
    tool = tmp_path / "acme-load"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    site = build(parse_toml(CONFIG.replace("TOOL", str(tool)).encode()), plugins, node=True)
    state = dataclasses.replace(site, paths=Paths(tmp_path / "state", tmp_path / "run"))
    yield SimpleNamespace(plugins=plugins, site=state, calls=tmp_path / "calls")
    for module in [m for m in sys.modules if m.startswith("vtorque_acme_fpga")]:
        del sys.modules[module]


def placed(acme, tmp_path, cards):
    """Return a guest with that many cards, as the node's code would place it."""
    request = decide(Request((("fpga", str(cards)),)), acme.site, acme.plugins)
    guest = guest_plan(request=request, state_dir=tmp_path / "s", run_dir=tmp_path / "r")
    found = acme.plugins.collect(hooks.vtorque_plan, guest=guest, site=acme.site)
    claims = [c.item for c in found]
    (placement,) = divide([claims], NodeShare(flat((0, 1), 4096)), Leases())
    return claims, dataclasses.replace(guest, placement=placement)


def test_example_claims_the_requested_devices(acme, tmp_path):
    assert placed(acme, tmp_path, 0)[0] == []
    assert placed(acme, tmp_path, 2)[0] == [PoolClaim("acme-fpga", CARDS, 2)]
    with pytest.raises(Refused, match=r"fpga=3: is more than allowed \(limit: 2"):
        placed(acme, tmp_path, 3)


def test_example_provides_guest_context_and_host_devices(acme, tmp_path):
    _, guest = placed(acme, tmp_path, 2)
    items = [
        c.item for c in acme.plugins.collect(hooks.vtorque_guest_context, guest=guest, site=None)
    ]
    assert items == [
        GuestDevice("acme[0-9]*", link="/dev/vtorque/fpga0", nth=0),
        GuestDevice("acme[0-9]*", link="/dev/vtorque/fpga1", nth=1),
        EnvVar("ACME_CARDS", "2"),
    ]
    found = acme.plugins.collect(hooks.vtorque_render_domain, guest=guest, site=acme.site)
    merged = merge(Contributed(c.plugin, c.distribution, c.item) for c in found)
    xml = ElementTree.fromstring(render(DomainSpec(guest, "tcg"), merged))  # noqa: S314 - our own
    addresses = [a.attrib for a in xml.findall("devices/hostdev/source/address")]
    assert addresses == [
        {"domain": "0x0000", "bus": "0x3b", "slot": "0x00", "function": "0x0"},
        {"domain": "0x0000", "bus": "0x5e", "slot": "0x00", "function": "0x0"},
    ]
    aliases = [a.get("name") for a in xml.findall("devices/hostdev/alias")]
    assert aliases == ["ua-acme-fpga-fpga0", "ua-acme-fpga-fpga1"]


def test_example_is_journaled_and_torn_down(acme, tmp_path):
    """``pre_boot`` loads both cards; teardown, from the journal alone, blanks them backwards."""
    _, guest = placed(acme, tmp_path, 2)
    paths = acme.site.paths
    header = JobHeader(
        JobAttempt("42.srv", 0, "ada", 1000), "local", {"acme-fpga": "vtorque-acme-fpga 1.0.0"}
    )
    with Journal.start(paths, header) as journal:
        job = SimpleNamespace(
            site=acme.site,
            guests=[guest],
            acquire=lambda resource, guest: journal.acquire(
                resource, plugin="acme-fpga", phase="pre-boot", guest=guest.index
            ),
        )
        acme.plugins.collect(hooks.vtorque_pre_boot, job=job)
    loads = [f"{card} /etc/acme/shell.bit" for card in CARDS]
    assert acme.calls.read_text().splitlines() == loads
    report = teardown(journal.path, paths, acme.plugins)
    assert report.clean, report.lines()
    blanks = [f"{card} --blank" for card in reversed(CARDS)]
    assert acme.calls.read_text().splitlines() == loads + blanks
    assert not journal.path.exists()


def test_every_block_of_the_example_is_used():
    files = files_of((REPO / "examples/plugin/README.md").read_text(encoding="utf-8"))
    assert set(files) == {
        "pyproject.toml",
        "vtorque_acme_fpga/plugin.py",
        "vtorque_acme_fpga/node.py",
        "vtorque_acme_fpga/pcicard.xml.j2",
    }


# -- Nothing is left out ---------------------------------------------------------------------------

HOOKS = [name for name in vars(hooks) if name.startswith("vtorque_")]


def test_every_hook_has_a_heading_with_its_arguments():
    headings = [
        f"\n## `{name}({', '.join(inspect.signature(getattr(hooks, name)).parameters)})`\n"
        for name in HOOKS
    ]
    assert [each for each in headings if each not in text("generated/hooks.md")] == []


def test_every_described_hook_exists():
    assert set(re.findall(r"\bvtorque_[a-z_]+(?=[(`])", text("plugins.md"))) <= {
        *HOOKS,
        *(name for name in vars(fixtures) if name.startswith("vtorque_")),
        "vtorque_testing",
    }


def commands(group, program):
    """Yield commands such as ``vmgr images list``: those that ``-h`` shows."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{program} {name}")
        else:
            yield f"{program} {name}"


def test_every_command_is_in_the_manuals():
    lines = [*commands(vmgr, "vmgr"), *commands(vtorque, "vtorque"), "vsub"]
    page = text("generated/commands.md")
    assert [line for line in lines if f"| `{line}` |" not in page] == []


def test_commands_in_texts_are_found():
    assert isinstance(vtorque, PluginGroup)
    assert {"vmgr images build", "vmgr ps", "vmgr ssh"} < set(commands(vmgr, "vmgr"))
    assert "vtorque hook" not in " ".join(commands(vtorque, "vtorque"))


def test_help_lists_every_command_of_a_group():
    shown = CliRunner().invoke(vmgr, ["images", "-h"]).output
    listed = re.findall(r"^  ([a-z]+) ", shown.partition("Commands:")[2], re.MULTILINE)
    assert {"build", "list", "remove", "show"} <= set(listed)


CODES = {name: code for name, code in vars(errors).items() if name.startswith("EXIT_")}


def test_every_exit_code_is_in_the_user_manual():
    rows = {name: rf"^\| {code}\b.*`{name}`" for name, code in CODES.items()}
    manual = text("user.md")
    assert [name for name, row in rows.items() if not re.search(row, manual, re.MULTILINE)] == []


def test_manual_lists_the_file_operations_that_differ_in_a_guest():
    section = text("user.md").partition("### Files in shared directories")[2]
    rows = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
    assert rows == ["in a guest", *dict.fromkeys(file_operations.DIFFERENCES.values())]


def test_every_vm_key_is_in_the_user_manual_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text("user.md"), re.MULTILINE)
    told = {key: row.split("|")[0].strip() for key, row in rows}
    options = list(vm_options.vtorque_options())
    assert options
    assert {o.key: told.get(o.key) for o in options} == {
        o.key: o.show(o.default) or "none" for o in options
    }


def projects():
    return [REPO / "pyproject.toml", *REPO.glob("plugins/*/pyproject.toml")]


def requirements():
    for path in projects():
        data = tomllib.loads(path.read_text())
        wanted = [*data["project"]["dependencies"], *data["build-system"]["requires"]]
        for extra in data["project"].get("optional-dependencies", {}).values():
            wanted += extra
        yield from (re.match(r"[A-Za-z0-9._-]+", item)[0] for item in wanted)


def packages():
    lines = (REPO / "scripts/packages").read_text().splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def test_every_dependency_has_a_reason():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", text("dependencies.md"), re.MULTILINE)
    for name in sorted({*requirements(), *packages()}):
        if not name.startswith("vtorque-"):
            reasons = [reason for names, reason in rows if f"`{name}`" in names]
            assert len(reasons) == 1, name
            assert len(reasons[0]) > 10, name


def test_every_explained_dependency_exists():
    rows = re.findall(r"^\| (`.+?) \|", text("dependencies.md"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named <= {*requirements(), *packages()}


def test_links_have_targets():
    """Every relative link of the manuals names a file, and its anchor a heading of that file."""
    broken = []
    for page in [*DOC.glob("*.md"), *REPO.glob("*.md"), *REPO.glob("plugins/*/README.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def anchors(file):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_readme_is_short():
    assert len((REPO / "README.md").read_text().splitlines()) <= 60


# Written in pieces, so that this file is not among the files it looks for.
FORBIDDEN = [
    "/" + "work/main", "/" + "work/shared", "/" + "work/.", "farm" + "-", "issues " + "show",
    "duplicates" + "-", "127.0.0.1" + ":3141", "/" + "opt/pypi", "index" + "-url",
]  # fmt: skip


def test_repository_names_nothing_of_the_workplace():
    found = []
    for path in tracked():
        content = path.read_bytes()
        found += [f"{path}: {word}" for word in FORBIDDEN if word.encode() in content]
    assert not found


def test_every_test_named_on_a_page_exists():
    missing = []
    for page in DOC.glob("*.md"):
        for file, name in re.findall(r"`([\w/.-]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            path = REPO / file
            if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
                missing.append(f"{page.name}: {file}::{name}")
    assert not missing


def test_units_of_the_reaper_are_valid():
    """The keys must be those of systemd.timer(5) and systemd.service(5)."""
    blocks = re.findall(r"```ini\n(.*?)```", text("admin.md"), re.DOTALL)
    service, timer = (block for block in blocks if "vTorque" in block)
    assert re.findall(r"^\[(\w+)\]$", service, re.MULTILINE) == ["Unit", "Service"]
    assert re.findall(r"^\[(\w+)\]$", timer, re.MULTILINE) == ["Unit", "Timer", "Install"]
    for line in (service + timer).splitlines():
        assert re.fullmatch(r"|\[\w+\]|[A-Z]\w+=\S.*", line)
    assert "ExecStart=/opt/vtorque/bin/vtorque reap\n" in service
