"""The health checks of images on the node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vtorque_core.api import hookimpl
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import Site


@hookimpl
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the checks of the image pool and of this node's cache for doctor."""
    from vtorque_core.live import images  # noqa: PLC0415 - only doctor needs them
    from vtorque_images.health import check_cache, check_pool  # noqa: PLC0415 - as above

    def check(site: Site) -> Iterator[HealthResult]:
        assert isinstance(site, images.Site)  # noqa: S101 - doctor passes the whole config
        yield from check_pool(site)

    def cached(site: Site) -> Iterator[HealthResult]:
        assert isinstance(site, images.Site)  # noqa: S101 - as above
        yield from check_cache(site)

    return [HealthCheck("image pool", check), HealthCheck("image cache", cached)]
