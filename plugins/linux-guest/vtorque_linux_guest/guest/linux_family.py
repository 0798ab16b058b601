"""What kind of Linux an image has: how it comes up, and how its packages are installed."""

from __future__ import annotations

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
    """Return ``debian``, ``redhat``, ``micro`` or None if unknown.

    The label ``family`` decides, else the distro: a derivative that nobody here has heard of needs
    the label.
    """
    return _MEMBERS.get(image.labels.get("family", image.distro).lower())


def boots_micro(image: Image) -> bool:
    """Return whether setup.sh must do all by itself: the label ``init=micro``, no cloud-init."""
    return image.labels.get("init") == "micro"


def has_agent(image: Image) -> bool:
    """Return whether the image brings the agent and what starts it (label ``agent=builtin``)."""
    return boots_micro(image) or image.labels.get("agent") == "builtin"
