"""``vtorque setup``: make this node ready for VM jobs, or take that back. Root only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vtorque_core.errors import EXIT_FAILED, UsageError, printable


@click.group()
def setup() -> None:
    """Prepare this node, or take it back."""
    if os.geteuid() != 0:
        raise UsageError("vtorque setup changes the node: run it as root")


def _many(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that a command for many nodes has."""
    options: list[Callable[..., Any]] = [
        click.option("--config", type=click.Path(path_type=Path), help="Other config file."),
        click.option("--nodes", metavar="NODESET", help="Do it on these by ssh: n[1-3],m7."),
        click.option(
            "--fanout",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="How many nodes at a time.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@setup.command()
@_many
@click.option("--batch", default="local", show_default=True, help="The site's batch system.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--secret-from-stdin", is_flag=True, hidden=True)
def install(
    config: Path | None,
    nodes: str | None,
    fanout: int,
    batch: str,
    dry_run: bool,
    secret_from_stdin: bool,
) -> None:
    """Make directories, site secret, network and the batch system's hooks; name it in the config.

    Idempotent: what holds already is left. A step that fails says what to do, and the next run
    goes on. Exit code 0 when the node is (with --nodes: all nodes are) ready.
    """
    from vtorque_core import batch_setup  # noqa: PLC0415
    from vtorque_core import setup as steps  # noqa: PLC0415
    from vtorque_core.cli.site import load_for_root  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    path = config or CONFIG_PATH
    site, plugins = load_for_root(path)
    plugins.batch_system(batch)
    if nodes is not None:
        secret = b"" if dry_run else steps.site_secret(site, click.echo)
        argv = ["install", "--batch", batch]
        argv += ["--dry-run"] if dry_run else ["--secret-from-stdin"]
        _on_nodes(nodes, argv, config, secret, fanout, show_all=dry_run)
        return
    given = sys.stdin.buffer.read(1 << 16) if secret_from_stdin else None
    steps.install(site, click.echo, secret=given, dry_run=dry_run)
    batch_setup.install(site, plugins, path, batch, click.echo, dry_run=dry_run)


@setup.command()
@_many
@click.option("--purge", is_flag=True, help="Also remove images, site secret and config.")
def uninstall(config: Path | None, nodes: str | None, fanout: int, purge: bool) -> None:
    """Take back the hooks, the guests' network and the runtime directories.

    What was there before is restored byte for byte; what was edited since stays and is told.
    Refused while jobs run.
    """
    from vtorque_core import batch_setup  # noqa: PLC0415
    from vtorque_core import setup as steps  # noqa: PLC0415
    from vtorque_core.cli.site import load_for_root  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    path = config or CONFIG_PATH
    if nodes is not None:
        argv = ["uninstall", *(["--purge"] if purge else [])]
        _on_nodes(nodes, argv, config, b"", fanout, show_all=False)
        return
    site, plugins = load_for_root(path)
    steps.require_idle(site)
    batch_setup.uninstall(site, plugins, path, click.echo)
    steps.uninstall(site, path, click.echo, purge=purge)


def _on_nodes(
    nodes: str, words: list[str], config: Path | None, stdin: bytes, fanout: int, *, show_all: bool
) -> None:
    """Run ``vtorque setup WORDS`` on the nodes; end with exit code 1 unless all did well."""
    from vtorque_core import cluster  # noqa: PLC0415
    from vtorque_core.cli.progress import progress  # noqa: PLC0415

    names = cluster.nodes_of(nodes)
    program = str(Path(sys.prefix, "bin", "vtorque"))
    place = ["--config", str(config.absolute())] if config else []
    with progress() as tell:
        count = 0

        def ended(node: str, code: int | None) -> None:
            nonlocal count
            count += 1
            said = {0: "done", None: "no answer in time"}.get(code, f"failed, exit code {code}")
            tell(f"{count}/{len(names)} {node}: {said}")

        argv = [program, "setup", *words, *place]
        answers = cluster.run(names, argv, stdin, fanout, ended)
    for answer in answers:
        if not answer.ok or show_all:
            click.echo(f"{answer.nodes}:")
            text = answer.text or ("no answer in time" if answer.code is None else "no output")
            for line in text.split("\n"):
                click.echo(f"  {printable(line, 1000)}")
    well = sum(answer.count for answer in answers if answer.ok)
    bad = [answer.nodes for answer in answers if not answer.ok]
    failed = f"; failed: {cluster.fold(bad)}" if bad else ""
    click.echo(f"{well} of {len(names)} nodes done{failed}")
    if bad:
        sys.exit(EXIT_FAILED)
