"""The image builder ``debian``: a built-in recipe, configured by options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vtorque_core.api import Refused, name_errors
from vtorque_core.api.image_builder import BuiltImage
from vtorque_linux_guest.image.recipe import (
    DEBIAN,
    SIZE_MIB,
    LinuxRecipe,
    check_packages,
    check_size,
    check_suite,
)
from vtorque_linux_guest.image.recipe_builder import build_image

SUITE = "bookworm"
KERNELS = ("cloud", "generic")


class DebianBuilder:
    """Builds the Debian image; see :class:`vtorque_core.api.image_builder.Builder`."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        """Build kernel, initramfs and root disk into ``staging``. Raises Refused and HostFault.

        Options: ``suite=bookworm``, ``packages=a,b`` (additional packages), ``size=8G`` (of the
        root disk), ``kernel=generic`` (all drivers, not only those for clouds).
        """
        return build_image(parse_options(arguments), staging, progress)


def parse_options(arguments: Mapping[str, str]) -> LinuxRecipe:
    """Return the recipe for these options. Raises Refused."""
    unknown = sorted(set(arguments) - {"suite", "packages", "size", "kernel"})
    if unknown:
        raise Refused(
            f"debian has no option {unknown[0]}; its options are suite, packages, size and kernel"
        )
    kernel = arguments.get("kernel", "cloud")
    if kernel not in KERNELS:
        raise Refused(f"kernel={kernel!r}: must be cloud or generic")
    suite = arguments.get("suite", SUITE)
    if not check_suite(suite):
        raise Refused(f"suite={suite!r}: is not the code name of a Debian release")
    packages = tuple(p for p in arguments.get("packages", "").split(",") if p)
    bad = check_packages(packages, DEBIAN)
    if bad is not None:
        raise Refused(f"packages: {bad!r} is not a valid name of a Debian package")
    asked = arguments.get("size", f"{SIZE_MIB}M")
    with name_errors(f"size={asked!r}", ValueError, fault=Refused):
        size = check_size(asked)
    return LinuxRecipe(DEBIAN, suite, packages, size=size, kernel=kernel)
