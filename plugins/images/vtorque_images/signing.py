"""Sign images, and verify signatures, also of keys that the site does not trust."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vtorque_core.api import Refused, printable
from vtorque_core.api.confined_tool import path_of
from vtorque_core.live.images import MAX_SIGNATURE, Sidecar, signature, signed_bytes


def check_well_made(sidecar: Sidecar, text: str) -> None:
    """Check that ``text`` is a valid signature of this image. The key need not be trusted.

    Raises Refused, HostFault.
    """
    if not 0 < len(text) <= MAX_SIGNATURE or not text.isascii():
        raise Refused(f"is not a signature of ssh-keygen with 1 to {MAX_SIGNATURE} bytes")
    with signature.memory_files(text.encode()) as (file,):
        asked = ("-n", signature.NAMESPACE, "-s", path_of(file))
        code, _, reason = signature.keygen(
            "check-novalidate", *asked, files=(file,), stdin=signed_bytes(sidecar)
        )
    if code != 0:
        raise Refused(f"is not a valid signature of the current image {sidecar.name} ({reason})")


def sign(sidecar: Sidecar, key: Path) -> str:
    """Return the signature of an image by a private key. Privileges: a user who can read the key.

    ssh-keygen asks for a passphrase on the terminal. Raises HostFault, or Refused with the message
    of ssh-keygen.
    """
    named = ("-n", signature.NAMESPACE, "-f")
    try:
        done = subprocess.run(
            [signature.program(), "-Y", "sign", "-q", *named, str(key.absolute())],
            input=signed_bytes(sidecar),
            capture_output=True,
            env=signature.ENV,
            check=False,
        )
    except ValueError:
        raise Refused(f"{printable(str(key))}: is not the path of a key") from None
    text = done.stdout.decode("ascii", "replace")
    if done.returncode != 0 or not text:
        raise Refused(
            f"{printable(str(key))}: ssh-keygen cannot sign with this key: "
            f"{signature.last_words(done)}"
        )
    return text
