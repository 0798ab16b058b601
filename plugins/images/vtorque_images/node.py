"""The health checks of images on the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vtorque_core.api import always, node_job
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.live.images import Site
from vtorque_images.health import check_cache, check_pool


def _whole(
    check: Callable[[Site], Iterable[HealthResult]], site: node_job.Site
) -> Iterable[HealthResult]:
    assert isinstance(site, Site)  # noqa: S101 - it is what doctor has, and all of it
    return check(site)


vtorque_health_checks = always(
    HealthCheck("image pool", lambda site: _whole(check_pool, site)),
    HealthCheck("image cache", lambda site: _whole(check_cache, site)),
)
