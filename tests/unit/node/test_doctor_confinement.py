"""What doctor says of libvirt's confinement and of code and configs that others can write."""

from __future__ import annotations

import os
import sys

import pytest
from click.testing import CliRunner

from vtorque_core import doctor, host, trust
from vtorque_core.cli.vtorque import vtorque
from vtorque_core.config import Raw, build
from vtorque_core.errors import ConfigError, HostFault
from vtorque_core.plugins import Plugins

FULL = {"apparmor": "", "dac": "+64055:+64055"}
CAPABILITIES = """<capabilities><host>
<secmodel><model>selinux</model><doi>0</doi><baselabel type='qemu'>x:y</baselabel></secmodel>
<secmodel><model>dac</model><doi>0</doi><baselabel type='kvm'>+1:+1</baselabel>
<baselabel type='qemu'>+64055:+109</baselabel></secmodel></host></capabilities>"""


@pytest.fixture
def site(tmp_path):
    return build(Raw(tmp_path / "vtorque.toml"), Plugins())


@pytest.fixture
def said(site, tmp_path, monkeypatch):
    """Return a function: security models, qemu.conf -> what doctor does not like."""
    conf = tmp_path / "qemu.conf"
    monkeypatch.setattr(doctor, "QEMU_CONF", conf)

    def run(models, text=""):
        conf.write_text(text)
        monkeypatch.setattr(host, "security_models", lambda uri: models)
        found = doctor.check_confinement(site)
        return [(f.status, f.message, f.fix) for f in found if f.status != "ok"]

    return run


def test_a_confined_node_is_fine(said):
    assert said(FULL) == []
    assert said(FULL, '# seccomp_sandbox = 0\nuser = "libvirt-qemu"\n') == []
    assert said({"selinux": "x", "dac": "+107:+107"}, "seccomp_sandbox = 1\n") == []


def test_no_security_module_is_said(said):
    ((status, message, fix),) = said({"none": "", "dac": "+64055:+64055"})
    assert status == "warning" and "no security module" in message
    assert "security_driver" in fix and "AppArmor" in fix


@pytest.mark.parametrize("label", ["+0:+0", "+0:+64055", ""])
def test_a_qemu_of_root_fails(said, label):
    ((status, message, fix),) = said({"apparmor": "", "dac": label})
    assert (status, message) == ("failed", "QEMU runs as root")
    assert "set user in" in fix


@pytest.mark.parametrize(
    "key", ["seccomp_sandbox", "dynamic_ownership", "clear_emulator_capabilities"]
)
def test_each_protection_that_is_off_is_said(said, key):
    ((status, message, fix),) = said(FULL, f"  {key}   =  0\n")
    assert status == "warning" and message.endswith(f"{key} = 0") and "qemu.conf" in fix


def test_a_libvirt_that_does_not_answer_is_no_clean_bill(site, monkeypatch):
    def fails(uri):
        raise HostFault("no answer")

    monkeypatch.setattr(host, "security_models", fails)
    assert [f.status for f in doctor.check_confinement(site)] == ["failed"]


def test_models_are_read_from_libvirts_capabilities(monkeypatch):
    monkeypatch.setattr(host.hypervisor, "call", lambda uri, what, work: CAPABILITIES)
    assert host.security_models("x") == {"selinux": "x:y", "dac": "+64055:+109"}


def test_code_that_others_can_write_is_said(site, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/click.py").touch()
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    own, tree = trust.require_root_owned, trust.require_tree
    monkeypatch.setattr(trust, "require_root_owned", lambda path: own(path, os.getuid()))
    monkeypatch.setattr(trust, "require_tree", lambda path: tree(path, os.getuid()))
    assert [f.status for f in doctor.check_code(site)] == ["ok"]
    (tmp_path / "lib/click.py").chmod(0o666)
    ((found),) = doctor.check_code(site)
    assert found.status == "failed" and "click.py" in found.message


@pytest.mark.skipif(os.geteuid() != 0, reason="for others the config is only looked at")
@pytest.mark.parametrize(
    "argv", [("doctor",), ("setup", "install"), ("setup", "uninstall", "--purge"), ("reap",)]
)
def test_no_command_of_roots_believes_a_config_that_others_can_write(tmp_path, argv):
    """It names directories, and uninstall --purge removes those."""
    victim = tmp_path / "victim"
    victim.mkdir()
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{victim}"\nrun = "{tmp_path}/run"\n')
    config.chmod(0o666)
    done = CliRunner().invoke(vtorque, [*argv, "--config", str(config)])
    assert isinstance(done.exception, ConfigError), done.output
    assert "can be written by others than root" in str(done.exception)
    assert victim.is_dir()
