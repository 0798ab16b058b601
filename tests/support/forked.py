"""Run a vTorque command in a fork of the test process, without the startup of a new Python."""

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from vtorque_core.config.plugins import Plugins
from vtorque_testing.submit import run_in_child


@functools.cache
def import_plugins() -> None:
    """Import the modules of all plugins once, and not again in each fork."""
    Plugins.load(node=False)


def call(
    main: Callable[[], object],
    argv: list[str],
    environ: Mapping[str, str],
    directory: Path,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[str]:
    """Run a command's ``main`` with these arguments, its own name first, and surroundings."""

    def work() -> int:
        sys.argv = argv
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
                return 1
            return end.code or 0
        return 0

    import_plugins()
    ended = run_in_child(work, stdin, environ, directory)
    return subprocess.CompletedProcess(
        argv, ended.code, ended.stdout.decode(), ended.stderr.decode()
    )
