"""``vmgr images``: list, build, verify and remove images. Only root changes the pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from vtorque_core import images as pool_of
from vtorque_core.api_image import BuiltImage
from vtorque_core.api_node import Image
from vtorque_core.cli.progress import progress
from vtorque_core.errors import EXIT_FAILED, HostFault, Refused, UsageError, VtorqueError
from vtorque_core.trust import effective_root


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def images() -> None:
    """List, build, verify and remove the images that guests start from."""


@images.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def list_command(ctx: click.Context, as_json: bool) -> None:
    """List the images of the pool. Exit code 1 if one of them is broken."""
    found = pool_of.scan(_pool(ctx))
    if as_json:
        sys.stdout.write(json.dumps([_row(item) for item in found], indent=2) + "\n")
    else:
        _print_table(found)
    if any(isinstance(item, pool_of.Broken) for item in found):
        ctx.exit(EXIT_FAILED)


@images.command()
@click.argument("name")
@click.pass_context
def show(ctx: click.Context, name: str) -> None:
    """Show the sidecar of an image, as JSON."""
    sidecar = pool_of.describe(_pool(ctx), name)
    sys.stdout.write(json.dumps(sidecar.as_json(), indent=2) + "\n")


@images.command()
@click.argument("name")
@click.argument("builder")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the builder; repeatable.",
)
@click.pass_context
def build(ctx: click.Context, name: str, builder: str, options: tuple[str, ...]) -> None:
    """Build an image and put it into the pool as NAME, replacing an older one."""
    _need_root()
    from vtorque_core.cli.site import load_for_root  # noqa: PLC0415

    pool_of.check_name(name)
    arguments = _arguments(options)
    site, plugins = load_for_root(_config(ctx))
    builders = plugins.image_builders()
    if builder not in builders:
        known = ", ".join(sorted(builders)) or "none"
        raise Refused(f"no plugin brings the image builder {builder!r} (there is: {known})")
    pool = site.images.pool
    with pool_of.staging(pool) as staging, progress() as step:
        try:
            built: BuiltImage = builders[builder].builder().build(arguments, staging, step)
        except VtorqueError:
            raise
        except Exception as error:
            message = f"image builder {builder} failed: {type(error).__name__}: {error}"
            raise HostFault(message) from error
        step("checking and hashing")
        image = pool_of.commit(pool, name, staging, built, builder)
        step(f"{name} is in the pool: sha256 {image.sha256}")


@images.command()
@click.argument("names", nargs=-1)
@click.pass_context
def verify(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Hash the files of images (default: all). As root, accept the inodes of a copied pool.

    Exit code 1 if a file is not what was built.
    """
    pool = _pool(ctx)
    failed = False
    for name in names or [item.name for item in pool_of.scan(pool)]:
        try:
            image = pool_of.verify(pool, name)
        except Refused as error:
            failed = True
            click.echo(str(error), err=True)
        else:
            click.echo(f"{name}: ok, sha256 {image.sha256}")
    if failed:
        ctx.exit(EXIT_FAILED)


@images.command()
@click.argument("name")
@click.pass_context
def remove(ctx: click.Context, name: str) -> None:
    """Remove an image. Guests that run from it are not disturbed."""
    _need_root()
    pool_of.remove(_pool(ctx), name)
    click.echo(f"removed {name}")


def _config(ctx: click.Context) -> Path:
    """Return the path of the site config, which ``vmgr`` puts into the context."""
    path: Path = ctx.obj
    return path


def _pool(ctx: click.Context) -> Path:
    from vtorque_core.cli.site import load  # noqa: PLC0415

    site, _ = load(_config(ctx), node=False)
    return site.images.pool


def _need_root() -> None:
    if not effective_root():
        raise UsageError("only root can change the image pool")


def _arguments(options: tuple[str, ...]) -> dict[str, str]:
    """Return the builder's options. Raises UsageError for one that is not KEY=VALUE, or twice."""
    arguments: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key or key in arguments:
            raise UsageError(f"-o {option}: must be KEY=VALUE, each key once")
        arguments[key] = value
    return arguments


def _row(item: Image | pool_of.Broken) -> dict[str, object]:
    if isinstance(item, pool_of.Broken):
        return {"name": item.name, "broken": item.reason}
    return {
        "name": item.name,
        "guest_type": item.guest_type,
        "distro": item.distro,
        "arch": item.arch,
        "min_ram_mib": item.min_ram_mib,
        "sha256": item.sha256,
        "labels": dict(item.labels),
    }


def _print_table(found: list[Image | pool_of.Broken]) -> None:
    width = max([len(item.name) for item in found], default=0)
    for item in found:
        if isinstance(item, pool_of.Broken):
            click.echo(f"{item.name:{width}}  broken: {item.reason}")
        else:
            click.echo(
                f"{item.name:{width}}  {item.guest_type:8} {item.distro:10} {item.arch:8} "
                f"{item.min_ram_mib:6} MiB  {item.sha256[:12]}"
            )
