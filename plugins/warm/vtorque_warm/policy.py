"""Choose how many warm guests of each shape to keep. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vtorque_warm.settings import Settings, WarmShape

_DAY = 86400.0
LATELY = 7 * _DAY  # seconds; older requests are ignored
_MOST = 64  # guests of a shape that the site does not list


def wanted_guests(
    settings: Settings, history: Sequence[Mapping[str, Any]], now: float
) -> list[tuple[WarmShape, int]]:
    """Return the number of guests to keep of each shape, in the order in which to boot them.

    The number is that of the guests that started in the shape's busiest recent hour, but at least
    the shape's ``least`` and at most its ``most``. If the site configures ``max_memory`` but no
    shapes, the result contains the shapes that jobs requested most.

    Args:
        settings: The site's settings.
        history: Facts of kept jobs, with ``image``, ``guests`` and ``started``.
        now: Unix time.
    """
    asked = _count_requests(history, now)
    shapes = settings.shape_list()
    if not shapes and settings.budget is not None:
        return _fill_budget(asked, settings.budget)
    busiest = {key: max(hours.values()) for key, hours in asked.items()}
    found = []
    for shape in shapes:
        often = busiest.get((shape.img, shape.vcpus, shape.ram), 0)
        found.append((shape, min(shape.most, max(shape.least, often))))
    return found


_Key = tuple[str, int, int]


def _count_requests(history: Iterable[Mapping[str, Any]], now: float) -> dict[_Key, Counter[int]]:
    """Count recent guests by image, vCPUs and MiB, and by the hour of their start."""
    found: dict[_Key, Counter[int]] = {}
    for facts in history:
        try:
            started = float(facts["started"])
            guests = [(int(g["vcpus"]), int(g["ram_mib"])) for g in facts["guests"]]
            image = str(facts["image"])
        except (KeyError, TypeError, ValueError):
            continue
        if now - LATELY < started <= now:
            for vcpus, ram in guests:
                found.setdefault((image, vcpus, ram), Counter())[int(started // 3600)] += 1
    return found


def _fill_budget(asked: Mapping[_Key, Counter[int]], budget: int) -> list[tuple[WarmShape, int]]:
    """Return how many guests of each requested shape to keep within ``budget`` (MiB).

    Add one guest of each shape per round, most requested shape first. No shape gets more guests
    than were started in its busiest hour.
    """
    order = sorted(asked, key=lambda key: (-asked[key].total(), key))
    most = {key: min(_MOST, max(asked[key].values())) for key in order}
    got: Counter[_Key] = Counter()
    again = True
    while again:
        again = False
        for key in order:
            if got[key] < most[key] and key[2] <= budget:
                got[key] += 1
                budget -= key[2]
                again = True
    return [(WarmShape(*key, least=got[key], most=got[key]), got[key]) for key in order if got[key]]
