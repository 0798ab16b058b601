"""``vmgr images``: list, show, verify, remove and label images. Only root changes the pool."""

from __future__ import annotations

from pathlib import Path

import click

from vtorque_core.api import EXIT_FAILED, Refused, UsageError, printable, tables
from vtorque_core.live.images import (
    BrokenImage,
    describe,
    effective_root,
    is_own_image,
    listing,
    own_images,
    root_site,
    site_of,
)
from vtorque_images import change as pool_of
from vtorque_images import table
from vtorque_images.allowed import check_allowed, default_image, policy_refusal, set_default
from vtorque_images.common import as_json, bars, pairs, signer_of_image, size, write_json


@click.command("list")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="List only images with this label.",
)
@click.option("--mine", is_flag=True, help="List the images in your own cache instead.")
@as_json
@click.pass_context
def list_command(ctx: click.Context, labels: tuple[str, ...], mine: bool, as_json: bool) -> None:
    """List the images that you may use. The exit code is 1 if an image is broken."""
    if mine:
        _list_own(ctx.obj, as_json)
        return
    site = site_of(ctx.obj)
    unused = site.owner and not site.images.pool.exists()  # a personal site before its first job
    found = [] if unused else listing(site.images.pool)
    if not effective_root():
        found = [item for item in found if policy_refusal(site, item.name) is None]
    uses = table.jobs_by_version(site.paths)
    wanted = pairs(labels, "--label").items()
    rows = [table.row(item, site, uses) for item in found]
    rows = [row for row in rows if wanted <= row.get("labels", {}).items()]
    if as_json:
        write_json(rows)
    else:
        table.show(rows)
    if any(isinstance(item, BrokenImage) for item in found):
        ctx.exit(EXIT_FAILED)


def _list_own(config: Path, as_json: bool) -> None:
    site, sources = own_images(config)
    rows = [row for source in sources for row in source.mine(site)]
    if as_json:
        write_json(rows)
        return
    cells = [(row["name"], size(int(row["size"])), row["used"], row["reference"]) for row in rows]
    shown = [[printable(str(cell)) for cell in each] for each in cells]
    tables.show(("NAME", "SIZE", "LAST USED", "REFERENCE"), shown, right=("SIZE",))


@click.command()
@click.argument("name")
@as_json
@click.pass_context
def show(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show, as JSON, the sidecar of an image and the jobs that use it.

    The option --json is not needed.
    """
    del as_json
    site = site_of(ctx.obj)
    check_allowed(site, name)
    sidecar = describe(site.images.pool, name)
    users = table.users(table.jobs_by_version(site.paths), site.images.pool / name)
    write_json({**sidecar.as_json(), "used_by": None if users is None else list(users)})


@click.command()
@click.argument("names", nargs=-1)
@as_json
@click.pass_context
def verify(ctx: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """Check images (default: all): file hashes, disks, and whether QEMU's user can read them.

    As root, also record the time of the check, and the new inodes if the pool was copied. Exit code
    1 if a check fails, or if jobs cannot use an image because it lacks a signature.
    """
    site = site_of(ctx.obj)
    pool = site.images.pool
    for name in names:
        check_allowed(site, name)
    all_names = [i.name for i in listing(pool) if policy_refusal(site, i.name) is None]
    rows = []
    with bars() as told:
        for name in names or all_names:
            told.step(f"hashing {printable(name)}")
            try:
                image = pool_of.verify(pool, name, told.show_progress)
                by = signer_of_image(site, describe(pool, name))
                rows.append({"name": name, "ok": True, "sha256": image.sha256, "signed_by": by})
            except Refused as error:
                rows.append({"name": name, "ok": False, "reason": str(error)})
    if as_json:
        write_json(rows)
    for row in () if as_json else rows:
        if row["ok"]:
            by = f", signed by {printable(str(row['signed_by']))}" if row["signed_by"] else ""
            click.echo(f"{row['name']}: ok, sha256 {row['sha256']}{by}")
        else:
            click.echo(row["reason"], err=True)
    if not all(row["ok"] for row in rows):
        ctx.exit(EXIT_FAILED)


@click.command()
@click.argument("name")
@click.option(
    "--when-free",
    is_flag=True,
    help="Also while jobs use it; the files are kept until the last job ends.",
)
@click.option(
    "--now", is_flag=True, help="Delete the files at once, also if jobs of other nodes use them."
)
@as_json
@click.pass_context
def remove(ctx: click.Context, name: str, when_free: bool, now: bool, as_json: bool) -> None:
    """Remove an image. Fails if jobs of this node use the image, unless you use --when-free.

    No new job gets the image. The files remain until the last job of this node that uses them has
    ended. This node does not know the jobs of other nodes that share the pool. Therefore the files
    also remain for some days (setting keep in [images]), unless you use --now.

    NAME can also be an image in your own cache (vmgr images list --mine). Queued jobs that use this
    image will be refused.
    """
    if is_own_image(name):
        _remove_own(ctx.obj, name, as_json)
        return
    site, _ = root_site(ctx.obj)
    keep = 0.0 if now else site.images.keep
    left = pool_of.remove(site.images.pool, name, paths=site.paths, keep=keep, when_free=when_free)
    if as_json:
        write_json({"name": name, "used_by": list(left.used_by), "kept": list(left.kept)})
        return
    why = []
    if left.used_by:
        why.append(f"until {', '.join(left.used_by)} end")
    if left.kept and keep > 0:
        why.append(
            f"for {keep / 86400:g} days, because jobs of other nodes may use them (see --now)"
        )
    click.echo(f"removed {name}" + (f"; its files are kept {' and '.join(why)}" if why else ""))


def _remove_own(config: Path, name: str, as_json: bool) -> None:
    site, sources = own_images(config)
    if not any(source.remove(site, name) for source in sources):
        raise Refused("is not in your cache", key="img", value=name, fix="vmgr images list --mine")
    if as_json:
        write_json({"name": name})
        return
    click.echo(f"removed {name}")


@click.command()
@click.argument("name")
@click.argument("labels", nargs=-1, metavar="[KEY=VALUE | KEY-]...")
@as_json
@click.pass_context
def label(ctx: click.Context, name: str, labels: tuple[str, ...], as_json: bool) -> None:
    """Show, set (KEY=VALUE) or remove (KEY-) labels of an image. Its content stays the same."""
    changes: dict[str, str | None] = {}
    for word in labels:
        key, equals, value = word.partition("=")
        if not equals and word.endswith("-") and len(word) > 1:
            changes[word[:-1]] = None
        elif equals and key:
            changes[key] = value
        else:
            raise UsageError(f"{printable(word)}: write KEY=VALUE, or KEY- to remove a label")
    site = root_site(ctx.obj)[0] if changes else site_of(ctx.obj)
    check_allowed(site, name)
    if changes:
        before = describe(site.images.pool, name).signature
        sidecar = pool_of.label(site.images.pool, name, changes, site.paths)
        if before and not sidecar.signature:
            click.echo(
                f"note: the signature of {name} is invalid now, because the labels have changed",
                err=True,
            )
    else:
        sidecar = describe(site.images.pool, name)
    found = dict(sorted(sidecar.built.labels.items()))
    if as_json:
        write_json(found)
    for key, text in () if as_json else found.items():
        click.echo(f"{key}={text}")


@click.command()
@click.argument("name", required=False)
@as_json
@click.pass_context
def default(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Show or set the image of jobs that name no image: [options.img] default in the config.

    NAME is set only in this host's config. Copy the config to nodes that do not share it.
    """
    if name is not None:
        set_default(ctx.obj, name)
    else:
        name = default_image(site_of(ctx.obj))
    if as_json:
        write_json({"default": name or None})
    else:
        click.echo(name or "none: jobs choose an image by -vm distro= and arch=, or must name one")
