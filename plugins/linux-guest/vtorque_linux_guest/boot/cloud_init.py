"""The seed's user-data, meta-data and network-config for cloud-init (NoCloud).

The files contain JSON, a subset of YAML 1.2, so no value needs manual quoting. A test
checks the keys against cloud-init's schema-cloud-config-v1.json (22.4).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vtorque_core.api.guest_plan import Address, GuestPlan
from vtorque_linux_guest.boot import etc_files, keys
from vtorque_linux_guest.boot.cloud_config import HEAD
from vtorque_linux_guest.guest.agent_start import START, UNIT, agent_unit, start_script
from vtorque_linux_guest.guest.linux_family import DEBIAN, family, has_agent

APPEND = "list(append)+dict(no_replace,recurse_list)+str()"
"""cloud-init's rule for merging vTorque's keys (cloud-init docs, "Merging user data sections"):
lists are appended, and other values of the image and the site take precedence."""

STAGES = {
    "cloud_init_modules": [
        *("seed_random", "bootcmd", "write-files", "ca-certs", "set_hostname", "update_hostname"),
        *("users-groups", "ssh"),
    ],
    "cloud_config_modules": [
        *("apt-configure", "yum-add-repo", "ntp", "timezone", "runcmd"),
    ],
    "cloud_final_modules": [
        *("package-update-upgrade-install", "write-files-deferred", "scripts-user"),
        "final-message",
    ],
}
"""cloud-init modules to run, by stage, if an image built by vTorque gets more cloud-config. By
default such an image runs only the modules that the seed needs. The lists omit set-passwords, which
restarts the sshd that multi-guest jobs use, and locale, which needs Debian's package locales."""

SSHD = "/etc/ssh/sshd_config.d/00-vtorque.conf"


def config_files(guest: GuestPlan, fragments: Sequence[str]) -> dict[str, bytes]:
    """Return the files of the NoCloud data source (cloud-init docs, "NoCloud")."""
    return {
        "user-data": user_data(guest, fragments),
        "meta-data": meta_data(guest),
        "network-config": network_config(guest),
    }


def user_data(guest: GuestPlan, fragments: Sequence[str] = ()) -> bytes:
    """Return the cloud-config: host name, host key, time servers, and how the agent starts.

    With ``fragments``, return a MIME archive (cloud-init docs, "User data formats") of the
    fragments, vTorque's additions, and the keys that no fragment may override. The job's user is
    not included: setup.sh creates the user, because cloud-init cannot set a gid and rejects some
    valid user names.
    """
    added, fixed = _merged_keys(guest), _fixed_keys(guest)
    if not fragments:
        updates = {"package_update": False, "package_upgrade": False}
        return _config(fixed | added | updates).encode()
    if has_agent(guest.image):
        fixed |= STAGES
    return _archive(
        [*((text, "") for text in fragments), (_config(added), APPEND), (_config(fixed), "")]
    )


def _merged_keys(guest: GuestPlan) -> dict[str, Any]:
    """Return vTorque's cloud-config keys, which cloud-init adds to those of image and site."""
    data: dict[str, Any] = {
        # An explicit list without "default": cloud-init does not create the image's default user,
        # who has sudo.
        "users": [{"name": "root", "lock_passwd": True}],
        "write_files": [{"path": SSHD, "content": etc_files.sshd_text(), "permissions": "0644"}],
    }
    if family(guest.image) == DEBIAN:
        data["apt"] = {"preserve_sources_list": True}
    if guest.ntp:
        data["ntp"] = {"enabled": True, "servers": list(dict.fromkeys(guest.ntp))}
    if not has_agent(guest.image):
        data["write_files"] += [
            {"path": START, "content": start_script(), "permissions": "0755"},
            {"path": UNIT, "content": agent_unit(), "permissions": "0644"},
        ]
        # Any cloud image can be a guest: the seed contains the agent, and this starts it.
        data["runcmd"] = [
            ["systemctl", "daemon-reload"],
            ["systemctl", "start", "--no-block", "vtorque-agent.service"],
        ]
    return data


def _fixed_keys(guest: GuestPlan) -> dict[str, Any]:
    """Return vTorque's cloud-config keys, which override those of the image and the site."""
    key = keys.host_key(guest.secret, guest.hostname)
    return {
        "hostname": guest.hostname,
        "preserve_hostname": False,
        "manage_etc_hosts": False,
        "disable_root": True,
        "ssh_pwauth": False,
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": key.private, "ed25519_public": key.public},
        "ssh_publish_hostkeys": {"enabled": False},
        "no_ssh_fingerprints": True,
    }


def _config(data: Mapping[str, Any]) -> str:
    return f"{HEAD}\n{_json(data).decode()}"


def _archive(parts: Iterable[tuple[str, str]]) -> bytes:
    """Return (text, merge type) pairs as a MIME archive (RFC 2046, 5.1.3)."""
    from email.mime.multipart import MIMEMultipart  # noqa: PLC0415 - few sites have fragments
    from email.mime.text import MIMEText  # noqa: PLC0415 - as above

    archive = MIMEMultipart(boundary="==vtorque==")  # in base64 no line begins with a dash
    for text, merged in parts:
        part = MIMEText(text, "cloud-config", "utf-8")
        if merged:
            part["Merge-Type"] = merged
        archive.attach(part)
    return archive.as_bytes()


def meta_data(guest: GuestPlan) -> bytes:
    """Return meta-data with an instance-id that is unique to this guest.

    If an instance-id is reused with another MAC address, the guest stays offline. In images with a
    built-in agent, only cloud-init's first stage runs before READY. ``dsmode: local`` makes that
    stage do everything (cloud-init docs, "NoCloud").
    """
    data = {"instance-id": f"{guest.name}-{guest.job.attempt}", "local-hostname": guest.hostname}
    if has_agent(guest.image):
        data["dsmode"] = "local"
    return _json(data)


def network_config(guest: GuestPlan) -> bytes:
    """Return network-config: one interface per NIC, matched by its MAC address.

    If a network other than the first uses DHCP, the format is version 2, because only version 2 can
    ignore the routes of that network. Otherwise it is version 1, which all renderers support.
    """
    if any(address.network and not address.ip and address.dhcp for address in guest.addresses):
        return _json({"version": 2, "ethernets": dict(_ethernets(guest))})
    config = [_physical(number, address) for number, address in enumerate(guest.addresses)]
    return _json({"version": 1, "config": config or "disabled"})


def _physical(number: int, address: Address) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "physical",
        "name": f"eth{number}",
        "mac_address": address.mac.lower(),
        "subnets": [_subnet(address)],
    }
    if address.mtu:
        found["mtu"] = address.mtu
    return found


def _subnet(address: Address) -> dict[str, Any]:
    if address.ip is None:
        return {"type": "dhcp4" if address.dhcp else "manual"}
    subnet: dict[str, Any] = {"type": "static", "address": f"{address.ip}/{address.prefix}"}
    if address.gateway and address.metric is None:
        subnet["gateway"] = address.gateway
    elif address.gateway:
        subnet["routes"] = [
            {"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": address.gateway}  # noqa: S104
            | {"metric": address.metric}
        ]
    if address.dns:
        subnet["dns_nameservers"] = list(address.dns)
    if address.search:
        subnet["dns_search"] = list(address.search)
    return subnet


def _ethernets(guest: GuestPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, address in enumerate(guest.addresses):
        name = f"eth{number}"
        found: dict[str, Any] = {
            "match": {"macaddress": address.mac.lower()},
            "set-name": name,
            "dhcp4": address.ip is None and address.dhcp,
        }
        if address.ip is not None:
            found["addresses"] = [f"{address.ip}/{address.prefix}"]
        elif address.dhcp and address.network:
            found["dhcp4-overrides"] = {"use-routes": False, "use-dns": False}
        if address.gateway:
            metric = {} if address.metric is None else {"metric": address.metric}
            found["routes"] = [{"to": "0.0.0.0/0", "via": address.gateway, **metric}]
        servers = {"addresses": list(address.dns), "search": list(address.search)}
        if any(servers.values()):
            found["nameservers"] = {name: each for name, each in servers.items() if each}
        if address.mtu:
            found["mtu"] = address.mtu
        yield name, found


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"
