"""The guests' libvirt networks that ``vtorque setup`` makes, and removes, in a test driver."""

import os
import subprocess
from pathlib import Path

import pytest

from vtorque_admin import networks, setup
from vtorque_core.base import hypervisor
from vtorque_core.config import directories
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml

pytestmark = pytest.mark.integration

URI = "test:///default"
SCHEMA = Path("/usr/share/libvirt/schemas/network.rng")
SITE = """
[node]
libvirt_uri = "test:///default"
[paths]
state = "{top}/state"
run = "{top}/run"
[images]
pool = "{top}/images"
[network]
source = "first"
[networks.mpi]
kind = "network"
source = "between"
subnet = "10.99.0.0/16"
mtu = 9000
[networks.out]
kind = "network"
source = "out&side"
subnet = "10.98.0.0/16"
gateway = "10.98.0.1"
[networks.plain]
kind = "network"
source = "plain"
addressing = "none"
[networks.again]
kind = "network"
source = "between"
addressing = "none"
[networks.wire]
kind = "bridge"
source = "br9"
addressing = "none"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return the site, on a node whose own files and packet filter are not changed."""
    hypervisor.close()
    monkeypatch.setattr(setup, "_MACS", tmp_path)
    monkeypatch.setattr(os, "chown", lambda *_: None)
    monkeypatch.setattr(setup.netfilter, "load", loaded := [].append)
    monkeypatch.setattr(setup.netfilter, "remove_guard", lambda _: None)
    monkeypatch.setattr(setup.kvm, "choose", lambda *_: None)
    monkeypatch.setattr(directories, "is_correct", lambda *_: True)
    raw = parse_toml(SITE.format(top=tmp_path).encode(), tmp_path / "vtorque.toml")
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    made = build(raw, Plugins())
    made.paths.secret.touch()
    yield made, loaded.__self__
    hypervisor.close()


def active(*names):
    return [name for name in names if hypervisor.network_xml(URI, name) is not None]


ALL = ("first", "between", "out&side", "plain", "br9")


def test_libvirt_networks_are_created_once_and_removed(site, tmp_path):
    made, guards = site
    said = []
    setup.install(made, said.append)
    assert active(*ALL) == list(ALL[:-1])
    starts = [f"start network {name}" for name in ALL[:-1]]
    assert [line for line in said if "network" in line] == starts
    assert len(guards) == 4
    said.clear()
    setup.install(made, said.append)
    assert not [line for line in said if "start" in line]
    setup.uninstall(made, tmp_path / "vtorque.toml", said.append)
    assert active(*ALL) == []


def test_network_is_started_and_removed_idempotently(site):
    made, _ = site
    for _ in range(2):
        networks.start(made, made.network)
    assert networks.is_active(made, "first") and active("first") == ["first"]
    assert networks.remove(made, made.network) and networks.remove(made, made.network)
    assert not networks.is_active(made, "first") and active("first") == []


def test_network_defined_by_the_site_is_started_and_kept(site, tmp_path):
    made, _ = site
    own = (
        "<network><name>between</name><bridge name='own0'/>"
        "<ip address='10.7.0.1' netmask='255.255.0.0'/></network>"
    )
    hypervisor.call(URI, "define", lambda c: c.networkDefineXML(own))
    setup.install(made, lambda _: None)
    assert "10.7.0.1" in hypervisor.network_xml(URI, "between")
    setup.uninstall(made, tmp_path / "vtorque.toml", lambda _: None)
    assert active(*ALL) == ["between"]


def test_libvirt_networks_match_the_schema(site, tmp_path):
    made, _ = site
    texts = {n.source: networks.definition(n) for n in networks.libvirt_networks(made)}
    for name, text in texts.items():
        (tmp_path / "network.xml").write_text(text)
        done = subprocess.run(
            ["xmllint", "--noout", "--relaxng", SCHEMA, tmp_path / "network.xml"],
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (name, done.stderr)
    assert ["forward" in text for text in texts.values()] == [True, False, True, False]
    assert "<mtu size='9000'/>" in texts["between"]
    assert "<ip " not in texts["plain"]
