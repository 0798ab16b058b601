"""Set a line of slurm.conf(5), and later restore the old line byte for byte.

The administrator's line becomes a comment directly below the new line. Undo changes only these two
lines, and keeps later edits of other lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from vtorque_admin.steps import MARK, Change, edit_file
from vtorque_slurm.slurm_conf import setting, value

_KEPT = f"#kept by {MARK.decode()}#"
_OURS = f"  # {MARK.decode()}"


def set_line(text: str, key: str, value_: str) -> str:
    """Return the text with ``key=value`` as the only active line for that key."""
    ours = f"{key}={value_}{_OURS}\n"
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if setting(line, key) is not None]
    if not places:  # not appended: the last line may lack a newline or end in "\"
        return ours + text
    for i in places:
        lines[i] = _KEPT + lines[i]
    lines.insert(places[0], ours)
    return "".join(lines)


def unset_line(text: str, key: str) -> str:
    """Undo :func:`set_line`."""
    mark = re.escape(MARK.decode())
    text = re.sub(rf"^{key}=[^\n]*  # {mark}\n", "", text, flags=re.MULTILINE)
    kept = rf"^{re.escape(_KEPT)}(?=\s*{key}\s*=)"
    return re.sub(kept, "", text, flags=re.MULTILINE | re.IGNORECASE)


def conf_line(conf: Path, key: str, ours: str) -> Change:
    """Return the setup step that makes ``key=ours`` the only active line for that key."""

    def edit(change: Callable[[str], str]) -> None:
        edit_file(conf, lambda text: _encode(change(_decode(text))))

    return Change(
        f"set {key}={ours} in {conf}, keeping the site's line as a comment "
        "(when all nodes have it: scontrol reconfigure)",
        lambda: value(conf, key) == ours,
        lambda: edit(lambda text: set_line(unset_line(text, key), key, ours)),
        lambda: edit(lambda text: unset_line(text, key)),
    )


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
