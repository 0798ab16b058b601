"""Declarations of the plugin, and the modules that they import."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # noqa: F401 - for the reader, whom this Python may be closed to

from vtorque_core.api import FileData, Paths, Refused, guest_context
from vtorque_linux_guest import node, plugin
from vtorque_linux_guest.guest.contract import SITE
from vtorque_linux_guest.job.driver import LinuxDriver
from vtorque_linux_guest.settings import Settings


def wanting(place: str = "", rank: int = 0, own: FileData | None = None, **share: object) -> Any:
    home = {"target": "/home/ada", "kind": "virtiofs", "readonly": False} | share
    return SimpleNamespace(
        request={plugin.CLEAN: place, plugin.VM_PRECANCEL: own, plugin.CLOUD_CONFIG: None},
        rank=rank,
        shares=[SimpleNamespace(**home)], user=SimpleNamespace(uid=1000, gid=100),
        image=SimpleNamespace(guest_type="linux", source=""),
    )  # fmt: skip


class PluginSite:
    paths = Paths()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getitem__(self, kind: type) -> Settings:
        return self.settings


def test_all_context_items_are_supported() -> None:
    classes = {
        name
        for name, value in vars(guest_context).items()
        if isinstance(value, type)
        and issubclass(value, guest_context.ContextItem)
        and value is not guest_context.ContextItem
    }
    (guest_type,) = plugin.vtorque_guest_types()
    assert guest_type.name == "linux"
    assert guest_type.supports == classes
    assert isinstance(guest_type.driver(), LinuxDriver)


def test_builders_have_their_classes() -> None:
    names = {
        builder.name: type(builder.builder()).__name__
        for builder in plugin.vtorque_image_builders()
    }
    assert names == {"micro": "MicroBuilder", "debian": "DebianBuilder", "linux": "LinuxBuilder"}


def test_settings_and_resources_are_declared_on_the_node() -> None:
    assert list(node.vtorque_settings()) == [Settings]
    assert [kind.kind for kind in node.vtorque_resources()] == [
        "linux-seed",
        "linux-epilogue",
    ]


def imported_by(code: str) -> set[str]:
    """Return the modules that a new Python has after some code."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    return set(shown.stdout.split())


def test_declaring_module_imports_no_acting_module() -> None:
    found = imported_by(
        "import vtorque_linux_guest.plugin as p;"
        "list(p.vtorque_guest_types()); list(p.vtorque_image_builders())"
    )
    ours = ("vtorque_linux_guest", "vtorque_core", "pycdlib", "cryptography", "socket")
    assert {name for name in found if name.split(".")[0] in ours} <= {
        "vtorque_core",
        "vtorque_core.api",
        "vtorque_core.api.log_levels",
        "vtorque_core.api.strategies",
        "vtorque_core.api.values",
        "vtorque_core.api.vm_options",
        "vtorque_core.base",
        "vtorque_core.base.errors",
        "vtorque_core.base.locks",
        "vtorque_core.base.names",
        "vtorque_core.base.run_tool",
        "vtorque_core.base.safefs",
        "vtorque_core.base.settings",
        "vtorque_core.base.sizes",
        "vtorque_core.base.trust",
        "vtorque_linux_guest",
        "vtorque_linux_guest.plugin",
    }


@pytest.mark.parametrize("module", ["node", "job.driver"])
def test_hooks_and_wrapper_do_not_import_seed_code(module: str) -> None:
    """An epilogue only deletes one, and the wrapper waits as part of the user's time."""
    found = imported_by(f"import vtorque_linux_guest.{module}")
    heavy = {"pycdlib", "cryptography", "vtorque_core.api.job_files"}
    assert not found & (heavy | {"vtorque_linux_guest.boot.seed_contents"})


def test_health_of_agent_and_scripts(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    missing = PluginSite(
        Settings(
            agent=str(agent), prologue=str(tmp_path / "p"), epilogue="/none", precancel="/none"
        )
    )
    assert [r.status for r in node.agent_check(missing)] == ["warning"]
    agent.write_bytes(b"text")
    assert [r.status for r in node.agent_check(missing)] == ["failed"]
    agent.write_bytes(b"\x7fELF...")
    assert [r.status for r in node.agent_check(missing)] == ["ok"]
    assert [r.status for r in node.scripts_check(missing)] == ["ok", "ok", "ok"]
    (tmp_path / "p").mkdir()
    (tmp_path / "p").chmod(0o777)
    results = list(node.scripts_check(missing))
    assert [r.status for r in results] == ["failed", "ok", "ok"]
    assert results[0].fix


def test_health_connects_to_virtlogd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, conf = tmp_path / "sock", tmp_path / "qemu.conf"
    monkeypatch.setattr(node, "VIRTLOGD", place)
    monkeypatch.setattr(node, "QEMU_CONF", conf)
    site: Any = SimpleNamespace(owner=0)

    def found() -> list[tuple[str, str]]:
        return [(each.status, each.message) for each in node.virtlogd_check(site)]

    for problem in ("No such file or directory", "Connection refused"):
        ((status, message),) = found()
        assert status == "failed" and f"virtlogd does not answer at {place}" in message
        assert problem in message
        with socket.socket(socket.AF_UNIX) as listener:
            place.unlink(missing_ok=True)
            listener.bind(str(place))
            listener.listen()
            assert found() == [("ok", f"virtlogd answers at {place}")]
    conf.write_text('# stdio_handler = "logd"\nstdio_handler = "file"\n')
    assert found() == []


def test_health_reports_that_acls_are_not_evaluated() -> None:
    (result,) = node.acl_check(PluginSite(Settings()))
    assert result.status == "ok"
    assert "access control lists are not evaluated in guests" in result.message


@pytest.mark.parametrize(("most", "status"), [(100_000, "warning"), (2**63 - 1, "ok")])
def test_health_reports_too_few_descriptors_for_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, status: str
) -> None:
    (tmp_path / "file-max").write_text(f"{most}\n")
    monkeypatch.setattr(node, "FILE_MAX", tmp_path / "file-max")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    (result,) = node.descriptors_check(PluginSite(Settings()))
    assert (result.status, f"fs.file-max is {most}" in result.message) == (status, True)
    assert ("sysctl" in (result.fix or "")) is (status == "warning")


@pytest.mark.parametrize(
    ("hard", "capabilities", "warns"),
    [
        (20_000, "000001fffeffffff", True),
        (20_000, "000001ffffffffff", False),  # root raises the limit for the daemons
        (100_000, "0000000000000000", False),
        (resource.RLIM_INFINITY, "0000000000000000", False),
    ],
)
def test_health_reports_a_hard_limit_below_the_descriptors_of_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, capabilities: str, warns: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tdoctor\nCapEff:\t{capabilities}\nCapBnd:\t0\n")
    monkeypatch.setattr(node, "STATUS", tmp_path / "status")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    first, *more = node.descriptors_check(PluginSite(Settings()))
    assert bool(more) is warns
    assert (f"RLIMIT_NOFILE) is {hard}" in first.message) is warns
    assert not warns or "LimitNOFILE=100000" in str(first.fix)


NONE = PluginSite(Settings(precancel="/none"))


def test_cancellation_script_is_only_in_the_first_guest(tmp_path: Path) -> None:
    (tmp_path / "10-save").write_bytes(b"#!/bin/sh\nsave\n")
    site = PluginSite(Settings(precancel=str(tmp_path)))
    items = list(node.vtorque_guest_context(wanting(own=FileData("pre.sh", b"echo")), site))
    assert items == [
        guest_context.GuestFile("/usr/lib/vtorque/precancel", b"echo", 0o500, "job"),
        guest_context.CancelCommand(("/usr/lib/vtorque/precancel",)),
        guest_context.GuestFile(f"{SITE}/precancel.d/000", b"#!/bin/sh\nsave\n", 0o555),
        guest_context.CancelCommand((f"{SITE}/precancel.d/000",)),
    ]
    assert list(node.vtorque_guest_context(wanting(rank=1), site)) == []


def test_first_guest_cleans_a_directory_of_a_share() -> None:
    assert list(node.vtorque_guest_context(wanting(""), NONE)) == []
    assert list(node.vtorque_guest_context(wanting("/home/ada/x", rank=1), NONE)) == []
    (item,) = node.vtorque_guest_context(wanting("/home/ada/x"), NONE)
    assert isinstance(item, guest_context.RootCommand)
    assert (item.argv[-2:], item.stage) == (("/home/ada/x", "1000:100"), "ready")


@pytest.mark.parametrize(
    ("place", "share"),
    [
        ("/", {}), ("/home", {}), ("/home/adam", {}),
        ("/home/ada/x", {"readonly": True}), ("/home/ada/x", {"kind": "nfs"}),
    ],
)  # fmt: skip
def test_directory_outside_a_writable_share_is_not_cleaned(
    place: str, share: dict[str, object]
) -> None:
    with pytest.raises(Refused, match="is not in a writable share"):
        list(node.vtorque_guest_context(wanting(place, **share), NONE))


@pytest.mark.parametrize("text", ["x", "", "/home/ada/../eve", "../x"])
def test_directory_to_clean_must_be_absolute(text: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        plugin.directory(text)
    assert plugin.directory("/home//ada/./x/") == "/home/ada/x"


def test_cloud_config_is_parsed_at_submission() -> None:
    def refusals(text: bytes | None) -> list[str]:
        file = None if text is None else FileData("mine.yaml", text)
        request: Any = {plugin.CLOUD_CONFIG: file}
        return [str(refusal) for refusal in plugin.vtorque_parse_args(request)]

    assert refusals(None) == refusals(b"#cloud-config\npackages: [gdb]\n") == []
    assert refusals(b"packages: [gdb]\n") == [
        "your cloud-config: does not begin with #cloud-config"
    ]
