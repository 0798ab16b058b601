"""Options that vsub adds to the user's sbatch or salloc arguments; see doc/batch-slurm.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Needs
from vtorque_slurm import gres, request_channel, resources
from vtorque_slurm.options import COLON
from vtorque_slurm.resources import SlurmRequest
from vtorque_slurm.settings import Settings

_OPEN, _CLOSE = "([", ")]"


def additions(given: SlurmRequest, needs: Needs, word: str, settings: Settings) -> list[str]:
    """Return the sbatch options that vsub adds for a VM job, in order.

    ``word`` is the encoded ``-vm`` request, which is passed in the job's comment.
    """
    found = [f"--comment={request_channel.merge(given.last_value('comment'), word)}"]
    feature = settings.feature
    if feature and not names(given.last_value("constraint"), feature):
        found.append(f"--constraint={constraint(given.last_value('constraint'), feature)}")
    if settings.exclusive and not given.has_option("exclusive", "oversubscribe"):
        found.append("--exclusive" + ("=user" if settings.exclusive == "user" else ""))
    if resources.cpus_per_node(given) is None:
        found.append(f"--mincpus={needs.cpus}")
    if needs.mib is not None and not resources.asks_memory(given):
        found.append(f"--mem={needs.mib}M")
    return found + gres.additions(given, needs) + _extend_time(given, needs)


def bare_components(
    first: SlurmRequest, others: Sequence[SlurmRequest], needs: Needs, feature: str
) -> list[str]:
    """Return the arguments for the bare-metal components of a heterogeneous job.

    Each component gets a ``--comment``. Otherwise sbatch would copy the comment of the preceding
    component, which contains the request.

    Raises:
        UsageError: The first component lacks the site's node feature, or a later component has it.
    """
    if not others:
        return []
    if not feature:
        raise UsageError(
            "a heterogeneous job cannot have virtual machines on this site, because "
            "[plugin.slurm] feature is empty: use -vm none"
        )
    marked = [names(given.last_value("constraint"), feature) for given in (first, *others)]
    if marked != [True, *(False for _ in others)]:
        raise UsageError(
            "only the first component of a heterogeneous job has virtual machines, and the "
            f"script runs there: use --constraint={feature} for the first component only, or use "
            "-vm none"
        )
    found: list[str] = []
    comment = first.last_value("comment") or ""
    for given in others:
        comment = given.last_value("comment") or comment
        words = (COLON, *given.line.plain, f"--comment={comment}", *_extend_time(given, needs))
        found += words
    return found


def _extend_time(given: SlurmRequest, needs: Needs) -> list[str]:
    limit = resources.seconds(given.last_value("time") or "")
    if not needs.seconds or not limit:
        return []
    return [f"--time={resources.show_time(limit + needs.seconds)}"]


def names(own: str | None, feature: str) -> bool:
    """Return whether ``own``, an expression for ``--constraint``, contains the feature."""
    return feature in re.split(r"[^\w.-]+", own or "", flags=re.ASCII)


def constraint(own: str | None, feature: str) -> str:
    """Combine the user's constraint with the site's node feature.

    The user's constraint is enclosed in parentheses only if it contains ``|`` outside of
    parentheses, because Slurm supports only one level of parentheses.
    """
    if not own:
        return feature
    depth = 0
    for char in own:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "|" and depth == 0:
            return f"({own})&{feature}"
    return f"{own}&{feature}"
