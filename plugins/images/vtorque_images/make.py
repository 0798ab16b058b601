"""``vmgr images build``: build an image into the pool. Privileges: root."""

from __future__ import annotations

from pathlib import Path

import click

from vtorque_core.api import HostFault, Refused, UsageError, VtorqueError, printable
from vtorque_core.api.image_builder import Building, BuiltImage
from vtorque_core.live.images import Sidecar, Site, describe, root_site
from vtorque_images import change as pool_of
from vtorque_images.common import as_json, bars, pairs, signer_of_image, write_json
from vtorque_images.signing import sign


@click.command(short_help="Build an image and put it into the pool.")
@click.argument("name", required=False)
@click.argument("builder", required=False)
@click.option("--oci", metavar="DIR|FILE", help="Short for: oci -o source=DIR|FILE")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the builder; repeatable.",
)
@click.option("--new", is_flag=True, help="Fail if the image exists.")
@click.option("--update", is_flag=True, help="Fail if the image does not exist.")
@click.option(
    "--sign-key",
    type=click.Path(path_type=Path),
    help="Sign the image with this key, as vmgr images sign does.",
)
@as_json
@click.pass_context
def build(  # noqa: PLR0913 - one for each option
    ctx: click.Context,
    name: str | None,
    builder: str | None,
    oci: str | None,
    options: tuple[str, ...],
    new: bool,
    update: bool,
    sign_key: Path | None,
    as_json: bool,
) -> None:
    """Build an image and put it into the pool as NAME, replacing an existing image.

    Running jobs keep the old content; new jobs get the new content. With --oci, omit BUILDER, and
    NAME defaults to the name of the container's file or directory without its last suffix.
    """
    arguments = dict(pairs(options, "-o"))
    if oci is not None:
        if builder is not None or "source" in arguments:
            raise UsageError("--oci sets builder and source: leave out BUILDER and -o source=")
        name, builder, arguments["source"] = name or Path(oci).stem, "oci", oci
    if name is None or builder is None:
        raise UsageError("the arguments NAME BUILDER, or --oci DIR|FILE, are missing")
    if new and update:
        raise UsageError("--new and --update exclude each other")
    site, plugins = root_site(ctx.obj)
    builders = plugins.image_builders()
    if builder not in builders:
        known = ", ".join(sorted(builders)) or "none"
        raise Refused(
            f"no installed plugin provides the image builder {builder!r} (available: {known})"
        )

    def make(staging: Path, building: Building) -> BuiltImage:
        try:
            built: BuiltImage = builders[builder].builder().build(arguments, staging, building)
        except VtorqueError:
            raise
        except Exception as error:
            message = f"image builder {builder} failed: {type(error).__name__}: {error}"
            raise HostFault(message) from error
        plugins.guest_type(built.guest_type)  # raises if no plugin provides the type
        return built

    with bars() as told:
        progress = Building(told.step, told.show_progress, site.images.max_disk << 20)
        pool_of.build(
            site.images.pool,
            name,
            builder,
            make,
            progress,
            there=update if new or update else None,
            options=pool_of.CommitOptions(
                site.paths, site.images.keep, sign=_sign_function(sign_key)
            ),
        )
    sidecar = describe(site.images.pool, name)
    _print_result(sidecar, (*progress.notes, *_unsigned_note(site, sidecar)), as_json)


def _sign_function(key: Path | None) -> pool_of.Sign | None:
    if key is None:
        return None
    return lambda sidecar: sign(sidecar, key)


def _unsigned_note(site: Site, sidecar: Sidecar) -> tuple[str, ...]:
    try:
        signer_of_image(site, sidecar)
    except (HostFault, Refused) as error:
        return (f"jobs cannot use it yet: {error}",)
    return ()


def _print_result(sidecar: Sidecar, notes: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        write_json({**sidecar.as_json(), "notes": list(notes)})
        return
    for note in notes:
        click.echo(f"note: {printable(note, 400)}", err=True)
    built = sidecar.built
    boot_source = "its kernel" if built.kernel else "its disk"
    click.echo(
        f"{sidecar.name} is in the pool: {built.distro} {built.arch}, boots from {boot_source}"
    )
    click.echo(f"sha256 {sidecar.sha256}")
