"""Communication between nodes: real processes in place of ssh, and their answers."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from quick_python import shebang
from vtorque_core.api import HostFault, Refused
from vtorque_survive import guest_migration, migration, reach
from vtorque_survive.settings import Settings

CONFIG = Path("/etc/vtorque/vtorque.toml")


@pytest.fixture
def way(tmp_path):
    """Return settings by which a node is a Python program, and that program's file."""
    program = tmp_path / "to"

    def leads(body):
        program.write_text(f"{shebang()}\nimport json, os, sys\n{body}\n")
        program.chmod(0o755)
        return Settings(remote_command=f"{program} {{node}}")

    return leads


def test_answer_of_another_node_is_parsed(way):
    echo = way("print(json.dumps({'answer': [sys.argv[1:3], json.load(sys.stdin)]}))")
    (node, _), what = reach.ask(CONFIG, echo, "n3", {"ask": "resolve"})
    assert (node, what) == ("n3", {"ask": "resolve"})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit('ssh: no route\\nto host')", "n3 did not answer the request: to host"),
        ("sys.exit(9)", "n3 did not answer the request: exit code 9"),
        ("print('no JSON')", "n3 did not answer the request: Expecting value"),
        ("print('{}')", "n3 did not answer the request: 'answer'"),
    ],
)
def test_invalid_answer_is_reported(way, body, why):
    with pytest.raises(HostFault, match=why):
        reach.ask(CONFIG, way(body), "n3", {})


def test_unresponsive_node_times_out(way, monkeypatch):
    monkeypatch.setattr(reach, "_ANSWER", 0.2)
    with pytest.raises(HostFault, match="no answer within"):
        reach.ask(CONFIG, way("import time; time.sleep(600)"), "n3", {})


def test_bridge_connects_to_libvirtd_of_another_node(way, tmp_path):
    carries = way("print(sys.argv[1:], flush=True)\nsys.stdout.write(sys.stdin.readline())")
    place = tmp_path / "bridge"
    with reach.Bridge(carries, "n3", "qemu:///system", place) as bridge:
        assert bridge.uri == f"qemu+unix:///system?socket={place}/libvirt"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(place / "libvirt"))
            connection.sendall(b"hello\n")
            with connection.makefile("rb") as said:
                assert said.read() == b"['n3', 'virt-ssh-helper', 'qemu:///system']\nhello\n"
    assert not place.exists()


@pytest.mark.parametrize("uri", ["qemu+ssh://n3/system", "qemu:///system?socket=x", "/run/libvirt"])
def test_unsupported_libvirt_uri_is_refused(tmp_path, uri):
    with pytest.raises(Refused, match="migrated with a URI like qemu:///system"):
        reach.Bridge(Settings(remote_command="ssh {node}"), "n3", uri, tmp_path / "bridge")


@pytest.fixture
def receiver(way, monkeypatch):
    """Return a function that lets another node receive, like a program does."""
    place = SimpleNamespace(hook=lambda word: ("vtorque", "hook", word))
    monkeypatch.setattr(migration.service, "installation_of", lambda _: place)
    monkeypatch.setattr(migration, "_READY", 30.0)

    def receives(body):
        site = {Settings: way(f"told = json.loads(sys.stdin.readline())\n{body}")}
        over, _ = os.pipe()
        here = migration.ThisNode(
            CONFIG, site, None, guest_migration.MigrationNode("test:///default", 1.0)
        )
        return migration._receiver(here, "n3", {"job": "42", "guests": [{"uuid": "a"}]}, over)

    return receives


def test_receiver_returns_xml_and_waits_for_the_end(receiver):
    lines = "print(json.dumps({'xml': {'a': told['job']}}), flush=True)\nprint('{\"here\": true}')"
    with receiver(lines) as xml:
        assert xml == {"a": "42"}


@pytest.mark.parametrize(
    ("body", "error", "why"),
    [
        ('print(\'{"failed": "no room"}\')', Refused, "n3: no room"),
        (
            "sys.exit('Host key\\nverification failed.')",
            HostFault,
            "on n3 exited: verification",
        ),
        ("pass", HostFault, "on n3 exited: no message"),
        ("print('motd')", HostFault, "invalid answer from n3: motd"),
        ("print('{}')", HostFault, "n3 did not send valid domain XML"),
        ("print(json.dumps({'xml': {'b': 'x'}}))", HostFault, "n3 did not send valid domain XML"),
    ],
)
def test_receiver_that_fails_to_prepare_reports_the_reason(receiver, body, error, why):
    with pytest.raises(error, match=why), receiver(body):
        raise AssertionError


@pytest.mark.parametrize("lines", [
    "print(json.dumps({'xml': {'a': 'x'}}), flush=True)\nprint('{\"failed\": \"silent\"}')",
    "print('{\"xml\": {\"a\": \"x\"}}\\n{\"failed\": \"silent\"}')",  # both are read at once
])  # fmt: skip
def test_receiver_that_fails_later_reports_the_reason(receiver, lines):
    with pytest.raises(Refused, match="n3: silent"), receiver(lines) as xml:
        assert xml == {"a": "x"}
