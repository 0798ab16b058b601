"""Pass a job request from ``vsub`` to root on the nodes. No I/O.

Torque passes the value of ``-l other=`` to root's hooks, in argument 5 of prologues and 6 of
epilogues. Torque's buffer for all resources has 2048 bytes, and the rest is silently lost. A short
request is in ``other`` itself (``vt1:...``). A long request is in a variable of the job, and
``other`` contains its hash (``vt1v:...``), so that root detects changes by the owner. On OpenPBS
the variable always contains the request.

The owner comes from pbs_mom (Torque's second argument, OpenPBS's ``job.euser``), never from the
request.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping

from vtorque_core.api import Refused
from vtorque_core.api.submission import from_token
from vtorque_pbs.qsub_dialect import MAX_VARIABLE, VARIABLE

BUFFER = 2048  # bytes of all resources together (pbs_mom's prolog.c)
SPARE = 512  # bytes for additions of server and scheduler: neednodes, walltime, nodect ...


def hash_word(token: str) -> str:
    """Return the hash of ``token``, the request, as a word for ``-l other=``.

    This word replaces a long request, which is then in a job variable.
    """
    digest = hashlib.sha256(token.encode()).digest()
    return "vt1v:" + urlsafe_b64encode(digest).decode().rstrip("=")


def add_other_token(resources: Mapping[str, str], token: str) -> tuple[str, bool]:
    """Return the job's ``other=`` value, and whether the request goes into a job variable.

    The value is the user's ``other``, ``+``, and the request. If that is too long, the value
    contains the request's hash, and the caller must put the request into the variable.

    Args:
        resources: All ``-l`` values of the user and of vsub.
        token: The request.
    """
    mine = resources.get("other", "")
    rest = sum(len(name) + len(value) + 2 for name, value in resources.items() if name != "other")
    rest += len(resources.get("nodes", ""))  # Torque repeats it as neednodes
    for word in (token, hash_word(token)):
        value = f"{mine}+{word}" if mine else word
        if rest + len(value) + len("other=,") <= BUFFER - SPARE:
            return value, word != token
    raise Refused(
        f"the resources (-l) of this job have {rest + len(mine)} bytes",
        limit=f"{BUFFER - SPARE - 64} bytes; Torque silently drops longer lists",
        fix="request fewer resources, or shorter values",
    )


def add_variable_token(variables: str, token: str) -> str:
    """Return the value of ``-v``: ``token``, which is the request, then the user's variables.

    qsub uses only the last ``-v``. The request comes first, because after a quoted value Torque
    drops the first letter of the next variable, and the user's values may be quoted. Raises Refused
    if the value is too long.
    """
    value = ",".join(part for part in (f"{VARIABLE}={token}", variables) if part)
    if len(value.encode("utf-8", "surrogateescape")) > MAX_VARIABLE:
        raise Refused(
            f"the request and the variables (-v) of this job have {len(value)} bytes",
            limit=f"{MAX_VARIABLE} bytes",
            fix="shorten vm_prologue and vm_epilogue, for example by calling scripts in your home",
        )
    return value


def torque_word(resources: Mapping[str, str]) -> str | None:
    """Return the request, or its hash, from the value of ``-l other=``; None if not a VM job."""
    words = re.split("[+,;]", resources.get("other", ""))
    return next((word for word in words if word.startswith(("vt1:", "vt1v:"))), None)


def torque_blob(word: str, variable_list: str) -> bytes:
    """Return the request from ``word`` or, if it is a hash, from the job's variables.

    Args:
        word: From :func:`torque_word`.
        variable_list: As shown by Torque's server, which does not quote commas.

    Raises:
        Refused: The request, which is untrusted, is invalid or does not match its hash.
    """
    if word.startswith("vt1:"):
        return from_token(word)
    found = re.findall(rf"(?:^|,){VARIABLE}=([A-Za-z0-9_:-]*)(?=,|$)", variable_list, re.ASCII)
    variable = next((each for each in found if hash_word(each) == word), None)
    if variable is None:
        raise Refused(
            f"the job's request is invalid: its variable {VARIABLE} is missing or changed",
            fix="submit the job again, with vsub",
        )
    return from_token(variable)
