"""``vtorque setup`` installs hooks and restores files byte for byte, wherever it was stopped."""

import dataclasses
import itertools
import json
import os
import stat
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

import sparing
from vtorque_admin import command, setup_batch
from vtorque_admin.steps import MARK, Check, Mark, ReplacedFile, edit_file
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import HostFault
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site, build
from vtorque_core.config.site_file import read_toml
from vtorque_local.node import LocalNode

OURS = b"#!/bin/sh\n# " + MARK + b".\nexit 0\n"


class Killed(BaseException):
    """Stands for SIGKILL between two steps."""


@dataclasses.dataclass
class HookBatch:
    """A batch system whose hooks are in a directory; ``problem``: its admin's remaining work."""

    top: Path
    name: str = "acme"
    problem: str = ""

    @hookimpl
    def vtorque_batch_systems(self):
        yield BatchSystem(self.name, submitter=None, node=lambda _site: self, shell=None)

    def setup_steps(self, place):
        assert place.program == Path(sys.prefix, "bin", "vtorque")
        return [
            ReplacedFile(self.top / "prologue", OURS + str(place.config).encode() + b"\n"),
            Check(f"{self.name}: alarm", self.problem),
            ReplacedFile(self.top / "epilogue", OURS, mode=0o500),
        ]


@dataclasses.dataclass
class Udev:
    """A plugin that is no batch system and has its own step; ``broken``: the error it raises."""

    top: Path
    broken: str = ""

    @hookimpl
    def vtorque_setup_steps(self, place):
        if self.broken:
            raise HostFault(self.broken)
        return [ReplacedFile(self.top / "90-acme.rules", OURS + str(place.config).encode() + b"\n")]


@dataclasses.dataclass
class SetupNode:
    """A node in a directory."""

    top: Path
    cluster: HookBatch
    said: list[str] = dataclasses.field(default_factory=list)
    udev: Udev | None = None

    @property
    def config(self):
        return self.top / "etc" / "vtorque.toml"

    def _site(self):
        plugins = Plugins()
        plugins.register("acme", self.cluster, "vtorque-acme 1.0.0")
        plugins.register("local", Local(), "vtorque-core 1.0.0")
        if self.udev is not None:
            plugins.register("udev", self.udev, "vtorque-udev 1.0.0")
        return build(read_toml(self.config, new=True), plugins, node=True), plugins

    def install(self, batch="acme", **more):
        site, plugins = self._site()
        site = dataclasses.replace(site, paths=self.paths)
        setup_batch.install(site, plugins, self.config, batch, self.said.append, **more)

    def uninstall(self):
        site, plugins = self._site()
        site = dataclasses.replace(site, paths=self.paths)
        setup_batch.uninstall(site, plugins, self.config, self.said.append)

    @property
    def paths(self):
        from vtorque_core.base.names import Paths

        return Paths(self.top / "state", self.top / "run", self.top / "libexec" / "jobshell")

    def listing(self):
        """Every file except vTorque's records: kind, mode, owner, content."""
        found = {}
        for path in [*sorted((self.top / "etc").rglob("*")), self.paths.jobshell]:
            if not os.path.lexists(path):
                continue
            status = path.lstat()
            content = path.readlink() if path.is_symlink() else None
            content = path.read_bytes() if path.is_file() and content is None else content
            what = (stat.S_IFMT(status.st_mode), status.st_mode, status.st_uid, status.st_gid)
            found[str(path)] = (*what, content)
        return found


class Local:
    """The embedded batch system, which has no steps."""

    @hookimpl
    def vtorque_batch_systems(self):
        yield BatchSystem(
            "local", submitter=None, node=lambda _site: LocalNode(Path("/nowhere")), shell=None
        )


@pytest.fixture
def node(tmp_path):
    hooks = tmp_path / "etc" / "hooks"
    hooks.mkdir(parents=True)
    (tmp_path / "state").mkdir()
    return SetupNode(tmp_path, HookBatch(hooks))


def prepare_site(node, kind):
    """Prepare files that a site may already have."""
    prologue, epilogue = node.cluster.top / "prologue", node.cluster.top / "epilogue"
    if kind in ("hooks", "all"):
        prologue.write_bytes(b"#!/bin/sh\necho site\n")
        prologue.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(prologue, 12, 34)
            prologue.chmod(0o2750)
    if kind in ("link", "all"):
        epilogue.symlink_to("../elsewhere")
    if kind == "link":
        prologue.symlink_to(node.config)
    if kind in ("config", "all", "link"):
        node.config.write_text('# ours\r\n[batch]\nsystem = "local" # as ever\n[node]\ngrace = 3\n')
        node.config.chmod(0o640)


KINDS = ["nothing", "hooks", "link", "config", "all"]


@pytest.mark.parametrize("kind", KINDS)
def test_uninstall_restores_byte_for_byte_and_both_are_idempotent(node, kind):
    prepare_site(node, kind)
    before = node.listing()
    node.install()
    installed = node.listing()
    assert installed != before
    assert tomllib.loads(node.config.read_text())["batch"]["system"] == "acme"
    node.said.clear()
    node.install()
    assert node.said == []
    assert node.listing() == installed
    node.uninstall()
    assert node.listing() == before
    node.uninstall()
    assert node.listing() == before


@pytest.mark.parametrize(
    ("kind", "go_on"), sparing.each(3, itertools.product(KINDS, (True, False)))
)
def test_interrupted_install_can_be_continued_or_undone(node, kind, go_on, monkeypatch):
    prepare_site(node, kind)
    before = node.listing()
    node.install()
    whole = node.listing()
    node.uninstall()
    for again, result in (("install", whole), ("uninstall", before)):
        for number in range(1, 40):
            if again == "uninstall":
                node.install()
            with monkeypatch.context() as patch:
                _kill_at(patch, number)
                try:
                    getattr(node, again)()
                    break
                except Killed:
                    pass
            if go_on:
                getattr(node, again)()
                assert node.listing() == result
            node.uninstall()
            assert node.listing() == before
        else:
            pytest.fail("never ran to its end")
        assert number > 4
        node.uninstall()


def _kill_at(patch, number):
    """Raise right after the ``number``-th change of a directory."""
    count = 0

    def killing(change):
        def call(*args, **kwargs):
            nonlocal count
            result = change(*args, **kwargs)
            count += 1
            if count == number:
                raise Killed
            return result

        return call

    for name in ("link", "replace", "rename", "unlink"):
        patch.setattr(os, name, killing(getattr(os, name)))


def test_edited_hook_is_neither_removed_nor_overwritten(node):
    prepare_site(node, "all")
    node.install()
    hook = node.cluster.top / "prologue"
    edited = hook.read_bytes().replace(b"exit 0", b"logger hello; exit 0")
    hook.write_bytes(edited)
    with pytest.raises(HostFault, match="was edited since vTorque wrote it: move it away"):
        node.install()
    with pytest.raises(HostFault, match="1 steps could not be undone"):
        node.uninstall()
    assert hook.read_bytes() == edited
    assert (hook.parent / "prologue.orig").read_bytes() == b"#!/bin/sh\necho site\n"
    assert any("edited since" in line and "prologue.orig" in line for line in node.said)
    assert not (hook.parent / "epilogue.orig").is_symlink()  # the others are undone
    hook.rename(hook.parent / "mine")
    node.uninstall()
    assert hook.read_bytes() == b"#!/bin/sh\necho site\n"


def test_hook_replaced_by_the_site_is_kept(node):
    prepare_site(node, "hooks")
    node.install()
    hook = node.cluster.top / "prologue"
    hook.unlink()
    hook.write_bytes(b"#!/bin/sh\necho newer\n")
    for act in (node.install, node.uninstall):
        with pytest.raises(HostFault):
            act()
        assert hook.read_bytes() == b"#!/bin/sh\necho newer\n"
        assert (hook.parent / "prologue.orig").read_bytes() == b"#!/bin/sh\necho site\n"


def test_hook_of_an_older_vtorque_is_replaced_and_removed(node):
    older = ReplacedFile(node.cluster.top / "prologue", b"#!/bin/sh\n# " + MARK + b" 0.9\n")
    older.apply()
    node.install()
    assert b"0.9" not in older.path.read_bytes()
    older.apply()
    node.uninstall()
    assert not older.path.exists()


def test_orig_file_of_the_site_is_not_lost(node):
    prepare_site(node, "hooks")
    own = node.cluster.top / "prologue.orig"
    own.write_bytes(b"an old one")
    with pytest.raises(HostFault, match="move one of them away"):
        node.install()
    assert own.read_bytes() == b"an old one"


def test_edited_config_keeps_its_edits(node):
    prepare_site(node, "config")
    node.install()
    node.config.write_text(node.config.read_text() + "exclusive = false\n")
    node.uninstall()
    assert "only [batch] system is restored" in "".join(node.said)
    data = tomllib.loads(node.config.read_text())
    assert data["batch"]["system"] == "local"
    assert data["node"] == {"grace": 3, "exclusive": False}


def test_dry_run_changes_nothing_and_names_every_step(node):
    prepare_site(node, "all")
    before = node.listing()
    node.cluster.problem = "the alarm is 300 s, it must be 600 s: set it"
    node.install(dry_run=True)
    assert node.listing() == before
    assert not (node.paths.state / "setup.json").exists()
    text = "\n".join(node.said)
    assert f"would write {node.cluster.top}/prologue, keeping the site's as prologue.orig" in text
    assert "by hand: the alarm is 300 s" in text
    assert 'would set [batch] system = "acme"' in text


def test_manual_step_is_reported_before_any_change(node):
    prepare_site(node, "all")
    before = node.listing()
    node.cluster.problem = "the alarm is 300 s, it must be 600 s: set it"
    with pytest.raises(HostFault, match=r"set it\. acme was not changed: .* acme again"):
        node.install()
    assert node.listing() == before


@pytest.mark.root
def test_failing_step_names_the_fix_and_the_next_run_continues(node):
    node.install()
    node.config.unlink()
    prologue, epilogue = node.cluster.top / "prologue", node.cluster.top / "epilogue"
    epilogue.write_bytes(epilogue.read_bytes() + b"# mine")
    prologue.unlink()
    with pytest.raises(
        HostFault, match=r"edited.*run this command again\. The earlier steps remain"
    ):
        node.install()
    assert prologue.exists()
    assert not node.config.exists(), "the config was written before all steps were done"
    epilogue.unlink()
    node.install()
    assert (node.cluster.top / "epilogue").exists()
    assert node.config.exists()


def test_batch_system_without_hooks_needs_no_jobshell(node):
    prepare_site(node, "config")
    before = node.listing()
    node.install("local")
    assert node.listing() == before
    node.uninstall()
    assert node.listing() == before


def test_second_batch_system_replaces_the_first(node):
    prepare_site(node, "all")
    before = node.listing()
    node.install()
    node.install("local")
    assert tomllib.loads(node.config.read_text())["batch"]["system"] == "local"
    node.uninstall()
    assert node.listing() == before


def test_doctor_reports_steps_that_are_undone(node):
    from vtorque_admin.doctor import check_batch

    def found():
        site, plugins = node._site()
        site = dataclasses.replace(site, paths=node.paths)
        return [(r.status, r.message, r.fix) for r in check_batch(site, plugins)]

    assert found() == [("ok", "local calls vTorque by itself", "")]
    node.install()
    assert {status for status, *_ in found()} == {"ok"}
    assert len(found()) == 4
    (node.cluster.top / "epilogue").chmod(0o755)
    node.cluster.problem = "the alarm is too short: set it to 600"
    bad = [(message, fix) for status, message, fix in found() if status == "failed"]
    assert bad == [
        ("acme: not done: acme: alarm", "the alarm is too short: set it to 600"),
        (
            f"acme: not done: write {node.cluster.top}/epilogue",
            "run vtorque setup install --batch acme",
        ),
    ]


def test_missing_mark_alone_is_a_warning(monkeypatch):
    from vtorque_admin.doctor import check_batch

    never = [Mark("give it", lambda: False, lambda: None, lambda: None)]
    monkeypatch.setattr(setup_batch, "steps_of", lambda *_: never)
    (found,) = check_batch(Site(), None)
    assert (found.status, found.message) == ("warning", "local: not done: give it")
    assert "vtorque doctor --mark" in found.fix
    assert list(check_batch(Site(), None, marks=True)) == [], "doctor --mark warns about the mark"


ACME = """
from pathlib import Path
from vtorque_core.api import BatchSystem, hookimpl

class Node:
    def setup_steps(self, place):
        return []

    def mark(self, healthy, reason):
        Path({mark!r}).write_text(f"{{healthy}} {{reason}}")

@hookimpl
def vtorque_batch_systems():
    yield BatchSystem("acme", submitter=None, node=lambda site: Node(), shell=None)
"""


@pytest.mark.parametrize(
    ("failures", "marked", "said"),
    [(0, (True, ""), "fit"), (2, (False, "tools: nft is gone 0"), "unfit")],
)
def test_doctor_mark_reports_the_new_state(failures, marked, said):
    """Setup printed "not done: give this node vtorque" and then did it."""
    from vtorque_admin.doctor import Finding, set_mark

    found = [
        Finding("tools", "core", "failed", f"nft is gone {number}") for number in range(failures)
    ]
    found.append(Finding("code", "core", "ok", "root's"))
    marks = []
    node = types.SimpleNamespace(mark=lambda *given: marks.append(given))
    plugins = types.SimpleNamespace(
        batch_system=lambda _: types.SimpleNamespace(node=lambda _: node)
    )
    (finding,) = set_mark(Site(), plugins, found)
    assert marks == [marked]
    assert finding.message == f"reported as {said} for VM jobs"


def test_doctor_clears_the_mark_of_an_unfit_node(tmp_path):
    (tmp_path / "acme_batch.py").write_text(ACME.format(mark=str(tmp_path / "mark")))
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vtorque1]\nacme = acme_batch\n")
    config = tmp_path / "vtorque.toml"
    config.write_text(
        f'[batch]\nsystem = "acme"\n[paths]\nstate = "{tmp_path}/none"\nrun = "{tmp_path}/run"\n'
        '[node]\naccel = "tcg"\nlibvirt_uri = "test:///default"\n[network]\nkind = "none"\n'
    )
    # Not the command, which takes no PYTHONPATH from root's caller (test_entry.py).
    text = "from vtorque_core.cli.admin import vtorque; vtorque()"
    argv = [sys.executable, "-c", text, "doctor", "--mark", "--json", "--config", config]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1, done.stderr
    failed = [f for f in json.loads(done.stdout) if f["status"] == "failed"]
    last = json.loads(done.stdout)[-1]
    assert last["message"] == "reported as unfit for VM jobs"
    said = (tmp_path / "mark").read_text()
    assert said == f"False {failed[0]['check']}: {failed[0]['message']}"


def test_site_file_is_edited_atomically(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"one\r\n")
    real.chmod(0o640)
    link.symlink_to(real)
    assert edit_file(link, lambda text: text + b"two\n")
    assert real.read_bytes() == b"one\r\ntwo\n" and real.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == [link, real]
    inode = real.stat().st_ino
    assert not edit_file(link, lambda text: text), "an unchanged file was written"
    assert real.stat().st_ino == inode


def test_optional_file_is_created_and_removed(tmp_path):
    path = tmp_path / "config"
    with pytest.raises(HostFault, match=r"config: No such file"):
        edit_file(path, lambda text: b"ours")
    assert edit_file(path, lambda text: text + b"ours", may_be_missing=True)
    assert path.read_bytes() == b"ours" and path.stat().st_mode & 0o777 == 0o644
    assert edit_file(path, lambda text: b"", may_be_missing=True)
    assert not path.exists()
    assert not edit_file(path, lambda text: b"", may_be_missing=True)


def test_steps_of_other_plugins_come_first(node):
    before = node.listing()
    node.udev = Udev(node.cluster.top)
    node.install()
    rules = node.cluster.top / "90-acme.rules"
    assert rules.read_bytes().startswith(OURS)
    assert node.said[-2:] == [f"write {rules}", f'set [batch] system = "acme" in {node.config}']
    node.said.clear()
    node.uninstall()
    undone = [line for line in node.said if line.startswith("undo: ")]
    assert undone[0] == f"undo: write {rules}" and len(undone) == 4
    assert node.listing() == before


def test_plugin_without_steps_does_not_stop_the_uninstall(node):
    node.udev = Udev(node.cluster.top, broken="no udev here")
    with pytest.raises(HostFault, match="no udev here"):
        node.install()
    node.udev.broken = ""
    node.install()
    node.udev.broken = "no udev here"
    with pytest.raises(HostFault, match="1 steps could not be undone"):
        node.uninstall()
    assert "udev: no udev here" in node.said
    assert not (node.cluster.top / "prologue").exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("words", "batch"), [((), "torque"), (("--batch", "local"), "local"), (("--batch", ""), None)]
)
def test_setup_install_keeps_the_batch_system_of_the_config(monkeypatch, tmp_path, words, batch):
    """An admin who repeats it without --batch does not switch the site to ``local``."""
    config, installed = tmp_path / "vtorque.toml", []
    config.write_text('[batch]\nsystem = "torque"\n')
    monkeypatch.setattr(command.steps, "install", lambda *_, **__: None)
    monkeypatch.setattr(command.setup_batch, "install", lambda *a, **_: installed.append(a[3]))
    done = CliRunner().invoke(command.install, ["--config", str(config), *words])
    assert installed == [batch] * (batch is not None), done.output
    assert bool(done.exception) is (batch is None)
