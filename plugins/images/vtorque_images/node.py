"""The health checks of images on the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from vtorque_core.api import hookimpl
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import Site


@hookimpl
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the checks of the image pool and of this node's cache for doctor."""
    from vtorque_core.live import images  # noqa: PLC0415 - only doctor needs them
    from vtorque_images.health import check_cache, check_pool  # noqa: PLC0415 - as above

    def whole(
        check: Callable[[images.Site], Iterable[HealthResult]], site: Site
    ) -> Iterable[HealthResult]:
        assert isinstance(site, images.Site)  # noqa: S101 - doctor passes the whole config
        return check(site)

    return [
        HealthCheck("image pool", partial(whole, check_pool)),
        HealthCheck("image cache", partial(whole, check_cache)),
    ]
