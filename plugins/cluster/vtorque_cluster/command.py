"""``vtorque cluster``: set up and check many nodes by ssh; ``vmgr images sync``. Runs as root."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vtorque_core.api import (
    EXIT_FAILED,
    HostFault,
    Paths,
    Refused,
    UsageError,
    printable,
    replace_file,
    require_secret,
)

if TYPE_CHECKING:
    from vtorque_cluster.cache import ImagePlaces
    from vtorque_cluster.on_nodes import NodesAnswer

_NODES = click.option("--nodes", metavar="NODESET", required=True, help="The nodes: n[1-3],m7.")
_CONFIG = click.option(
    "--config", type=click.Path(readable=False, path_type=Path), help="Other config file."
)


def _fanout(default: int) -> Callable[..., Any]:
    kind = click.IntRange(min=1)
    said = "Number of nodes at the same time."
    return click.option("--fanout", type=kind, default=default, show_default=True, help=said)


@click.group(short_help="Set up, check or uninstall many nodes by ssh.")
def cluster() -> None:
    """Run vtorque setup, or doctor, on many nodes at once, by ssh.

    Exit code 0 when all nodes are done: call it again for the rest.
    """
    if os.geteuid() != 0:
        raise UsageError("vtorque cluster changes the nodes: run it as root")


@cluster.command()
@_NODES
@_CONFIG
@_fanout(64)
@click.option("--batch", default="local", show_default=True, help="The site's batch system.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, without doing it.")
def install(nodes: str, config: Path | None, fanout: int, batch: str, dry_run: bool) -> None:
    """Run vtorque setup install on the nodes; all get the site secret of this host."""
    from vtorque_core.live.service import site_and_installation  # noqa: PLC0415

    site, _ = site_and_installation(config)
    secret = b"" if dry_run else _site_secret(site.paths)
    words = ["install", "--batch", batch, "--dry-run" if dry_run else "--secret-from-stdin"]
    _setup(nodes, words, config, secret, fanout, show_all=dry_run)


@cluster.command()
@_NODES
@_CONFIG
@_fanout(64)
@click.option("--purge", is_flag=True, help="Also remove images, site secret and config.")
def uninstall(nodes: str, config: Path | None, fanout: int, purge: bool) -> None:
    """Run vtorque setup uninstall on the nodes. Nodes on which jobs run refuse it."""
    words = ["uninstall", *(["--purge"] if purge else [])]
    _setup(nodes, words, config, b"", fanout, show_all=False)


@cluster.command()
@_NODES
@_CONFIG
@_fanout(64)
def doctor(nodes: str, config: Path | None, fanout: int) -> None:
    """Run vtorque doctor on the nodes, and compare what must be the same on all of them.

    These are the site secret and users' subordinate ids. Nodes with the same failure are listed
    together. The exit code is 1 if anything failed.
    """
    from vtorque_cluster import on_nodes  # noqa: PLC0415 - ClusterShell
    from vtorque_cluster.examined import find_differences  # noqa: PLC0415

    place = ["--config", str(config.absolute())] if config else []
    argv, names = [_program("vtorque"), "doctor", "--json", *place], on_nodes.nodes_of(nodes)
    found = find_differences(_run(names, argv, b"", fanout, on_nodes.COMMAND_TIMEOUT, whole=True))
    for what, where in found.items():
        click.echo(f"{on_nodes.fold(where)}:")
        for line in what.split("\n"):
            click.echo(f"  {printable(line, 1000)}")
    bad = {name for where in found.values() for name in where}
    failed = f"; failed: {on_nodes.fold(sorted(bad))}" if bad else ""
    click.echo(f"{len(names) - len(bad)} of {len(names)} nodes healthy{failed}")
    if bad:
        sys.exit(EXIT_FAILED)


def _site_secret(paths: Paths) -> bytes:
    """Return the site secret, which all nodes get; create it if this host has none."""
    from vtorque_core.api.setup_steps import make_directories  # noqa: PLC0415

    place = paths.secret
    if not place.exists():
        click.echo(f"create {place}")
        make_directories(place.parent)
        replace_file(str(place), secrets.token_bytes(64), mode=0o600)
    require_secret(place, os.geteuid())
    return place.read_bytes()


def _setup(
    nodes: str, words: list[str], config: Path | None, stdin: bytes, fanout: int, *, show_all: bool
) -> None:
    from vtorque_cluster import on_nodes  # noqa: PLC0415 - ClusterShell

    place = ["--config", str(config.absolute())] if config else []
    argv = [_program("vtorque"), "setup", *words, *place]
    answers = _run(on_nodes.nodes_of(nodes), argv, stdin, fanout, on_nodes.COMMAND_TIMEOUT)
    _conclude(answers, show_all=show_all)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--nodes", metavar="NODESET", help="The nodes, reached by ssh: n[1-3],m7.")
@_fanout(8)
@click.option("--received", is_flag=True, hidden=True)
@click.option("--only", is_flag=True, hidden=True)
@click.pass_obj
def sync(
    config: Path, names: tuple[str, ...], nodes: str | None, fanout: int, received: bool, only: bool
) -> None:
    """Copy images (default: all) to [images] cache of the nodes.

    An interrupted copy continues. A copy whose hash differs from the pool's sidecar is deleted.
    Without names, unused images that are no longer in the pool are removed.
    """
    from vtorque_cluster import cache  # noqa: PLC0415 - only what the command needs
    from vtorque_cluster.sync import receive  # noqa: PLC0415

    places = cache.places(config)
    if nodes is not None:
        _send(config, places, names, nodes, fanout)
    elif received:
        done = receive(places, names, only=only)
        said = {"copied": done.copied, "already up to date": done.same, "removed": done.removed}
        for word, found in said.items():
            if found:
                click.echo(f"{word}: {', '.join(found)}")
    else:
        raise UsageError("the nodes are missing: add --nodes NODESET")


def _send(
    config: Path, places: ImagePlaces, names: tuple[str, ...], nodes: str, fanout: int
) -> None:
    """Send images to the nodes and receive them there; exit with 1 if a node failed."""
    from vtorque_cluster import cache  # noqa: PLC0415
    from vtorque_cluster.on_nodes import merge_answers, nodes_of  # noqa: PLC0415 - ClusterShell
    from vtorque_cluster.progress import progress  # noqa: PLC0415
    from vtorque_cluster.sync import NODE_TIME, push  # noqa: PLC0415

    wanted = nodes_of(nodes)
    argv = [_program("vmgr"), "--config", str(config.absolute()), "images", "sync", "--received"]
    argv += [] if names else ["--only"]
    names = names or tuple(cache.files(places))
    failed: dict[str, list[str]] = {}
    with progress() as tell, ThreadPoolExecutor(fanout) as threads:
        tell(f"sending {len(names)} images to {len(wanted)} nodes")
        work = {node: threads.submit(push, places, names, node) for node in wanted}
        for count, (node, sent) in enumerate(work.items(), 1):
            try:
                sent.result()
            except (HostFault, Refused) as error:
                failed[node] = [str(error)]
            tell(f"{count}/{len(wanted)} {node}: {'failed' if node in failed else 'sent'}")
    answers = merge_answers(dict.fromkeys(failed, EXIT_FAILED), failed)
    if there := [node for node in wanted if node not in failed]:
        answers += _run(there, [*argv, "--", *names], b"", fanout, NODE_TIME)
    _conclude(answers)


def _program(name: str) -> str:
    """Return the path of a command of this installation, which is the same on the nodes."""
    return str(Path(sys.prefix, "bin", name))


def _run(
    names: Sequence[str],
    argv: list[str],
    stdin: bytes,
    fanout: int,
    seconds: float,
    *,
    whole: bool = False,
) -> list[NodesAnswer]:
    from vtorque_cluster import on_nodes  # noqa: PLC0415 - ClusterShell
    from vtorque_cluster.progress import progress  # noqa: PLC0415

    with progress() as tell:
        count = 0

        def ended(node: str, code: int | None) -> None:
            nonlocal count
            count += 1
            said = {0: "done", None: "no answer in time"}.get(code, f"failed, exit code {code}")
            tell(f"{count}/{len(names)} {node}: {said}")

        return on_nodes.run(names, argv, stdin, fanout, ended, seconds, whole=whole)


def _conclude(answers: Sequence[NodesAnswer], *, show_all: bool = False) -> None:
    """Print failures, or with ``show_all`` all output, and a summary; exit with 1 on failure."""
    from vtorque_cluster.on_nodes import fold  # noqa: PLC0415 - ClusterShell

    for answer in answers:
        if not answer.ok or show_all:
            click.echo(f"{answer.nodes}:")
            text = answer.text or ("no answer in time" if answer.code is None else "no output")
            for line in text.split("\n"):
                click.echo(f"  {printable(line, 1000)}")
    well = sum(answer.count for answer in answers if answer.ok)
    bad = [answer.nodes for answer in answers if not answer.ok]
    failed = f"; failed: {fold(bad)}" if bad else ""
    click.echo(f"{well} of {sum(answer.count for answer in answers)} nodes done{failed}")
    if bad:
        sys.exit(EXIT_FAILED)
