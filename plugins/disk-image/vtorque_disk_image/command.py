"""``vmgr images add`` and ``update``: convenient forms of ``vmgr images build NAME disk``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import UsageError
from vtorque_disk_image.builder import BOOT, FIRMWARE, NAME
from vtorque_disk_image.formats import FORMATS

_PATH = click.Path(path_type=Path)


def _add_description_options(command: Callable[..., None]) -> Callable[..., None]:
    options: list[Callable[..., Any]] = [
        click.option("--guest-type", help="The guest type, such as linux."),
        click.option("--distro", metavar="NAME", help="The distribution, for -vm distro=."),
        click.option("--arch", help="The architecture, as in uname -m."),
        click.option("--min-ram", type=click.IntRange(min=1), metavar="MIB"),
        click.option(
            "--format",
            type=click.Choice(FORMATS),
            help="The format of FILE, instead of detecting it.",
        ),
        click.option(
            "--boot",
            type=click.Choice(BOOT),
            default="auto",
            show_default=True,
            help="Boot the disk's kernel directly, or use its boot loader.",
        ),
        click.option(
            "--firmware",
            type=click.Choice(FIRMWARE),
            help="The firmware for the boot loader; default: as the partition table requires.",
        ),
        click.option("--kernel", type=_PATH, help="Boot this kernel directly."),
        click.option("--initrd", type=_PATH, help="The initramfs for --kernel."),
        click.option("--cmdline", help="The kernel's command line."),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE"),
        click.option(
            "--sign-key", type=_PATH, help="Sign the image with this key, as vmgr images sign does."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=_PATH)
@click.argument("name", required=False)
@_add_description_options
@click.pass_context
def add(ctx: click.Context, /, file: Path, name: str | None, **said: Any) -> None:
    """Put FILE into the pool as image NAME (default: the file's name without its last suffix).

    FILE is a disk in qcow2, vmdk, vhdx or raw format, or an ELF kernel that needs no disk. A disk
    becomes a standalone qcow2. Distribution, architecture and kernel are detected in an ext4 file
    system. For other file systems, use the options.
    """
    _build(ctx, file.stem if name is None else name, file, said, new=True)


@click.command()
@click.argument("name")
@click.argument("file", type=_PATH)
@_add_description_options
@click.pass_context
def update(ctx: click.Context, /, name: str, file: Path, **said: Any) -> None:
    """Make FILE the new content of image NAME.

    A property that you do not set is detected in FILE, or else keeps its old value. Running jobs
    keep the old content; new jobs get the new content. The setting "keep" in the config's table
    [images] is the time after which the old content is deleted, unless a job of this node uses it.
    To repeat a build, use vmgr images build.
    """
    _build(ctx, name, file, said, update=True)


def _build(ctx: click.Context, name: str, file: Path, said: dict[str, Any], **how: bool) -> None:
    sign_key, as_json = said.pop("sign_key"), said.pop("as_json")
    labels = said.pop("labels")
    for label in labels:
        if not label.partition("=")[1]:
            raise UsageError(f"--label {label}: must be KEY=VALUE")
    facts = {"file": file, **{key: value for key, value in said.items() if value is not None}}
    options = [f"{key}={value}" for key, value in facts.items()]
    options += [f"label.{label}" for label in labels]
    group = ctx.parent.command if ctx.parent is not None else None
    build = group.get_command(ctx, "build") if isinstance(group, click.Group) else None
    if build is None:
        raise UsageError("cannot be an image's name: it is a command of vmgr images")
    more = {"sign_key": sign_key, "as_json": as_json, **how}
    ctx.invoke(build, name=name, builder=NAME, options=tuple(options), **more)
