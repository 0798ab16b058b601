"""Fragments of cloud-config that an image and the site bring: which a guest gets.

They are bytes to root: cloud-init in the guest reads them, merges them as it documents
(``merge_how``, else later keys replace earlier ones) and holds the result against its own schema.
"""

from __future__ import annotations

from vtorque_core.api import HostFault, Image, Refused
from vtorque_linux_guest.guest.linux_family import boots_micro
from vtorque_linux_guest.settings import Settings, site_scripts

HEAD = "#cloud-config"
LABEL = "cloud-config"
"""Of an image: its fragment in one line (JSON is YAML), or :data:`NONE`."""

NONE = "none"


def fragments(image: Image, settings: Settings) -> tuple[str, ...]:
    """Return the image's fragment, then the site's in the order of their names.

    Raises Refused for an image without cloud-init, HostFault for a file that is no cloud-config.
    """
    own = image.labels.get(LABEL, "")
    if own == NONE:
        return ()
    found = [f"{HEAD}\n{own}\n"] if own else []
    for file in site_scripts(settings.cloud_config):
        text = file.content.decode("utf-8", "replace")
        if problem := header_problem(text):
            raise HostFault(f"{settings.cloud_config}/{file.name} {problem}")
        found.append(text)
    if found and boots_micro(image):
        what = f"the label {LABEL}" if own else settings.cloud_config
        why = f"image {image.name} has no cloud-init for {what}"
        fix = f"choose another image; or the admin: vmgr images label {image.name} {LABEL}={NONE}"
        raise Refused(why, fix=fix)
    return tuple(found)


def header_problem(text: str) -> str:
    """Return what keeps cloud-init from taking a text for cloud-config, or nothing."""
    if "\ufffd" in text:
        return "is not UTF-8"
    return "" if text.split("\n", 1)[0].rstrip() == HEAD else f"does not begin with {HEAD}"
