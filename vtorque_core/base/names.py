"""Names, paths, keys and addresses that all nodes derive from a job id. Pure functions."""

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
        "program that batch systems start instead of the job's shell; same path on all hosts",
        check=absolute,
    )
    commands: str = setting(
        "/usr/local/bin",
        "directory where setup install links vsub, vmgr and vtorque, with shell "
        "completion in ../share; empty: none",
        check=_absolute_or_none,
    )
    modulefiles: str = setting(
        "",
        "directory of MODULEPATH where setup install writes the module vtorque, "
        "which adds the commands to PATH; empty: none",
        check=_absolute_or_none,
    )

    @property
    def journal(self) -> Path:
        """Journals of all jobs that hold resources; root only."""
        return self.state / "journal"

    @property
    def kept(self) -> Path:
        """Records of jobs for their owners: log, phases, samples."""
        return self.state / "kept"

    @property
    def secret(self) -> Path:
        """Root-only site secret from which keys, MACs and UUIDs derive; the same on all nodes."""
        return self.state / "site.secret"

    @property
    def node_lock(self) -> Path:
        return self.run / "node.lock"

    def job_state(self, key: str) -> Path:
        """Directory on disk of a job attempt: overlays, seeds, console logs."""
        return self.state / "jobs" / key

    def job_run(self, key: str) -> Path:
        """Directory in memory of a job attempt: sockets and locks."""
        return self.run / "jobs" / key

    def job_shell(self, key: str) -> Path:
        """Lock file by which root finds the job shell. It exists only if a plugin created it."""
        return self.job_run(key) / "jobshell.lock"

    def job_lock(self, job_id: str) -> Path:
        """Lock file that excludes concurrent prologues and epilogues of a job."""
        return self.run / "locks" / safe_name(job_id)

    def proof(self, job_id: str) -> Path:
        return self.run / "proof" / f"{safe_name(job_id)}.json"


@dataclass(frozen=True)
class JobAttempt:
    """One attempt of a job, to which all acquired resources and records belong.

    ``node`` is this node's name in the batch system, if known.
    """

    id: str
    attempt: int
    owner: str
    uid: int
    node: str = ""

    @property
    def key(self) -> str:
        return job_key(self.id, self.attempt)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def safe_name(text: str) -> str:
    """Return ``text`` if it is a safe file name, otherwise a unique safe name with a hash.

    The hash distinguishes ``22[0].server`` from ``22_0_.server``.
    """
    safe = _UNSAFE.sub("_", text)
    if safe == text and len(text) <= _MAX_KEY and not text.startswith((".", "-")) and text:
        return text
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, and vsub hashes nothing

    return (
        f"j{safe[:36]}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"
    )


def job_key(job_id: str, attempt: int) -> str:
    return f"{safe_name(job_id)}.{attempt}"


def guest_name(job_id: str, attempt: int, node: str, index: int) -> str:
    return f"vt-{job_key(job_id, attempt)}-{safe_name(node)}-{index}"


def guest_uuid(guest: str) -> str:
    import uuid  # noqa: PLC0415 - 4 ms, and vsub names no guest

    return str(uuid.uuid5(uuid.UUID(_NAMESPACE), guest))


def guest_hostname(node: str, index: int, guests_per_node: int) -> str:
    """Return ``v<node>`` or, with several guests per node, ``v<node>-<index>`` (RFC 1123 label)."""
    label = re.sub(r"[^A-Za-z0-9-]", "-", node.split(".", maxsplit=1)[0]).strip("-") or "node"
    suffix = f"-{index}" if guests_per_node > 1 else ""
    return f"v{label}"[: 63 - len(suffix)].rstrip("-").lower() + suffix


def derive(secret: bytes, purpose: str, *parts: str | int, length: int = 32) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) for one purpose of one job.

    ``secret`` is the site secret. ``parts`` are, for example, job id and rank.
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
    return f"{prefix}:{derive(secret, 'mac', guest, nic, length=3).hex(':')}"


def tap_name(mac: str) -> str:
    """Return the tap device name for a MAC: 14 characters."""
    return "vt" + mac.lower().replace(":", "")
