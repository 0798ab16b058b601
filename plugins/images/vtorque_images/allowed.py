"""Images that the site's policy allows, and the default image."""

from __future__ import annotations

from pathlib import Path

from vtorque_admin import edit_config
from vtorque_core.api import Refusal, Refused
from vtorque_core.api.vm_options import IMG
from vtorque_core.live.images import Site, effective_root, lookup, root_site
from vtorque_core.live.site_config import (
    Limits,
    build,
    facts_of_user,
    options_for,
    parse_toml,
    refusal,
)


def policy_refusal(site: Site, name: str) -> Refusal | None:
    """Return why ``allow`` or ``deny`` of ``[options.img]`` forbids an image, or None."""
    options = options_for(site, facts_of_user()) if site.limits else site.options
    limits = options.get(IMG.key, Limits())
    if limits.allow is None and not limits.deny:
        return None
    return refusal(IMG, limits, name, name, site.place)


def check_allowed(site: Site, name: str) -> None:
    """Raise Refused if the site's policy forbids an image to the caller. Root may use any image."""
    against = policy_refusal(site, name)
    if against is not None and not effective_root():
        raise Refused(against)


def default_image(site: Site) -> str | None:
    """Return the default image (``[options.img] default``), or None."""
    found: str | None = site.options.get(IMG.key, Limits()).default
    return found


def set_default(config: Path, name: str) -> None:
    """Set the default image in the config.

    Raises:
        Refused: the image is unusable.
        ConfigError: the site's policy excludes the image.
        UsageError: the caller may not change the config.
        HostFault: the config cannot be written.
    """
    site, plugins = root_site(config)
    lookup(site.images.pool, name)
    new = edit_config.set_value(edit_config.read(site.path), f"options.{IMG.key}", "default", name)
    build(parse_toml(new.encode(), site.path), plugins, node=True)  # validates the new config
    edit_config.write(site.path, new)
