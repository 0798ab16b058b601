"""Pass the job request to root on the nodes, and check the job's owner.

``vsub`` appends the encoded request, one word, to the job's comment (``--comment``), which Prolog
gets in its environment. This comment has at most 1024 characters (measured on 22.05). A request
that is longer or contains files goes into a ``#`` line below the script's first line, and the job's
comment gets only a marker. Root then reads the script from slurmctld, where nobody can change it.

Slurm's own commands have the option ``--vm=`` of the SPANK plugin. The plugin passes the word in
the job control environment (spank(8)), which only Prolog gets.

The owner always comes from Slurm, not from the request.
"""

from __future__ import annotations

import pwd
import re

from vtorque_core.api import HostFault, UsageError

MARK = "vt1:"
IN_SCRIPT = "vt1:in-script"
LINE = b"#VTORQUE-REQUEST "
FROM_SPANK = "SPANK_VTORQUE_REQUEST"
MAX_COMMENT = 1024

_OURS = re.compile(r"(?:^|\s)(?=vt1:)")
_LINE = re.compile(rb"#![^\n]*\n#VTORQUE-REQUEST (vt1:[A-Za-z0-9_-]+)\n")


def merge(own: str | None, word: str) -> str:
    """Append the encoded request to the user's comment."""
    merged = f"{own.rstrip()} {word}" if own and own.strip() else word
    if len(merged.encode("utf-8", "surrogateescape")) > MAX_COMMENT:
        raise UsageError(
            f"the job's comment would have {len(merged)} characters, {len(word)} of them for "
            f"vTorque, and Slurm's limit is {MAX_COMMENT}: shorten --comment, or the -vm values"
        )
    return merged


def fits_comment(own: str | None, word: str) -> bool:
    """Return whether the comment with the encoded request has at most MAX_COMMENT bytes."""
    try:
        merge(own, word)
    except UsageError:
        return False
    return True


def find(comment: str) -> str | None:
    """Return the last encoded request in a comment, even if invalid; None for a bare-metal job."""
    places = [match.end() for match in _OURS.finditer(comment)]
    return comment[places[-1] :].rstrip(" ") if places else None


def find_in_script(script: bytes) -> str | None:
    """Return the request in a script submitted by vsub, or None."""
    match = _LINE.match(script)
    return match[1].decode() if match else None


def strip(script: bytes) -> bytes:
    """Return the user's script, without the lines that vsub inserted."""
    rest = script.partition(b"\n")[2]
    return rest.partition(b"\n")[2] if rest.startswith(LINE + MARK.encode()) else rest


def trusted_owner(name: str, uid: int) -> str:
    """Return the owner's ``name``. Raises HostFault if the uid has another name on this node."""
    try:
        found = pwd.getpwuid(uid).pw_name
    except KeyError:
        found = "nobody"
    if found != name:
        raise HostFault(
            f"Slurm reports the job's user {name} with uid {uid}, but on this node the uid "
            f"is {found}"
        )
    return found
