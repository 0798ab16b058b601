"""The plugin's declarations: settings, options, the image source and builder, and a command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtorque_core.api import (
    Command,
    ImageBuilder,
    ImageSource,
    JobRequest,
    Option,
    Refusal,
    constant_hook,
    deferred,
    hookimpl,
    setting,
)
from vtorque_core.api.values import is_personal
from vtorque_core.api.vm_options import IMG, is_own_image

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

BASE = "own"
"""Name of the base image in the pool, which has the kernel and initrd, and of its builder."""


def runs_as_root(value: str) -> bool:
    """Parse the option ``root``: True for ``script``, False for ``none``. Raises ValueError."""
    if value in ("none", "script"):
        return value == "script"
    if value == "true":
        raise ValueError("is not supported yet: write root=script, which runs the script as root")
    raise ValueError("is unknown: write none or script")


def show_root(value: bool) -> str:
    """Format the option ``root`` as the user writes it."""
    return "script" if value else "none"


ROOT = Option(
    "root",
    runs_as_root,
    False,
    "run the script of your own image as root (script)",
    "WHO",
    show_root,
)


HOME = "home"
"""Value of the option ``work``: share the whole home."""


def work_directory(value: str) -> str:
    """Parse the option ``work``: a path, :data:`HOME` or "". Raises ValueError."""
    if value == HOME or not value:
        return value
    if not value.isprintable() or len(value.encode("utf-8", "replace")) > _MAX_PATH:
        raise ValueError(f"has a control character or more than {_MAX_PATH} bytes")
    return value


WORK = Option(
    "work", work_directory, "",
    "with your own image: the directory of your home that guests get (home: all of it)", "DIR",
)  # fmt: skip
_MAX_PATH = 1024


@dataclass(frozen=True)
class Settings:
    """Users' own images."""

    cache: str = setting(
        "", doc="directory of the users' images, below which each user has one; empty: "
        "$XDG_CACHE_HOME/vtorque/images in the user's home"
    )  # fmt: skip
    max_size: int = setting(65536, "largest image, unpacked", "MiB")
    keep: float = setting(30 * 86400.0, "time for which an unused image stays in a cache", "s")
    cache_size: int = setting(0, "size above which unused images are removed; 0: no limit", "MiB")


def refusal(value: str) -> Refusal:
    """Return the refusal of an own image on a site with an administrator."""
    return Refusal(
        "is your own image. This version runs own images only on your own machine, where vTorque "
        "runs without root (doc/laptop.md)",
        key=IMG.key,
        value=value,
        fix="write the name of an image in the pool (vmgr images list)",
    )


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Refuse own images on a site with an administrator, where they are not supported yet.

    Also refuse the options ``root`` and ``work`` for other images.
    """
    if is_own_image(request[IMG]) and not is_personal(site):
        yield refusal(request[IMG])
    options: tuple[Option[Any], ...] = () if is_own_image(request[IMG]) else (ROOT, WORK)
    for option in options:
        if request[option] and option.key in request.given:  # ignore defaults of the site
            value, fix = option.show(request[option]), f"name your own image, or omit {option.key}"
            yield Refusal("applies only to your own image", key=option.key, value=value, fix=fix)


vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(ROOT, WORK)
vtorque_image_sources = constant_hook(
    ImageSource(
        BASE,
        resolve=deferred("vtorque_own_images.pull:resolve_request"),
        image=deferred("vtorque_own_images.submitted_image:image"),
        shares=deferred("vtorque_own_images.work:request_shares"),
        mine=deferred("vtorque_own_images.cache:list_images"),
        remove=deferred("vtorque_own_images.cache:remove_image"),
    )
)
vtorque_image_builders = constant_hook(
    ImageBuilder(BASE, deferred("vtorque_own_images.builder:BaseBuilder"))
)
vtorque_commands = constant_hook(Command("vmgr images pull", "vtorque_own_images.command:pull"))
