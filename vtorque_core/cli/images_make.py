"""``vmgr images add``, ``build`` and ``update``: new content for the pool, as root."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vtorque_core import images as pool_of
from vtorque_core.api import Image
from vtorque_core.api_image import BuiltImage
from vtorque_core.cli.images_common import (
    as_json,
    bars,
    pairs,
    root_site,
    signed_by,
    write_json,
)
from vtorque_core.config import Site
from vtorque_core.errors import HostFault, Refused, UsageError, VtorqueError, printable
from vtorque_core.image_add import Wishes
from vtorque_core.image_add import add as add_file
from vtorque_core.image_formats import FORMATS

_sign_key = click.option(
    "--sign-key", type=click.Path(path_type=Path), help="Sign it, as vmgr images sign does."
)


def _described(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options by which an image is described."""
    path = click.Path(path_type=Path)
    options: list[Callable[..., Any]] = [
        click.option("--guest-type", default="", help="Which plugin's guest it is, e.g. linux."),
        click.option("--distro", default="", metavar="NAME", help="What -vm distro= chooses by."),
        click.option("--arch", default="", help="As uname -m says it."),
        click.option("--min-ram", type=click.IntRange(min=1), default=None, metavar="MIB"),
        click.option("--format", "kind", type=click.Choice(FORMATS), help="Do not guess."),
        click.option(
            "--boot",
            type=click.Choice(("auto", "kernel", "disk")),
            default="auto",
            show_default=True,
            help="By the kernel in the disk, taken out of it, or by the disk's boot loader.",
        ),
        click.option("--kernel", type=path, help="Start this kernel."),
        click.option("--initrd", type=path, help="With this initramfs."),
        click.option("--cmdline", default=None, help="The kernel's command line."),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE"),
        _sign_key,
        as_json,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name", required=False)
@_described
@click.pass_context
def add(ctx: click.Context, /, file: Path, name: str | None, **described: Any) -> None:
    """Put FILE into the pool as image NAME (default: the file's name without its last suffix).

    A disk in qcow2, vmdk, vhdx or raw format, or an ELF kernel that needs no disk. It becomes a
    qcow2 that stands alone. Distribution, architecture and kernel are looked for in an ext4 file
    system; where they cannot be found, say them.
    """
    _add(ctx, file, file.stem if name is None else name, described, update=False)


@click.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@_described
@click.pass_context
def update(ctx: click.Context, /, name: str, file: Path, **described: Any) -> None:
    """Make FILE what image NAME is from now on; what is not said of it stays as it was.

    Running jobs keep the base that they have, new ones get the new one. The old base goes when no
    job of this node uses it and [images] keep is over. To build one anew: vmgr images build.
    """
    _add(ctx, file, name, described, update=True)


def _add(
    ctx: click.Context, file: Path, name: str, described: dict[str, Any], *, update: bool
) -> None:
    site, plugins = root_site(ctx)
    wishes = Wishes(
        guest_type=described["guest_type"],
        distro=described["distro"],
        arch=described["arch"],
        min_ram_mib=described["min_ram"] or 0,
        format=described["kind"] or "",
        boot=described["boot"],
        kernel=described["kernel"],
        initrd=described["initrd"],
        cmdline=described["cmdline"],
        labels=pairs(described["labels"], "--label"),
    )
    if wishes.guest_type:
        plugins.guest_type(wishes.guest_type)  # refuses one that no plugin brings
    with bars() as told:
        added = add_file(
            site.images.pool,
            name,
            file,
            wishes,
            told,
            paths=site.paths,
            keep=site.images.keep,
            most=site.images.max_disk << 20,
            update=update,
            sign=_signing(described["sign_key"]),
        )
    _say(added.image, (*added.notes, *_unsigned(site, name)), described["as_json"])


@click.command()
@click.argument("name", required=False)
@click.argument("builder", required=False)
@click.option("--oci", metavar="DIR|FILE", help="The same as: oci -o source=DIR|FILE")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the builder; repeatable.",
)
@_sign_key
@as_json
@click.pass_context
def build(
    ctx: click.Context,
    name: str | None,
    builder: str | None,
    oci: str | None,
    options: tuple[str, ...],
    sign_key: Path | None,
    as_json: bool,
) -> None:
    """Build an image and put it into the pool as NAME, replacing an older one.

    Running jobs keep the base that they have, as with update. With --oci, BUILDER is left out, and
    NAME is by default that of the container's file or directory without its last suffix.
    """
    arguments = dict(pairs(options, "-o"))
    if oci is not None:
        if builder is not None or "source" in arguments:
            raise UsageError("--oci says builder and source: leave out BUILDER and -o source=")
        name, builder, arguments["source"] = name or Path(oci).stem, "oci", oci
    if name is None or builder is None:
        raise UsageError("say which image to build, and how: NAME BUILDER, or --oci DIR|FILE")
    pool_of.check_name(name)
    site, plugins = root_site(ctx)
    builders = plugins.image_builders()
    if builder not in builders:
        known = ", ".join(sorted(builders)) or "none"
        raise Refused(f"no plugin brings the image builder {builder!r} (there is: {known})")
    pool = site.images.pool
    with pool_of.staging(pool, site.paths) as staging, bars() as told:
        try:
            built: BuiltImage = builders[builder].builder().build(arguments, staging, told.step)
        except VtorqueError:
            raise
        except Exception as error:
            message = f"image builder {builder} failed: {type(error).__name__}: {error}"
            raise HostFault(message) from error
        told.step("checking and hashing")
        image = pool_of.commit(
            pool,
            name,
            staging,
            built,
            builder,
            paths=site.paths,
            keep=site.images.keep,
            told=told.told,
            sign=_signing(sign_key),
        )
    _say(image, _unsigned(site, name), as_json)


def _signing(key: Path | None) -> pool_of.Sign:
    """Return what signs a new image by this key."""
    if key is None:
        return pool_of.unsigned
    from vtorque_core.image_signature import sign  # noqa: PLC0415

    return lambda sidecar: sign(sidecar, key)


def _unsigned(site: Site, name: str) -> tuple[str, ...]:
    """Return a note if no job gets the new image, since nobody has signed it."""
    try:
        signed_by(site, pool_of.describe(site.images.pool, name))
    except (HostFault, Refused) as error:
        return (f"no job gets it yet: {error}",)
    return ()


def _say(image: Image, notes: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        parts = {k: None if v is None else v.name for k, v in _files(image).items()}
        version = next(v for v in _files(image).values() if v is not None).parent.name
        row = {"name": image.name, "sha256": image.sha256, "version": version, **parts}
        facts = {k: getattr(image, k) for k in ("guest_type", "distro", "arch", "min_ram_mib")}
        write_json({**row, **facts, "labels": dict(image.labels), "notes": list(notes)})
        return
    for note in notes:
        click.echo(f"note: {printable(note, 400)}", err=True)
    how = "its kernel" if image.kernel else "its disk"
    click.echo(f"{image.name} is in the pool: {image.distro} {image.arch}, boots from {how}")
    click.echo(f"sha256 {image.sha256}")


def _files(image: Image) -> dict[str, Path | None]:
    return {"disk": image.disk, "kernel": image.kernel, "initrd": image.initrd}
