"""``vtorque cluster``, and a function that sends images to nodes."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from vtorque_cluster import cache, on_nodes
from vtorque_cluster.cache import ImagePlaces
from vtorque_cluster.examined import find_differences
from vtorque_cluster.on_nodes import NodesAnswer, fold, merge_answers, nodes_of
from vtorque_cluster.progress import progress
from vtorque_cluster.sync import NODE_TIME, push
from vtorque_cluster.sync_command import fanout_option
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
from vtorque_core.api.setup_steps import make_directories
from vtorque_core.live.service import site_and_installation

_NODES = click.option("--nodes", metavar="NODESET", required=True, help="The nodes: n[1-3],m7.")
_CONFIG = click.option(
    "--config", type=click.Path(readable=False, path_type=Path), help="Other config file."
)


@click.group(short_help="Set up, check or uninstall many nodes by ssh.")
def cluster() -> None:
    """Run vtorque setup, or doctor, on many nodes at once, by ssh.

    The exit code is 0 if all nodes succeeded. Otherwise fix the problems and repeat the command.
    """


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UsageError("vtorque cluster changes the nodes: run it as root")


@cluster.command()
@_NODES
@_CONFIG
@fanout_option(64)
@click.option("--batch", default="local", show_default=True, help="The site's batch system.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, without doing it.")
def install(nodes: str, config: Path | None, fanout: int, batch: str, dry_run: bool) -> None:
    """Run vtorque setup install on the nodes; all get the site secret of this host."""
    _require_root()
    site, _ = site_and_installation(config)
    secret = b"" if dry_run else _site_secret(site.paths)
    words = ["install", "--batch", batch, "--dry-run" if dry_run else "--secret-from-stdin"]
    _setup(nodes, words, config, secret, fanout, show_all=dry_run)


@cluster.command()
@_NODES
@_CONFIG
@fanout_option(64)
@click.option("--purge", is_flag=True, help="Also remove images, site secret and config.")
def uninstall(nodes: str, config: Path | None, fanout: int, purge: bool) -> None:
    """Run vtorque setup uninstall on the nodes. It fails on nodes where jobs run."""
    _require_root()
    words = ["uninstall", *(["--purge"] if purge else [])]
    _setup(nodes, words, config, b"", fanout, show_all=False)


@cluster.command()
@_NODES
@_CONFIG
@fanout_option(64)
def doctor(nodes: str, config: Path | None, fanout: int) -> None:
    """Run vtorque doctor on the nodes, and compare their site secrets and subordinate ids.

    Secrets and ids must be the same on all nodes. Nodes with the same failure are listed together.
    The exit code is 1 if anything failed.
    """
    _require_root()
    place = ["--config", str(config.absolute())] if config else []
    argv, names = [_program("vtorque"), "doctor", "--json", *place], nodes_of(nodes)
    found = find_differences(_run(names, argv, b"", fanout, on_nodes.COMMAND_TIMEOUT, whole=True))
    for what, where in found.items():
        click.echo(f"{fold(where)}:")
        for line in what.split("\n"):
            click.echo(f"  {printable(line, 1000)}")
    bad = {name for where in found.values() for name in where}
    failed = f"; failed: {fold(sorted(bad))}" if bad else ""
    click.echo(f"{len(names) - len(bad)} of {len(names)} nodes healthy{failed}")
    if bad:
        sys.exit(EXIT_FAILED)


def _site_secret(paths: Paths) -> bytes:
    """Return the site secret for all nodes; create it if this host has none."""
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
    place = ["--config", str(config.absolute())] if config else []
    argv = [_program("vtorque"), "setup", *words, *place]
    answers = _run(nodes_of(nodes), argv, stdin, fanout, on_nodes.COMMAND_TIMEOUT)
    _conclude(answers, show_all=show_all)


def send_images(
    config: Path, places: ImagePlaces, names: tuple[str, ...], nodes: str, fanout: int
) -> None:
    """Copy images (default: all) to the nodes' caches; exit with 1 if a node failed."""
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
    """Return the path of a command. Nodes must have the installation at the same path."""
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

    with progress() as tell:
        count = 0

        def ended(node: str, code: int | None) -> None:
            nonlocal count
            count += 1
            said = {0: "done", None: "no answer in time"}.get(code, f"failed, exit code {code}")
            tell(f"{count}/{len(names)} {node}: {said}")

        return on_nodes.run(names, argv, stdin, fanout, ended, seconds, whole=whole)


def _conclude(answers: Sequence[NodesAnswer], *, show_all: bool = False) -> None:
    """Print the failures (or all output) and a summary; exit with 1 if there are failures."""
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
