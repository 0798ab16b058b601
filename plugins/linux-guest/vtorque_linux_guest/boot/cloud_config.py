"""The cloud-config fragments of an image and of the site.

vTorque does not parse them. cloud-init in the guest merges them and validates the result. A
fragment without ``merge_how`` replaces the keys of earlier fragments.
"""

from __future__ import annotations

from vtorque_core.api import HostFault, Image, Refused
from vtorque_linux_guest.guest.linux_family import boots_micro
from vtorque_linux_guest.settings import Settings, site_scripts

HEAD = "#cloud-config"
LABEL = "cloud-config"
"""Name of the image label with the image's fragment as one line of JSON (valid YAML), or
:data:`NONE`."""

NONE = "none"


def fragments(image: Image, settings: Settings) -> tuple[str, ...]:
    """Return the image's cloud-config fragment, then the site's, sorted by file name.

    Raises Refused if the image has no cloud-init, HostFault if a site file is not a cloud-config.
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
        fix = (
            f"choose another image, or ask the admin to run: vmgr images label {image.name} "
            f"{LABEL}={NONE}"
        )
        raise Refused(why, fix=fix)
    return tuple(found)


def header_problem(text: str) -> str:
    """Return why a text is not a cloud-config, or an empty string."""
    if "\ufffd" in text:
        return "is not UTF-8"
    return "" if text.split("\n", 1)[0].rstrip() == HEAD else f"does not begin with {HEAD}"
