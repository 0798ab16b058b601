"""Read and change images in the pool and in nodes' caches.

Privileges: changes need root, or the owner of a personal site.
Raises ConfigError if the site config is invalid.
"""

from __future__ import annotations

from pathlib import Path

from vtorque_core.api.strategies import ImageSource as ImageSource
from vtorque_core.api.vm_options import is_own_image as is_own_image
from vtorque_core.base import safefs
from vtorque_core.base.errors import UsageError
from vtorque_core.base.safefs import fsync as fsync
from vtorque_core.base.trust import effective_root as effective_root
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins as Plugins
from vtorque_core.config.site_config import Site as Site
from vtorque_core.images import signature as signature
from vtorque_core.images import store as store
from vtorque_core.images.pool import BrokenImage as BrokenImage
from vtorque_core.images.pool import ListedImage as ListedImage
from vtorque_core.images.pool import check_name as check_name
from vtorque_core.images.pool import check_pool as check_pool
from vtorque_core.images.pool import describe as describe
from vtorque_core.images.pool import file_status as file_status
from vtorque_core.images.pool import has_copy as has_copy
from vtorque_core.images.pool import invalid as invalid
from vtorque_core.images.pool import listing as listing
from vtorque_core.images.pool import lookup as lookup
from vtorque_core.images.pool import read_sidecar as read_sidecar
from vtorque_core.images.pool import unknown_image as unknown_image
from vtorque_core.images.sidecar import MAX_SIGNATURE as MAX_SIGNATURE
from vtorque_core.images.sidecar import SIDECAR as SIDECAR
from vtorque_core.images.sidecar import FileRecord as FileRecord
from vtorque_core.images.sidecar import Sidecar as Sidecar
from vtorque_core.images.sidecar import boots_by_uefi as boots_by_uefi
from vtorque_core.images.sidecar import check_facts as check_facts
from vtorque_core.images.sidecar import file_names as file_names
from vtorque_core.images.sidecar import names as names
from vtorque_core.images.sidecar import version_of as version_of
from vtorque_core.images.signature import signed_bytes as signed_bytes
from vtorque_core.images.signature import signer_of as signer_of


def site_of(config: Path) -> Site:
    """Return the site config."""
    return load(config, node=False)[0]


def root_site(config: Path) -> tuple[Site, Plugins]:
    """Return site config and plugins for a command that changes images.

    Creates the pool of a personal site. Raises UsageError without privileges.
    """
    site, plugins = load(config, node=True)
    if not (effective_root() or site.owner):
        raise UsageError("only root can change the image pool: run this command as root")
    if site.owner:  # no administrator has set up a personal site
        safefs.make_directories(site.images.pool)
    return site, plugins


def own_images(config: Path) -> tuple[Site, list[ImageSource]]:
    """Return the site config, and the sources of users' own images: one or none."""
    site, plugins = load(config, node=False)
    return site, plugins.image_sources()
