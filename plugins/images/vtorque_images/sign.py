"""``vmgr images sign``: sign an image with a key of the site."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from vtorque_core.api import Refused, UsageError, name_errors, printable
from vtorque_core.live import images
from vtorque_core.live.images import describe, root_site, site_of
from vtorque_images import change, signing
from vtorque_images.allowed import check_allowed
from vtorque_images.common import as_json, bars, signer_of_image, write_json

_PATH = click.Path(path_type=Path)


@click.command(short_help="Sign an image with a key of the site.")
@click.argument("name")
@click.option("--key", type=_PATH, help="A private key, made with ssh-keygen.")
@click.option(
    "--signature",
    type=_PATH,
    help="A signature of the output of --payload, made on another machine.",
)
@click.option("--payload", is_flag=True, help="Print the text to sign on another machine.")
@as_json
@click.pass_context
def sign(
    ctx: click.Context,
    name: str,
    key: Path | None,
    signature: Path | None,
    payload: bool,
    as_json: bool,
) -> None:
    """Sign an image: its name, its labels, the hashes of its files and its kernel's command line.

    The files are hashed first. If the config has [images] signers, the key must belong to a signer.
    After a change of content or labels, sign the image again.
    """
    if (key is not None) + (signature is not None) + payload != 1:
        raise UsageError("use exactly one of --key FILE, --signature FILE and --payload")
    if payload:
        site = site_of(ctx.obj)
        check_allowed(site, name)
        found = describe(site.images.pool, name)
        sys.stdout.write(images.signed_bytes(found).decode("ascii"))
        return
    site, _ = root_site(ctx.obj)
    pool = site.images.pool
    found = describe(pool, name)
    with bars() as told:
        told.step(f"hashing {printable(name)}")
        change.verify(pool, name, told.show_progress)
    if key is not None:
        text = signing.sign(found, key)
    else:
        assert signature is not None  # noqa: S101 - one of three
        text = _read(signature)
        signing.check_well_made(found, text)
    by = signer_of_image(site, replace(found, signature=text))
    change.attach(pool, found, text)
    if as_json:
        write_json({"name": name, "sha256": found.sha256, "signed_by": by})
    elif by is None:
        click.echo(
            f"{name} is signed, but jobs also use unsigned images: [images] signers is not set"
        )
    else:
        click.echo(f"{name} is signed by {printable(by)}")


def _read(path: Path) -> str:
    with name_errors(printable(str(path)), fault=Refused), path.open("rb") as file:
        return file.read(images.MAX_SIGNATURE + 1).decode("ascii", "replace")
