"""What vsub adds to the user's arguments of sbatch or salloc. The list in doc/batch-slurm.md."""

from __future__ import annotations

from vtorque_core.api.batch_system import Needs
from vtorque_slurm import gres, request_channel, resources
from vtorque_slurm.resources import Given
from vtorque_slurm.settings import Settings

_OPEN, _CLOSE = "([", ")]"


def additions(given: Given, needs: Needs, word: str, settings: Settings) -> list[str]:
    """Return the options of a VM job that follow the user's own, in this order.

    Args:
        given: what the user has asked for.
        needs: of each node.
        word: the request, for the job's comment.
        settings: the site's node feature, and whether nodes are asked for alone.

    Raises UsageError.
    """
    found = [f"--comment={request_channel.merge(given.last('comment'), word)}"]
    if settings.feature:
        found.append(f"--constraint={constraint(given.last('constraint'), settings.feature)}")
    if settings.exclusive and not given.has("exclusive", "oversubscribe"):
        found.append("--exclusive" + ("=user" if settings.exclusive == "user" else ""))
    if resources.cpus_per_node(given) is None:
        found.append(f"--mincpus={needs.cpus}")
    if needs.mib is not None and not resources.asks_memory(given):
        found.append(f"--mem={needs.mib}M")
    found += gres.additions(given, needs)
    limit = resources.seconds(given.last("time") or "")
    if needs.seconds and limit:
        found.append(f"--time={resources.show_time(limit + needs.seconds)}")
    return found


def constraint(own: str | None, feature: str) -> str:
    """Return the site's feature and the user's own constraint.

    Slurm knows one level of parentheses: they are put only around a plain choice (``a|b``).
    """
    if not own:
        return feature
    depth = 0
    for char in own:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "|" and depth == 0:
            return f"({own})&{feature}"
    return f"{own}&{feature}"
