"""Declarations of the Linux guest plugin: guest type, image builders and commands.

``vsub`` imports this module. To keep ``vsub`` fast, most other modules are imported when needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from vtorque_core.api import (
    Command,
    FileData,
    GuestType,
    ImageBuilder,
    JobRequest,
    Option,
    Refusal,
    Refused,
    Remote,
    constant_hook,
    deferred,
    hookimpl,
)
from vtorque_core.api.vm_options import no_parse, show_file

SUPPORTS = frozenset(
    {
        "EnvVar",
        "GuestFile",
        "RootCommand",
        "CancelCommand",
        "KernelModule",
        "Package",
        "Mount",
        "GuestDevice",
        "PciMemory",
        "LinePort",
    }
)


def directory(text: str) -> str:
    """Return the normalized form of an absolute path. Raises ValueError."""
    path = PurePosixPath(text)
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("is not an absolute path without '..'")
    return str(path)


CLEAN = Option(
    "clean", directory, "", "remove files that root in your guests created below a directory", "DIR"
)

VM_PRECANCEL: Option[FileData | None] = Option(
    "vm_precancel",
    no_parse,
    None,
    "script run in the first guest as you, when the job is canceled",
    "FILE",
    show_file,
    is_file=True,
)

CLOUD_CONFIG: Option[FileData | None] = Option(
    "cloud_config",
    no_parse,
    None,
    "your cloud-config for each guest: packages, write_files, runcmd",
    "FILE",
    show_file,
    is_file=True,
)


@hookimpl
def vtorque_parse_args(request: JobRequest) -> Iterator[Refusal]:
    """Reject an invalid cloud-config. The node rejects cloud-init modules that the site forbids."""
    if (file := request[CLOUD_CONFIG]) is not None:
        from vtorque_linux_guest.boot import user_cloud_config  # noqa: PLC0415 - few jobs have one

        try:
            user_cloud_config.read(file)
        except Refused as error:
            yield from error.refusals


vtorque_guest_types = constant_hook(
    GuestType(
        "linux",
        supports=SUPPORTS,
        driver=deferred("vtorque_linux_guest.job.driver:LinuxDriver"),
    )
)
vtorque_image_builders = constant_hook(
    ImageBuilder("micro", deferred("vtorque_linux_guest.image.micro_builder:MicroBuilder")),
    ImageBuilder("debian", deferred("vtorque_linux_guest.image.debian_builder:DebianBuilder")),
    ImageBuilder("linux", deferred("vtorque_linux_guest.image.recipe_builder:LinuxBuilder")),
)
vtorque_options = constant_hook(CLEAN, VM_PRECANCEL, CLOUD_CONFIG)
vtorque_commands = constant_hook(
    Command(
        "vmgr ssh",
        "vtorque_linux_guest.command:ssh",
        Remote(("rank", "command"), terminal=True),
    ),
    Command("vmgr console", "vtorque_linux_guest.command:console", Remote(("guest",))),
    Command("vmgr clean", "vtorque_linux_guest.command:clean"),
)
