"""Signatures of images by keys that the site trusts, made and verified by ssh-keygen.

A signature covers the image's name, file hashes and boot settings (PROTOCOL.sshsig of OpenSSH).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vtorque_core.api.confined_tool import path_of
from vtorque_core.base.errors import ConfigError, HostFault, Refused, printable
from vtorque_core.base.run_tool import NOBODY, guard_command, rights_of
from vtorque_core.base.trust import effective_root, require_root_owned
from vtorque_core.images.sidecar import Sidecar

NAMESPACE = "vtorque-image"  # signatures for other purposes do not count
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {"PATH": _PATH, "LC_ALL": "C", "HOME": "/nonexistent"}
_SECONDS = 20.0  # for one call, which takes milliseconds
_MAX_SIGNERS = 1 << 20  # bytes of the allowed signers file
_NOT_SIGNED = ("builder", "created", "verified", "signature")  # irrelevant, or differ by copy


def signed_bytes(sidecar: Sidecar) -> bytes:
    """Return the signed data: the sidecar without builder, times and signature, as ASCII JSON."""
    facts = {key: value for key, value in sidecar.as_json().items() if key not in _NOT_SIGNED}
    facts["files"] = {file: record.sha256 for file, record in sidecar.files.items()}
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii")


def signer_of(sidecar: Sidecar, signers: Path) -> str:
    """Return the allowed signer of an image. Raises Refused without a currently valid signature."""
    text = _read(signers)
    if not sidecar.signature:
        raise _refusal(sidecar, "the image is not signed", signers)
    with memory_files(text, sidecar.signature.encode()) as (allowed, signature):
        files = (allowed, signature)
        found = ("-s", path_of(signature), "-f", path_of(allowed))
        code, said, reason = keygen("find-principals", *found, files=files)
        names = [name for line in said.splitlines() for name in line.split(",") if name]
        for name in names if code == 0 else ():
            asked = ("-I", name, "-n", NAMESPACE, *found)
            code, _, reason = keygen("verify", *asked, files=files, stdin=signed_bytes(sidecar))
            if code == 0:
                return name
    raise _refusal(sidecar, f"the signature is not valid ({reason})", signers)


def _refusal(sidecar: Sidecar, reason: str, signers: Path) -> Refused:
    fix = f"if you trust its content, sign it as root: vmgr images sign {sidecar.name} --key FILE"
    message = f"{reason}; this site only uses images that are signed by one of {signers}"
    return Refused(message, key="img", value=sidecar.name, fix=fix)


def _read(signers: Path) -> bytes:
    try:
        require_root_owned(signers, uid=os.geteuid())
        with signers.open("rb") as file:
            text = file.read(_MAX_SIGNERS + 1)
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise HostFault(
            f"[images] signers = {signers}: {reason}; list the allowed signers in this file "
            "(ssh-keygen(1), ALLOWED SIGNERS)"
        ) from None
    if len(text) > _MAX_SIGNERS:
        raise HostFault(f"[images] signers: {signers} is longer than {_MAX_SIGNERS} bytes")
    return text


@contextmanager
def memory_files(*texts: bytes) -> Iterator[tuple[int, ...]]:
    files: list[int] = []
    try:
        for text in texts:
            files.append(os.memfd_create("vtorque-image", os.MFD_CLOEXEC))
            os.write(files[-1], text)
        yield tuple(files)
    finally:
        for file in files:
            os.close(file)


def program() -> str:
    program = shutil.which("ssh-keygen", path=_PATH)
    if program is None:
        raise HostFault(f"ssh-keygen: not found in {_PATH}: install openssh-client")
    return program


def keygen(
    action: str, *argv: str, files: tuple[int, ...], stdin: bytes = b""
) -> tuple[int, str, str]:
    rights = rights_of(NOBODY) if effective_root() else ()
    try:
        done = subprocess.run(
            guard_command(program(), "-Y", action, *argv, rights=rights),
            input=stdin, capture_output=True, env=ENV, pass_fds=files, cwd="/", timeout=_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HostFault(f"ssh-keygen -Y {action}: timed out after {_SECONDS:g} s") from None
    return done.returncode, done.stdout.decode("utf-8", "replace"), last_words(done)


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return printable(words[0] if words else f"exit code {done.returncode}", 200)
