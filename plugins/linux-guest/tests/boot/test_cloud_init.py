"""Data for cloud-init, for both families, checked against cloud-init's schema."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from email import message_from_bytes
from importlib.resources import as_file, files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import sample_guests
import sparing
from doc_blocks import blocks
from sample_guests import DEBIAN, PLAN, ROCKY
from vtorque_core.api import JobAttempt
from vtorque_core.api.guest_plan import Address
from vtorque_linux_guest.boot import cloud_init, keys
from vtorque_linux_guest.guest import agent_start

BUILT = replace(ROCKY, labels={"family": "redhat", "agent": "builtin"})
PYTHON = "usr/lib/python3/dist-packages"
SCHEMA = "cloudinit/config/schemas/schema-cloud-config-v1.json"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cloud-init's Debian package, which is unpacked and not installed."""
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
    return work / "unpacked"


@pytest.fixture(scope="session")
def schema(package: Path) -> Any:
    """cloud-init's schema."""
    return json.loads((package / PYTHON / SCHEMA).read_text())


@pytest.fixture
def mergers(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """cloud-init's own merging."""
    monkeypatch.syspath_prepend(package / PYTHON)
    yield importlib.import_module("cloudinit.mergers")
    for name in [name for name in sys.modules if name.split(".")[0] == "cloudinit"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def jsonschema() -> Iterator[ModuleType]:
    """The module, without grammars of addresses: they take seconds to build, and no test uses them.

    Imported late, by its users only.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rfc3987_syntax", None)
        yield importlib.import_module("jsonschema")


NTP = ("ntp1.example.org", "10.0.0.123")


def parsed(data: bytes) -> Any:
    """Parse it like cloud-init: YAML."""
    return yaml.safe_load(data)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("image", "ntp"),
    sparing.each(
        2,
        [
            *((DEBIAN, NTP), (DEBIAN, ())),
            *((ROCKY, ()), (ROCKY, NTP)),
            *((BUILT, ()), (BUILT, NTP)),
        ],
    ),
)
def test_user_data_is_valid_cloud_config(plan, schema, jsonschema, image, ntp) -> None:
    data = cloud_init.user_data(plan(image=image, ntp=ntp))
    assert data.startswith(b"#cloud-config\n")
    jsonschema.Draft4Validator(schema).validate(parsed(data))


@pytest.mark.integration
def test_cloud_config_in_the_manuals_is_valid(schema, jsonschema) -> None:
    """The examples are in doc/guests.md, doc/pool.md and doc/software.md."""
    shown = [b.text for b in blocks("yaml") if b.text.startswith("#cloud-config\n")]
    assert len(shown) == 4
    for text in shown:
        jsonschema.Draft4Validator(schema).validate(yaml.safe_load(text))


@pytest.mark.integration
def test_schema_rejects_invalid_user_data(plan, schema, jsonschema) -> None:
    data = parsed(cloud_init.user_data(plan(image=DEBIAN))) | {"ssh_keys": {"bad": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(schema).validate(data)


OF_IMAGE = "#cloud-config\npackages: [gdb]\ntimezone: UTC\nruncmd: [image]\n"
OF_SITE = """\
#cloud-config
merge_how: "list(append)+dict(no_replace,recurse_list)+str()"
hostname: other
ssh_pwauth: true
disable_root: false
timezone: Europe/Berlin
users: [monitor]
packages: [strace]
apt: {preserve_sources_list: false}
write_files: [{path: /etc/motd, content: "Grüße"}]
runcmd: [[site, "1"]]
"""


def merged(data: bytes, mergers: ModuleType) -> dict[str, Any]:
    """Merge like cloud-init's handlers/cloud_config.py, by its own mergers."""
    found: dict[str, Any] = {}
    for part in message_from_bytes(data).get_payload():
        assert part.get_content_type() == "text/cloud-config"
        payload = yaml.safe_load(part.get_payload(decode=True))
        how = mergers.dict_extract_mergers(payload)
        how += mergers.string_extract_mergers(part.get("Merge-Type", ""))
        how = how or mergers.string_extract_mergers("dict(replace)+list()+str()")
        found = mergers.construct(how).merge(found, payload)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("image", [DEBIAN, ROCKY])
def test_fragments_are_merged_by_cloud_init(plan, mergers, schema, jsonschema, image) -> None:
    """Each fragment has its own merge rules; vTorque's part is last and extends lists."""
    own = parsed(cloud_init.user_data(plan(image=image)))
    found = merged(cloud_init.user_data(plan(image=image), (OF_IMAGE, OF_SITE)), mergers)
    jsonschema.Draft4Validator(schema).validate(found)
    for key in ("hostname", "ssh_pwauth", "disable_root", "manage_etc_hosts"):
        assert found[key] == own[key]
    assert found["ssh_keys"]["ed25519_public"] == own["ssh_keys"]["ed25519_public"]
    assert found["timezone"] == "UTC", "the site's merge_how does not keep the image's value"
    assert found["packages"] == ["gdb", "strace"]
    assert found["users"] == ["monitor", *own["users"]]
    assert found["write_files"] == [{"path": "/etc/motd", "content": "Grüße"}, *own["write_files"]]
    assert found["runcmd"] == ["image", ["site", "1"], *own.get("runcmd", ())]
    if image is DEBIAN:
        assert found["apt"] == {"preserve_sources_list": False}
        assert "scripts-user" in found["cloud_final_modules"]
    else:
        assert "cloud_final_modules" not in found, "the image's module list was replaced"


@pytest.mark.integration
def test_without_merge_how_a_later_fragment_replaces_keys(plan, mergers) -> None:
    later = "#cloud-config\npackages: [strace]\n"
    found = merged(cloud_init.user_data(plan(image=DEBIAN), (OF_IMAGE, later)), mergers)
    assert (found["packages"], found["runcmd"]) == (["strace"], ["image"])


@pytest.mark.integration
def test_modules_allowed_for_users_are_in_the_schema(schema, jsonschema) -> None:
    jsonschema.Draft4Validator(schema).validate(yaml.safe_load(sample_guests.USER_CLOUD_CONFIG))


@pytest.mark.parametrize("image", [DEBIAN, ROCKY])
def test_user_data_grants_no_sudo_password_or_root_login(plan, image) -> None:
    data = parsed(cloud_init.user_data(plan(image=image)))
    assert data["users"] == [{"name": "root", "lock_passwd": True}]
    assert (data["disable_root"], data["ssh_pwauth"]) == (True, False)
    assert "sudo" not in str(data)


def test_host_key_is_derived_from_the_secret(plan) -> None:
    key = keys.host_key(PLAN.secret, "vn1")
    data = parsed(cloud_init.user_data(plan(image=DEBIAN)))
    assert data["ssh_keys"]["ed25519_public"] == key.public
    assert keys.user_key(PLAN.secret).private not in str(data)


def test_sshd_is_restricted_before_it_starts(plan) -> None:
    (written,) = parsed(cloud_init.user_data(plan(image=DEBIAN)))["write_files"]
    assert written["path"] == "/etc/ssh/sshd_config.d/00-vtorque.conf"
    assert "PermitRootLogin no\nPasswordAuthentication no\n" in written["content"]
    assert "AuthorizedKeysFile /etc/vtorque/ssh/%u/authorized_keys\n" in written["content"]


def test_image_without_an_agent_gets_one(plan) -> None:
    assert "runcmd" not in parsed(cloud_init.user_data(plan(image=DEBIAN)))
    data = parsed(cloud_init.user_data(plan(image=ROCKY)))
    written = {item["path"]: item["content"] for item in data["write_files"]}
    assert written[agent_start.START] == agent_start.start_script()
    assert written[agent_start.UNIT] == agent_start.agent_unit()
    assert data["runcmd"][-1] == ["systemctl", "start", "--no-block", "vtorque-agent.service"]


@pytest.mark.parametrize("shell", ["/bin/dash", "/bin/busybox"])
@pytest.mark.parametrize("name", ["vtorque-start", "vtorque-waits"])
def test_scripts_of_units_are_posix_shell(shell: str, name: str) -> None:
    words = [shell, "sh", "-n"] if shell.endswith("busybox") else [shell, "-n"]
    with as_file(files("vtorque_linux_guest.guest") / name) as script:
        subprocess.run([*words, script], check=True, timeout=180)


def test_instance_id_is_unique_per_attempt(plan) -> None:
    first = parsed(cloud_init.meta_data(plan(image=DEBIAN)))
    second = parsed(
        cloud_init.meta_data(plan(image=DEBIAN, job=JobAttempt("42.srv", 1, "alice", 1000, "n1")))
    )
    assert first["local-hostname"] == second["local-hostname"] == "vn1"
    assert first["instance-id"] != second["instance-id"]


def test_only_images_built_by_vtorque_use_the_first_stage(plan) -> None:
    assert parsed(cloud_init.meta_data(plan(image=DEBIAN)))["dsmode"] == "local"
    assert "dsmode" not in parsed(cloud_init.meta_data(plan(image=ROCKY)))


def test_static_address_is_in_the_network_config(plan) -> None:
    assert parsed(cloud_init.network_config(plan(image=DEBIAN))) == {
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
                        "dns_search": ["a.example", "b"],
                    }
                ],
            }
        ],
    }


def test_network_config_requests_dhcp_or_is_disabled(plan) -> None:
    dhcp = parsed(cloud_init.network_config(plan(addresses=(Address("52:54:00:01:02:03"),))))
    assert dhcp["config"][0]["subnets"] == [{"type": "dhcp4"}]
    assert parsed(cloud_init.network_config(plan(addresses=()))) == {
        "version": 1,
        "config": "disabled",
    }
