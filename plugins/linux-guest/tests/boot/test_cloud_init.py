"""What cloud-init gets, for both families, checked against cloud-init's own schema."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sample_guests import DEBIAN, PLAN, ROCKY
from vtorque_core.api_node import Address
from vtorque_linux_guest import cloudinit, keys

BUILT = replace(ROCKY, labels={"family": "redhat", "agent": "builtin"})
SCHEMA = "usr/lib/python3/dist-packages/cloudinit/config/schemas/schema-cloud-config-v1.json"


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """cloud-init's schema out of its Debian package, which is unpacked and not installed."""
    work = tmp_path_factory.mktemp("cloud-init")
    for command in (
        ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "cloud-init"],
        ["sh", "-c", "exec dpkg-deb -x cloud-init_*.deb unpacked"],
    ):
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            pytest.fail(f"needs Debian's package cloud-init (apt-get update first?): {done.stderr}")
    loaded: dict[str, Any] = json.loads((work / "unpacked" / SCHEMA).read_text())
    yield loaded


def parsed(data: bytes) -> Any:
    """As cloud-init reads it: YAML."""
    return yaml.safe_load(data)


@pytest.mark.integration
@pytest.mark.parametrize("image", [DEBIAN, ROCKY, BUILT], ids=["debian", "redhat", "recipe"])
@pytest.mark.parametrize("ntp", [(), ("ntp1.example.org", "10.0.0.123")], ids=["", "ntp"])
def test_user_data_is_valid_cloud_config(plan, schema, image, ntp) -> None:
    data = cloudinit.user_data(plan(image=image, ntp=ntp))
    assert data.startswith(b"#cloud-config\n")
    jsonschema.Draft4Validator(schema).validate(parsed(data))


@pytest.mark.integration
def test_the_schema_does_reject(plan, schema) -> None:
    data = parsed(cloudinit.user_data(plan(image=DEBIAN))) | {"ssh_keys": {"bad": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(schema).validate(data)


@pytest.mark.parametrize("image", [DEBIAN, ROCKY])
def test_nobody_gets_sudo_a_password_or_root(plan, image) -> None:
    data = parsed(cloudinit.user_data(plan(image=image)))
    assert data["users"] == [{"name": "root", "lock_passwd": True}]
    assert (data["disable_root"], data["ssh_pwauth"]) == (True, False)
    assert "sudo" not in str(data)


def test_host_key_is_the_derived_one(plan) -> None:
    key = keys.host_key(PLAN.secret, "vn1")
    data = parsed(cloudinit.user_data(plan(image=DEBIAN)))
    assert data["ssh_keys"]["ed25519_public"] == key.public
    assert keys.user_key(PLAN.secret).private not in str(data)


def test_sshd_is_closed_before_it_starts(plan) -> None:
    (written,) = parsed(cloudinit.user_data(plan(image=DEBIAN)))["write_files"]
    assert written["path"] == "/etc/ssh/sshd_config.d/00-vtorque.conf"
    assert "PermitRootLogin no\nPasswordAuthentication no\n" in written["content"]
    assert "AuthorizedKeysFile /etc/vtorque/ssh/%u/authorized_keys\n" in written["content"]


def test_an_image_without_agent_gets_it(plan) -> None:
    assert "runcmd" not in parsed(cloudinit.user_data(plan(image=DEBIAN)))
    data = parsed(cloudinit.user_data(plan(image=ROCKY)))
    written = {item["path"]: item["content"] for item in data["write_files"]}
    assert written[cloudinit.START] == cloudinit.start_script()
    assert written[cloudinit.UNIT] == cloudinit.agent_unit()
    assert data["runcmd"][-1] == ["systemctl", "start", "--no-block", "vtorque-agent.service"]


@pytest.mark.parametrize("shell", ["/bin/dash", "/bin/busybox"])
def test_start_script_is_posix_shell(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "start"
    script.write_text(cloudinit.start_script())
    words = [shell, "sh", "-n"] if shell.endswith("busybox") else [shell, "-n"]
    subprocess.run([*words, script], check=True, timeout=20)


def test_instance_id_is_unique_per_attempt(plan) -> None:
    first = parsed(cloudinit.meta_data(plan(image=DEBIAN)))
    second = parsed(cloudinit.meta_data(plan(image=DEBIAN, attempt=1)))
    assert first["local-hostname"] == second["local-hostname"] == "vn1"
    assert first["instance-id"] != second["instance-id"]


def test_only_our_own_images_are_set_up_in_the_first_stage(plan) -> None:
    assert parsed(cloudinit.meta_data(plan(image=DEBIAN)))["dsmode"] == "local"
    assert "dsmode" not in parsed(cloudinit.meta_data(plan(image=ROCKY)))


def test_static_address(plan) -> None:
    assert parsed(cloudinit.network_config(plan(image=DEBIAN))) == {
        "version": 1,
        "config": [
            {
                "type": "physical",
                "name": "eth0",
                "mac_address": "52:54:00:01:02:03",
                "subnets": [
                    {
                        "type": "static",
                        "address": "10.86.0.16/16",
                        "gateway": "10.86.0.1",
                        "dns_nameservers": ["10.0.0.53"],
                    }
                ],
            }
        ],
    }


def test_dhcp_and_no_network(plan) -> None:
    dhcp = parsed(cloudinit.network_config(plan(addresses=(Address("52:54:00:01:02:03"),))))
    assert dhcp["config"][0]["subnets"] == [{"type": "dhcp4"}]
    assert parsed(cloudinit.network_config(plan(addresses=()))) == {
        "version": 1,
        "config": "disabled",
    }
