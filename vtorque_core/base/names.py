"""Every name, path, key and address that follows from a job id, and nothing that does not.

All nodes compute the same names with no exchange, and teardown finds a resource again after any
crash. Functions are pure; none looks at the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base.settings import setting

CONFIG_PATH = Path("/etc/vtorque/vtorque.toml")

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_KEY = 50  # leaves room for directories and suffixes in sun_path (108 bytes, unix(7))
_NAMESPACE = "6f8b4d0e-4b5a-5a0e-9a0c-1b6d3f0c7a11"


def absolute(value: Path | str) -> None:
    """Raise ValueError unless a path of the site config is absolute and plain."""
    path = Path(value)
    if not path.is_absolute() or ".." in path.parts or not str(path).isprintable():
        raise ValueError(f"is {str(value)!r}: write an absolute path without '..'")


def _absolute_or_none(value: str) -> None:
    if value:
        absolute(value)


@dataclass(frozen=True)
class Paths:
    """``[paths]``: where vTorque's files are; only root can write there."""

    state: Path = setting(
        Path("/var/lib/vtorque"),
        "on disk: journals, guests' disks, the site secret",
        check=absolute,
    )
    run: Path = setting(Path("/run/vtorque"), "in memory: locks, sockets, proofs", check=absolute)
    jobshell: Path = setting(
        Path("/usr/libexec/vtorque-jobshell"),
        "what batch systems start instead of a job's shell; the same on all hosts",
        check=absolute,
    )
    commands: str = setting(
        "/usr/local/bin",
        "where setup install links vsub, vmgr and vtorque, with shell completion in ../share; "
        "empty: nowhere",
        check=_absolute_or_none,
    )
    modulefiles: str = setting(
        "",
        "a directory of MODULEPATH: setup install writes the module vtorque there, which puts "
        "commands into PATH; empty: nowhere",
        check=_absolute_or_none,
    )

    @property
    def journal(self) -> Path:
        """Journals of all jobs with something acquired; root only."""
        return self.state / "journal"

    @property
    def kept(self) -> Path:
        """What stays of jobs after their end, for their owners to read: log, phases, samples."""
        return self.state / "kept"

    @property
    def secret(self) -> Path:
        """The site secret that keys, MACs and UUIDs derive from; root only, same on all nodes."""
        return self.state / "site.secret"

    @property
    def node_lock(self) -> Path:
        """The lock that the ledger and node-wide resources are changed under."""
        return self.run / "node.lock"

    def job_state(self, key: str) -> Path:
        """Directory on disk of one job attempt: overlays, seeds, console logs."""
        return self.state / "jobs" / key

    def job_run(self, key: str) -> Path:
        """Directory in memory of one job attempt: sockets and locks."""
        return self.run / "jobs" / key

    def job_shell(self, key: str) -> Path:
        """The file by whose lock root finds the job shell, where a plugin has made one."""
        return self.job_run(key) / "jobshell.lock"

    def job_lock(self, job_id: str) -> Path:
        """The lock against two prologues, or a prologue and an epilogue, of one job."""
        return self.run / "locks" / safe_name(job_id)

    def proof(self, job_id: str) -> Path:
        """What root tells the job shell: the guests are ready, or why they are not."""
        return self.run / "proof" / f"{safe_name(job_id)}.json"


@dataclass(frozen=True)
class JobAttempt:
    """One attempt of a job: whose it is, and what all that is acquired or kept for it goes by.

    ``id`` and ``attempt`` as the batch system counts; ``owner`` and ``uid``: its user. ``node``:
    the batch system's name of this node; empty where only a journal tells of the job.
    """

    id: str
    attempt: int
    owner: str
    uid: int
    node: str = ""

    @property
    def key(self) -> str:
        """The name of the attempt, as journal and directories carry it (:func:`job_key`)."""
        return job_key(self.id, self.attempt)


def boot_id() -> str:
    """Return what is different after each reboot (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def safe_name(text: str) -> str:
    """Return a file name that is unique for ``text``: itself where harmless, else with a hash.

    ``22[0].server`` and ``22_0_.server`` must not collide, hence the hash after any change.
    """
    safe = _UNSAFE.sub("_", text)
    if safe == text and len(text) <= _MAX_KEY and not text.startswith((".", "-")) and text:
        return text
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, and vsub hashes nothing

    return (
        f"j{safe[:36]}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"
    )


def job_key(job_id: str, attempt: int) -> str:
    """Return the name of one attempt of a job: journal, directories and guests carry it."""
    return f"{safe_name(job_id)}.{attempt}"


def guest_name(job_id: str, attempt: int, node: str, index: int) -> str:
    """Return the libvirt domain name of one guest. The node is the batch system's name for it."""
    return f"vt-{job_key(job_id, attempt)}-{safe_name(node)}-{index}"


def guest_uuid(guest: str) -> str:
    """Return the libvirt domain UUID of the guest of that name (RFC 9562, version 5)."""
    import uuid  # noqa: PLC0415 - 4 ms, and vsub names no guest

    return str(uuid.uuid5(uuid.UUID(_NAMESPACE), guest))


def guest_hostname(node: str, index: int, guests_per_node: int) -> str:
    """Return ``v<node>`` or, with several guests per node, ``v<node>-<index>`` (RFC 1123 label)."""
    label = re.sub(r"[^A-Za-z0-9-]", "-", node.split(".", maxsplit=1)[0]).strip("-") or "node"
    suffix = f"-{index}" if guests_per_node > 1 else ""
    return f"v{label}"[: 63 - len(suffix)].rstrip("-").lower() + suffix


def derive(secret: bytes, purpose: str, *parts: str | int, length: int = 32) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) for one purpose of one job.

    Args:
        secret: the site secret, at least 32 bytes.
        purpose: what the bytes are for, e.g. ``"ssh-user"``; no two purposes share bytes.
        parts: job id, attempt, rank; joined unambiguously.
        length: at most 8160 bytes (255 blocks).
    """
    import hmac  # noqa: PLC0415 - as hashlib above

    info = b"".join(
        len(p).to_bytes(4, "big") + p for p in (str(x).encode() for x in (purpose, *parts))
    )
    prk = hmac.digest(b"vtorque-1", secret, "sha256")
    out = block = b""
    counter = 1
    while len(out) < length:
        block = hmac.digest(prk, block + info + bytes([counter]), "sha256")
        out += block
        counter += 1
    return out[:length]


def guest_mac(secret: bytes, guest: str, nic: int, prefix: str) -> str:
    """Return the MAC of a guest's NIC: ``prefix``, its first three bytes, and three of its own."""
    return f"{prefix}:{derive(secret, 'mac', guest, nic, length=3).hex(':')}"
