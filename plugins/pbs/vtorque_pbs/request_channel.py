"""How a request travels from ``vsub`` to root on the nodes. Pure.

Torque's root hooks get ``-l other=`` as part of their fifth argument (argv 6 of epilogues), in a
buffer of 2048 bytes for all resources where an item that does not fit vanishes silently. So
``other`` has the whole request if it is short (``vt1:...``), else the hash of one that is in the
job's variables (``vt1v:...``): the owner can change a variable, but not so that root believes it.
On OpenPBS the variable always has the request itself.

Whose job it is pbs_mom says to the hooks (Torque's second argument, OpenPBS' ``job.euser``), never
the request.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping

from vtorque_core.api import Refused
from vtorque_core.api.submission import from_token
from vtorque_pbs.qsub_dialect import MAX_VARIABLE, VARIABLE

BUFFER = 2048  # bytes of all resources together (src: pbs_mom's prolog.c)
SPARE = 512  # left for what the server and the scheduler add: neednodes, walltime, nodect ...


def hash_word(token: str) -> str:
    """Return the word that stands in ``other`` for a token in the job's variables."""
    digest = hashlib.sha256(token.encode()).digest()
    return "vt1v:" + urlsafe_b64encode(digest).decode().rstrip("=")


def other_with(resources: Mapping[str, str], token: str) -> tuple[str, bool]:
    """Return the ``other=`` value of a job and whether the token has to go into a variable.

    Args:
        resources: everything that the job asks of Torque with ``-l``; its own ``other`` is kept,
            with ``+`` between.
        token: the request.

    Raises Refused if not even the hash fits.
    """
    mine = resources.get("other", "")
    rest = sum(len(name) + len(value) + 2 for name, value in resources.items() if name != "other")
    rest += len(resources.get("nodes", ""))  # Torque repeats it as neednodes
    for word in (token, hash_word(token)):
        value = f"{mine}+{word}" if mine else word
        if rest + len(value) + len("other=,") <= BUFFER - SPARE:
            return value, word != token
    raise Refused(
        f"the resources (-l) of this job take {rest + len(mine)} bytes",
        limit=f"{BUFFER - SPARE - 64} bytes, Torque drops what is longer without a word",
        fix="name fewer or shorter resources",
    )


def variables_with(variables: str, token: str) -> str:
    """Return a ``-v`` list with the token before the user's own. Raises Refused if it is too long.

    qsub takes the last ``-v`` only, so the user's has to be repeated. Torque's loses the first
    letter of what follows a value in quotes.
    """
    value = ",".join(part for part in (f"{VARIABLE}={token}", variables) if part)
    if len(value.encode("utf-8", "surrogateescape")) > MAX_VARIABLE:
        raise Refused(
            f"the request and the variables (-v) of this job take {len(value)} bytes",
            limit=f"{MAX_VARIABLE} bytes",
            fix="let vm_prologue and vm_epilogue be short and call others in your home",
        )
    return value


def torque_word(resources: Mapping[str, str]) -> str | None:
    """Return the word in ``other`` that makes this a VM job, or None."""
    words = re.split("[+,;]", resources.get("other", ""))
    return next((word for word in words if word.startswith(("vt1:", "vt1v:"))), None)


def torque_blob(word: str, variable_list: str) -> bytes:
    """Return the request of a word and, if that is a hash, of the job's variables.

    Args:
        word: from :func:`torque_word`.
        variable_list: as Torque's server shows it, whose commas may be a value's own.

    Anyone may have written both. Raises Refused.
    """
    if word.startswith("vt1:"):
        return from_token(word)
    found = re.findall(rf"(?:^|,){VARIABLE}=([A-Za-z0-9_:-]*)(?=,|$)", variable_list, re.ASCII)
    variable = next((each for each in found if hash_word(each) == word), None)
    if variable is None:
        raise Refused(
            f"the job's request is invalid: its variable {VARIABLE} is missing or changed",
            fix="submit the job anew, with vsub",
        )
    return from_token(variable)
