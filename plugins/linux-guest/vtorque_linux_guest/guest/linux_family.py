"""The Linux family of an image, which decides how the image boots and installs packages."""

from __future__ import annotations

from typing import Literal

from vtorque_core.api import Image

DEBIAN = "debian"
REDHAT = "redhat"
MICRO = "micro"

_MEMBERS = {
    **dict.fromkeys(("debian", "ubuntu"), DEBIAN),
    **dict.fromkeys(("redhat", "rhel", "rocky", "almalinux", "centos", "fedora", "oracle"), REDHAT),
    "micro": MICRO,
}


def family(image: Image) -> str | None:
    """Return ``debian``, ``redhat``, ``micro``, or None if unknown.

    The label ``family`` takes precedence over the distribution's name. Images of derivatives that
    this module does not list need the label.
    """
    return _MEMBERS.get(image.labels.get("family", image.distro).lower())


def boots_micro(image: Image) -> bool:
    """Return whether the image has no cloud-init, only setup.sh (label ``init=micro``)."""
    return image.labels.get("init") == "micro"


def guest_root(image: Image) -> Literal["other", "user", "both"]:
    """Return which host ids guest root has in the shares.

    - ``user``: the job owner's ids, for a user's image with the label ``script=root``. The owner's
      account in the guest has no access to the shares.
    - ``both``: the job owner's ids, for a user's image with the label ``script=sudo``. The owner's
      account in the guest has these ids, too.
    - ``other``: ids that are not the owner's, for all other images.

    See :attr:`vtorque_core.api.libvirt_domain.Filesystem.guest_root`.
    """
    script = image.labels.get("script") if image.source else None
    if script == "root":
        return "user"
    return "both" if script == "sudo" else "other"


def has_agent(image: Image) -> bool:
    """Return whether the image contains and starts the agent (label ``agent=builtin``)."""
    return boots_micro(image) or image.labels.get("agent") == "builtin"
