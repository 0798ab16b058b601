"""The image of a request: from the site's pool, or the user's own. As any user."""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import ARCH, DISTRO, IMG, is_own_image
from vtorque_core.base.errors import Refused
from vtorque_core.images import pool
from vtorque_core.site.config import Site
from vtorque_core.site.plugins import Plugins
from vtorque_core.site.policy import own_images


def select_image(
    request: JobRequest,
    site: Site,
    plugins: Plugins,
    cache: Path | None = None,
    accept: pool.Accept | None = None,
) -> Image:
    """Return the image that a job requests. ``cache`` and ``accept`` are those of the pool."""

    def named(name: str, distro: str | None = None, arch: str | None = None) -> Image:
        return pool.select(site.images.pool, name, distro, arch, cache, accept)

    if not is_own_image(request[IMG]):
        return named(request[IMG], request[DISTRO], request[ARCH])
    for option in (DISTRO, ARCH):
        if request[option]:
            raise Refused("does not apply to your own image", key=option.key, value=request[option])
    return own_images(request[IMG], plugins).image(request, site, named)
