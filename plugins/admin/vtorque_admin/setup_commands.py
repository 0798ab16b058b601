"""Install the commands ``vsub``, ``vmgr`` and ``vtorque`` for all users.

Creates links in ``[paths] commands``, completion files in ``share`` beside that directory, and
modules for Environment Modules and Lmod. ``vsub`` has no completion.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from click.shell_completion import ShellComplete, get_completion_class

from vtorque_core.api import HostFault
from vtorque_core.api.setup_steps import make_directories, safefs

Say = Callable[[str], None]
Content = Path | bytes  # a link's target, or a file's content

COMMANDS = ("vsub", "vmgr", "vtorque")
_COMPLETED = ("vmgr", "vtorque")
# Directories that each shell searches: bash-completion's README, zshcompsys(1) with Debian's fpath,
# fish-completions(1).
_PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
_WHATIS = "vTorque: batch jobs in virtual machines"
_MAX_FILE = 64 << 10  # bytes; files of vTorque have about 2000


def install(commands: str, modulefiles: str, say: Say, *, dry_run: bool = False) -> None:
    """Create the missing links and files. Files of other installations stay unchanged."""
    for path, content in _wanted_files(commands, modulefiles):
        try:
            there = _read_file(path)
            if there == content:
                continue
            if there is not None and not _is_ours(there, content):
                say(f"warning: {path} exists and belongs to another installation: not changed")
                continue
            kind = f"link {path} to {content}" if isinstance(content, Path) else f"write {path}"
            say(f"would {kind}" if dry_run else kind)
            if not dry_run:
                _write_file(path, content)
        except (OSError, HostFault) as error:
            say(f"warning: cannot make {path}: {error}")


def uninstall(commands: str, modulefiles: str, say: Say) -> None:
    """Remove the links and files that :func:`install` has created."""
    for path, content in _wanted_files(commands, modulefiles):
        try:
            there = _read_file(path)
            if there is not None and _is_ours(there, content):
                safefs.remove_file(str(path))
                say(f"removed {path}")
        except (OSError, HostFault) as error:
            say(f"warning: cannot remove {path}: {error}")


def _wanted_files(commands: str, modulefiles: str) -> Iterator[tuple[Path, Content]]:
    if not commands:
        return
    directory, own = Path(commands), Path(sys.prefix, "bin")
    for name in COMMANDS if directory != own else ():
        yield directory / name, own / name
    for name in _COMPLETED:
        for shell, place in _PLACES.items():
            yield directory.parent / "share" / place.format(name), _completion(shell, name)
    if modulefiles:  # modulefile(4); Lmod uses vtorque.lua
        word = re.sub(r"([^A-Za-z0-9/._-])", r"\\\1", commands)
        tcl = f"#%Module1.0\nmodule-whatis {{{_WHATIS}}}\nprepend-path PATH {word}\n"
        yield Path(modulefiles, "vtorque"), tcl.encode() + _mark()
        word = json.dumps(commands, ensure_ascii=False)
        lua = f'whatis("{_WHATIS}")\nprepend_path("PATH", {word})\n-- '
        yield Path(modulefiles, "vtorque.lua"), lua.encode() + _mark()


def _completion(shell: str, program: str) -> bytes:
    found = get_completion_class(shell)
    if found is None:
        raise HostFault(f"the installed click has no completion for {shell}")
    complete = found(click.Command(program), {}, program, f"_{program.upper()}_COMPLETE")
    # Not BashComplete.source(), which runs root's bash.
    return ShellComplete.source(complete).encode() + _mark()


def _mark() -> bytes:
    return f"# Written by vTorque setup install of {sys.prefix}\n".encode()


def _read_file(path: Path) -> Content | None:
    if path.is_symlink():
        return path.readlink()
    if not path.exists():
        return None
    with open(path if path.is_file() else os.devnull, "rb", opener=_open_at_once) as file:
        return file.read(_MAX_FILE)


def _open_at_once(path: str, flags: int) -> int:
    # The file may have been replaced by a link, or by a FIFO, whose open would block (open(2)).
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_ours(there: Content, wanted: Content) -> bool:
    older = isinstance(wanted, bytes) and isinstance(there, bytes) and there.endswith(_mark())
    return older or there == wanted


def _write_file(path: Path, content: Content) -> None:
    make_directories(path.parent)
    if isinstance(content, bytes):
        safefs.replace(str(path), content, mode=0o644)
        return
    with safefs.parent_of(str(path)) as (directory, name):
        os.symlink(content, name, dir_fd=directory)
