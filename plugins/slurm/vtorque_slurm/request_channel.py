"""The request's way to the root side, one word at the end of the job's comment, and its owner.

Prolog gets the comment in its environment, on every node and without asking anybody. A comment has
at most 1024 characters (slurmctld's limit on each such text, measured on 22.05). A longer request
is a comment line below the script's first one, and the word in the job's comment says so: root
then asks slurmctld for the script. Nobody can change that one. Whose job it is Slurm says, never
the request.
"""

from __future__ import annotations

import pwd
import re

from vtorque_core.api import HostFault, UsageError

MARK = "vt1:"
IN_SCRIPT = "vt1:in-script"
LINE = b"#VTORQUE-REQUEST "
MAX_COMMENT = 1024

_OURS = re.compile(r"(?:^|\s)(?=vt1:)")
_LINE = re.compile(rb"#![^\n]*\n#VTORQUE-REQUEST (vt1:[A-Za-z0-9_-]+)\n")


def merge(own: str | None, word: str) -> str:
    """Return the job's comment: the user's own, then ours. Raises UsageError if it is too long."""
    merged = f"{own.rstrip()} {word}" if own and own.strip() else word
    if len(merged.encode("utf-8", "surrogateescape")) > MAX_COMMENT:
        raise UsageError(
            f"the job's comment would have {len(merged)} characters with vTorque's own "
            f"{len(word)}; Slurm's limit is {MAX_COMMENT}: shorten --comment, or the -vm values"
        )
    return merged


def fits(own: str | None, word: str) -> bool:
    """Return whether the request fits into the comment."""
    try:
        merge(own, word)
    except UsageError:
        return False
    return True


def find(comment: str) -> str | None:
    """Return our word in a comment, whatever has become of it; None: not a VM job."""
    places = [match.end() for match in _OURS.finditer(comment)]
    return comment[places[-1] :].rstrip(" ") if places else None


def find_in_script(script: bytes) -> str | None:
    """Return the request in a script that vsub has submitted."""
    match = _LINE.match(script)
    return match[1].decode() if match else None


def strip(script: bytes) -> bytes:
    """Return the user's script from what vsub has submitted: without what it put in front."""
    rest = script.partition(b"\n")[2]
    return rest.partition(b"\n")[2] if rest.startswith(LINE + MARK.encode()) else rest


def trusted_owner(name: str, uid: int) -> str:
    """Return the name of the job's user, who is a number to Slurm. Raises HostFault."""
    try:
        found = pwd.getpwuid(uid).pw_name
    except KeyError:
        found = "nobody"
    if found != name:
        raise HostFault(f"the job's user is {name} with uid {uid} to Slurm, but {found} here")
    return found
