"""The ssh keys of a job: one user key for all guests and one host key per guest.

All nodes derive the same keys from the job's secret. Any 32 bytes are an Ed25519 private key (RFC
8032). Formats: sshd(8), AUTHORIZED_KEYS and SSH_KNOWN_HOSTS FILE FORMAT; OpenSSH's PROTOCOL.key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vtorque_core.api import derive


@dataclass(frozen=True)
class KeyPair:
    """An Ed25519 key: ``private`` in OpenSSH's PEM format, ``public`` as one line."""

    public: str
    private: str = field(repr=False)


def user_key(secret: bytes) -> KeyPair:
    """Return the key of the job's user, for logins between the job's guests."""
    return _pair(derive(secret, "ssh-user"))


def host_key(secret: bytes, hostname: str) -> KeyPair:
    """Return the host key of a guest of the job."""
    return _pair(derive(secret, "ssh-host", hostname))


def authorized_keys(secret: bytes) -> str:
    """Return the authorized_keys of the job's user, with only the job's own key."""
    return f"{user_key(secret).public} vtorque-job\n"


def known_hosts(
    secret: bytes,
    peers: Iterable[tuple[str, str]],
    aliases: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Return ssh_known_hosts lines for all guests of the job.

    ``peers`` are (hostname, ip), where the ip may be empty. ``aliases`` are additional names of
    guests: (name, hostname, ip).
    """
    names = [(name, name, ip) for name, ip in peers]
    return "".join(
        f"{','.join(filter(None, (name, ip)))} {host_key(secret, hostname).public}\n"
        for name, hostname, ip in (*names, *aliases)
    )


def _pair(seed: bytes) -> KeyPair:
    # Imported here because it takes 40 ms, and a guest without sshd does not need it.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.from_private_bytes(seed)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(public=public.decode(), private=private.decode())
