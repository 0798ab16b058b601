"""Doctor's checks of libvirt's confinement and of code and configs that others can write."""

from __future__ import annotations

import dataclasses
import os
import pwd
import sys

import pytest
from click.testing import CliRunner

from vtorque_admin import doctor
from vtorque_core.base.errors import ConfigError, HostFault
from vtorque_core.base.names import Paths
from vtorque_core.cli.admin import vtorque
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import Raw

FULL = {"apparmor": "", "dac": "+64055:+64055"}
CAPABILITIES = """<capabilities><host>
<secmodel><model>selinux</model><doi>0</doi><baselabel type='qemu'>x:y</baselabel></secmodel>
<secmodel><model>dac</model><doi>0</doi><baselabel type='kvm'>+1:+1</baselabel>
<baselabel type='qemu'>+64055:+109</baselabel></secmodel></host></capabilities>"""


@pytest.fixture
def site(tmp_path):
    return build(Raw(tmp_path / "vtorque.toml"), Plugins())


@pytest.fixture
def problems(site, tmp_path, monkeypatch):
    """Return a function: security models, qemu.conf -> the problems that doctor reports."""
    conf = tmp_path / "qemu.conf"
    monkeypatch.setattr(doctor, "QEMU_CONF", conf)

    def run(models, text="", **node):
        conf.write_text(text)
        monkeypatch.setattr(doctor, "security_models", lambda uri: models)
        here = dataclasses.replace(site, node=dataclasses.replace(site.node, **node))
        found = doctor.check_confinement(here)
        return [(f.status, f.message, f.fix) for f in found if f.status != "ok"]

    return run


def test_confined_node_passes(problems):
    assert problems(FULL) == []
    assert problems(FULL, '# seccomp_sandbox = 0\nuser = "libvirt-qemu"\n') == []
    assert problems({"selinux": "x", "dac": "+107:+107"}, "seccomp_sandbox = 1\n") == []


def test_missing_security_module_is_a_warning(problems):
    ((status, message, fix),) = problems({"none": "", "dac": "+64055:+64055"})
    assert status == "warning" and "a uid for each guest, but by no security module" in message
    assert "security_driver" in fix and "AppArmor" in fix


def test_guests_without_separate_uids_or_module_fail(problems):
    ((status, message, fix),) = problems({"none": "", "dac": "+64055:+64055"}, guest_uids=0)
    assert status == "failed" and "guest_uids = 0" in message
    assert "AppArmor" in fix


@pytest.mark.parametrize("label", ["+0:+0", "+0:+64055", ""])
def test_qemu_running_as_root_fails(problems, label):
    ((status, message, fix),) = problems({"apparmor": "", "dac": label})
    assert (status, message) == ("failed", "QEMU runs as root")
    assert "set user in" in fix


@pytest.mark.parametrize(
    "key", ["seccomp_sandbox", "dynamic_ownership", "clear_emulator_capabilities"]
)
def test_each_disabled_protection_is_a_warning(problems, key):
    ((status, message, fix),) = problems(FULL, f"  {key}   =  0\n")
    assert status == "warning" and message.endswith(f"{key} = 0") and "qemu.conf" in fix


def test_unreachable_libvirt_fails_the_check(site, monkeypatch):
    def fails(uri):
        raise HostFault("no answer")

    monkeypatch.setattr(doctor, "security_models", fails)
    assert [f.status for f in doctor.check_confinement(site)] == ["failed"]


def test_security_models_are_read_from_libvirt_capabilities(monkeypatch):
    monkeypatch.setattr(doctor, "call", lambda uri, what, work: CAPABILITIES)
    assert doctor.security_models("x") == {"selinux": "x:y", "dac": "+64055:+109"}


def test_code_that_others_can_write_fails(site, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/click.py").touch()
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    own, tree = doctor.require_root_owned, doctor.require_tree
    monkeypatch.setattr(doctor, "require_root_owned", lambda path, _: own(path, os.getuid()))
    monkeypatch.setattr(doctor, "require_tree", lambda path, _: tree(path, os.getuid()))
    assert [f.status for f in doctor.check_code(site)] == ["ok"]
    (tmp_path / "lib/click.py").chmod(0o666)
    ((found),) = doctor.check_code(site)
    assert found.status == "failed" and "click.py" in found.message


@pytest.mark.skipif(os.geteuid() != 0, reason="for others the config is only looked at")
@pytest.mark.parametrize(
    "argv", [("doctor",), ("setup", "install"), ("setup", "uninstall", "--purge"), ("reap",)]
)
def test_root_commands_reject_a_config_that_others_can_write(tmp_path, argv):
    """The config names directories that uninstall --purge removes."""
    victim = tmp_path / "victim"
    victim.mkdir()
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{victim}"\nrun = "{tmp_path}/run"\n')
    config.chmod(0o666)
    done = CliRunner().invoke(vtorque, [*argv, "--config", str(config)])
    assert isinstance(done.exception, ConfigError), done.output
    assert "can be written by others than root" in str(done.exception)
    assert victim.is_dir()


@pytest.mark.parametrize("enters", [True, False])
def test_home_of_a_user_is_entered_as_the_user(site, tmp_path, monkeypatch, enters):
    """Run as root without root's capabilities, so that a directory for root only stops it."""
    home = tmp_path / "home"
    home.mkdir()
    uid = 4242 if os.geteuid() == 0 else os.getuid()
    if enters:
        os.chown(home, uid, -1)
        monkeypatch.setattr(doctor.os, "geteuid", lambda: uid)
    elif os.geteuid() != 0:
        home.chmod(0)
    user = pwd.struct_passwd(("ada", "x", uid, uid, "", str(home), "/bin/sh"))
    monkeypatch.setattr(doctor.pwd, "getpwnam", lambda _: user)
    (found,) = doctor.check_user("ada")
    assert found.status == ("ok" if enters else "failed"), found
    assert enters or "Permission denied" in found.message


@pytest.mark.parametrize("mode", [0o777, 0o1777, None])
def test_state_directories_that_others_can_write_fail(site, tmp_path, mode):
    """A sticky bit does not help here; a file (None) is no directory."""
    state, run = tmp_path / "state", tmp_path / "run"
    if mode is None:
        state.touch()
    else:
        state.mkdir()
        state.chmod(mode)
    here = dataclasses.replace(site, paths=Paths(state, run))
    told = [f.message for f in doctor.check_directories(here) if f.status == "failed"]
    assert len(told) == 2 and all(str(tmp_path) in message for message in told)


def test_missing_ifb_module_fails(site, monkeypatch):
    """An ifb device that cannot be created, in a network namespace that ends with the check."""
    problems = [HostFault("ip: exit 2: Error: Unknown device type.")]

    def create(*argv):
        if argv == ("unshare", "--net", "ip", "link", "add", "type", "ifb"):
            for problem in problems:
                raise problem
        return ""

    monkeypatch.setattr(doctor, "run_tool", create)
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    monkeypatch.setattr(doctor.networks, "is_active", lambda *_: False)
    failed = [each.message for each in doctor.check_network(site) if each.status == "failed"]
    assert any("kernel module ifb" in message for message in failed)
    problems.clear()
    assert not any("ifb" in each.message for each in doctor.check_network(site))


def test_running_guest_without_packet_filter_fails(site, tmp_path, monkeypatch):
    """``nft flush ruleset`` removes the filters; a NIC without one has another name."""
    filtered, flushed = "vt525400767401", "vt525400767402"
    for name in (filtered, flushed, f"{flushed}s", "vnet0"):
        (tmp_path / name / "brport").mkdir(parents=True)
    (tmp_path / "vt525400767403").mkdir()  # not on a bridge
    tables = f"table bridge {filtered}\ntable inet {flushed}\n"
    monkeypatch.setattr(doctor, "_DEVICES", tmp_path)
    monkeypatch.setattr(doctor, "run_tool", lambda *argv: tables if argv[0] == "nft" else "")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    monkeypatch.setattr(doctor.networks, "is_active", lambda *_: False)
    failed = [each.message for each in doctor.check_network(site) if each.status == "failed"]
    (message,) = (each for each in failed if "vt5254" in each)
    assert f"{flushed} has no packet filter" in message
