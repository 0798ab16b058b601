"""``vmgr images sync`` and ``default``: images on many nodes, and in the site config."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from vtorque_core.api_options import IMG
from vtorque_core.cli.images_common import as_json as json_option
from vtorque_core.cli.images_common import bars, cache_of, root_site, site_of, write_json
from vtorque_core.config import Site
from vtorque_core.errors import EXIT_FAILED, HostFault, Refused, UsageError, printable
from vtorque_core.limits import Limits

_SECONDS = 86400.0  # for one node


@click.command()
@click.argument("names", nargs=-1)
@click.option("--nodes", metavar="NODESET", help="On these, by ssh: n[1-3],m7.")
@click.option("--push", is_flag=True, help="Send the files: the nodes do not see the pool.")
@click.option(
    "--fanout",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="How many nodes at a time.",
)
@click.option("--received", is_flag=True, hidden=True)
@json_option
@click.pass_context
def sync(
    ctx: click.Context,
    names: tuple[str, ...],
    nodes: str | None,
    push: bool,
    fanout: int,
    received: bool,
    as_json: bool,
) -> None:
    """Copy images (default: all) into [images] cache of this node, or of other NODES.

    An interrupted copy goes on where it was. What has not the hash that the pool's sidecar says is
    thrown away. Without names, images that the pool has no more are removed when they are free.
    """
    from vtorque_core import image_sync  # noqa: PLC0415

    site, _ = root_site(ctx)
    cache = cache_of(site)
    if cache is None:
        raise UsageError(f"[images] cache is not set in {site.path}: there is nowhere to copy to")
    if nodes is not None:
        _on_nodes(ctx.obj, site, cache, names, nodes, fanout, push=push)
        return
    if push:
        raise UsageError("--push needs --nodes")
    with bars() as told:
        if received:
            done = image_sync.receive(cache, names, told, site.paths)
        else:
            done = image_sync.pull(site.images.pool, cache, names, told, site.paths)
    if as_json:
        write_json({k: list(getattr(done, k)) for k in ("copied", "same", "removed")})
        return
    said = {"copied": done.copied, "there already": done.same, "removed": done.removed}
    for word, found in said.items():
        if found:
            click.echo(f"{word}: {', '.join(found)}")


def _on_nodes(
    config: Path,
    site: Site,
    cache: Path,
    names: tuple[str, ...],
    nodes: str,
    fanout: int,
    *,
    push: bool,
) -> None:
    """Run it on the nodes; end with exit code 1 unless all did well."""
    from vtorque_core import cluster, image_sync  # noqa: PLC0415
    from vtorque_core.image_sidecar import names as names_of  # noqa: PLC0415

    wanted = cluster.nodes_of(nodes)
    failed: dict[str, str] = {}
    argv = [str(Path(sys.prefix, "bin", "vmgr")), "--config", str(config.absolute())]
    argv += ["images", "sync", *(["--received"] if push else [])]
    with bars() as told:
        if push:
            names = names or tuple(names_of(site.images.pool))
            told.step(f"sending {len(names)} images to {len(wanted)} nodes")
            with ThreadPoolExecutor(fanout) as threads:
                work = {
                    node: threads.submit(image_sync.push, site.images.pool, cache, names, node)
                    for node in wanted
                }
                for count, (node, each) in enumerate(work.items(), 1):
                    try:
                        each.result()
                    except (HostFault, Refused) as error:
                        failed[node] = str(error)
                    told.told(count, len(wanted))
        there = [node for node in wanted if node not in failed]

        def ended(node: str, code: int | None) -> None:
            said = {0: "done", None: "no answer in time"}.get(code, f"failed, exit code {code}")
            told.step(f"{node}: {said}")

        argv += ["--", *names]
        answers = cluster.run(there, argv, b"", fanout, ended, _SECONDS) if there else []
    for answer in answers:
        if not answer.ok:
            failed[answer.nodes] = answer.text or "no answer in time"
    for where, text in failed.items():
        click.echo(f"{where}:")
        for line in text.split("\n"):
            click.echo(f"  {printable(line, 1000)}")
    well = sum(answer.count for answer in answers if answer.ok)
    click.echo(f"{well} of {len(wanted)} nodes done")
    if failed:
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("name", required=False)
@json_option
@click.pass_context
def default(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Show the image of jobs that name none, or set it: [options.img] default in the config.

    Only this host's config is changed: where nodes have their own, copy it there.
    """
    site = site_of(ctx)
    if name is not None:
        _set_default(ctx, name)
    else:
        name = str(site.options.get(IMG.key, Limits()).default or "")
    if as_json:
        write_json({"default": name or None})
    else:
        click.echo(name or "none: the image is found by -vm distro= and arch=, or must be named")


def _set_default(ctx: click.Context, name: str) -> None:
    from vtorque_core import config_edit  # noqa: PLC0415
    from vtorque_core.config import build, parse_toml  # noqa: PLC0415
    from vtorque_core.image_pool import lookup  # noqa: PLC0415

    site, plugins = root_site(ctx)
    lookup(site.images.pool, name)
    new = config_edit.with_text(config_edit.read(site.path), f"options.{IMG.key}", "default", name)
    build(parse_toml(new.encode(), site.path), plugins, node=True)  # refuses what policy forbids
    config_edit.write(site.path, new)
