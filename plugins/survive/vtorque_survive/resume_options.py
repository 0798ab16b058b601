"""The options ``resume`` and ``checkpoint``, and their validation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vtorque_core.api import JobRequest, Option, Refusal, duration, hookimpl
from vtorque_core.api.vm_options import DISK
from vtorque_survive.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

BEFORE_WALLTIME, NEVER = 1 << 40, 1 << 41
"""Special values of CHECKPOINT, which otherwise is in seconds. They exceed any site's minimum."""

BEGINNING = "none"
"""Value of RESUME for a job that always starts from the beginning, even when requeued."""

_WORDS = {"before-walltime": BEFORE_WALLTIME, "never": NEVER}
_EVERY, _LEAST = "every:", 1  # seconds
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,80}", re.ASCII)


def checkpoint_id(value: str) -> str:
    """Validate and return a value of ``resume``: a checkpoint's id, or ``none``."""
    if value and not _ID.fullmatch(value):
        raise ValueError("is not a checkpoint's id: write the id that vmgr checkpoint has printed")
    return value


def times(value: str) -> int:
    """Parse a value of ``checkpoint``: an interval in seconds, BEFORE_WALLTIME or NEVER."""
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    if not word.startswith(_EVERY):
        raise ValueError("is invalid: write every:TIME, as in every:1h, or "
                         + " or ".join(_WORDS))  # fmt: skip
    seconds = duration(word.removeprefix(_EVERY))
    if not _LEAST <= seconds < BEFORE_WALLTIME:
        raise ValueError(
            f"is out of range: write at least {_LEAST} s, and less than the job's walltime"
        )
    return int(seconds)


def show_times(value: int) -> str:
    """Return a value of ``checkpoint`` as users write it."""
    words = {seconds: word for word, seconds in _WORDS.items()}
    return words.get(value) or f"{_EVERY}{value}s"


RESUME = Option(
    "resume",
    checkpoint_id,
    "",
    "restore the job from a checkpoint; none: start from the beginning",
    "ID|none",
    needs=frozenset({"save"}),
)
CHECKPOINT = Option(
    "checkpoint",
    times,
    NEVER,
    "save the job while it runs, at these times",
    "every:TIME|before-walltime|never",
    show_times,
    needs=frozenset({"save"}),
)


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Reject ``checkpoint=`` or ``resume=`` if this site or job does not support it."""
    asked: list[Option[Any]] = [RESUME] * (request[RESUME] not in ("", BEGINNING))
    every, least = request[CHECKPOINT], site[Settings].min_checkpoint_interval
    asked += [CHECKPOINT] * (every != NEVER)
    if every < least:
        limit, where = (
            f"checkpoints more often than every {least:g} s are not allowed",
            "[plugin.survive] min_checkpoint_interval",
        )
        yield Refusal(limit, CHECKPOINT.key, CHECKPOINT.show(every), where=where)
    if every < BEFORE_WALLTIME and request[DISK]:
        message = (
            f"a job that uses {DISK.key} and continues after a checkpoint changes its disk "
            "file, so the checkpoint would be useless"
        )
        value = CHECKPOINT.show(every)
        fix = f"use before-walltime, or leave out {DISK.key}"
        yield Refusal(message, CHECKPOINT.key, value, fix=fix)
    for option in asked:
        value = option.show(request[option])
        if not site[Settings].checkpoints:
            where, fix = "[plugin.survive] checkpoints", "leave it out"
            yield Refusal(
                "checkpoints are disabled on this site", option.key, value, where=where, fix=fix
            )
        if (request.nodes or 1) > 1 and not _can_restore_anywhere(site):
            message = (
                f"jobs on several nodes (this one: {request.nodes}) cannot be saved on this "
                "site: this needs a checkpoints' directory that all nodes share "
                "(checkpoints_shared), and Slurm"
            )
            yield Refusal(message, option.key, value, fix="request one node, or leave it out")
        for other in (key for key, acts in request.forbids.items() if "save" in acts):
            message = f"a job with {other} cannot be saved"
            yield Refusal(message, option.key, value, fix=f"leave out {other}, or this option")


def _can_restore_anywhere(site: Site) -> bool:
    from vtorque_survive import shared_store  # noqa: PLC0415 - few jobs ask for this

    return shared_store.is_shared_by_nodes(site)
