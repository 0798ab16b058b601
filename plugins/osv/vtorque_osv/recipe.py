"""The recipe of an OSv image, from ``-o key=value`` or an equivalent TOML file.

    loader = "loader-stripped.elf"     # or loader.img, for a bootable disk
    mounts = ["/data"]                 # mount points for shares
    libdirs = ["lib"]                  # searched first for libraries
    min_ram = "64M"
    root_share = "sim"                 # the site's share with the root file system
    root_directory = "/srv/osv/sim"    # where the build writes that file system; omit if it exists

    [files]                            # path in the image = file or directory on this machine
    "/hello" = "hello"

    [commands]                         # by name, for job scripts
    greet = "/hello world"

    [env]
    OMP_NUM_THREADS = "1"

Paths on this machine may be relative to the directory of the recipe.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vtorque_core.api import Refused, name_errors, size_mib
from vtorque_osv import cmdline, script

_SHARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,35}", re.ASCII)  # as [shares.<name>]
MAX_RECIPE = 1 << 20  # bytes
_MAX_LABEL = 255  # characters: a command line becomes a label of the image
_MAX_COMMANDS = 48
_TABLES = {"file": "files", "command": "commands", "env": "env"}
_LISTS = ("mounts", "libdirs")
_PATHS = ("loader", "root_directory")
_WORDS = ("min_ram", "root_share")


@dataclass(frozen=True)
class OsvRecipe:
    """A validated recipe. ``files`` maps paths in the image to host paths; ``min_ram`` in MiB."""

    loader: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    libdirs: tuple[Path, ...] = ()
    min_ram: int = 64
    root_share: str = ""
    root_directory: Path | None = None


def from_arguments(arguments: Mapping[str, str]) -> OsvRecipe:
    """Return the recipe from the options of ``vmgr images build``.

    ``recipe=FILE`` names a TOML file. The other options override the file's values: ``loader=``,
    ``min_ram=``, ``root_share=``, ``root_directory=``, ``mounts=A,B``, ``libdirs=A,B``,
    ``file:/in/image=PATH``, ``command:NAME=LINE``, ``env:NAME=VALUE``. Raises Refused.
    """
    base, data = Path(), dict[str, Any]()
    if "recipe" in arguments:
        base = Path(arguments["recipe"]).parent
        data = _read(Path(arguments["recipe"]))
    for key, value in arguments.items():
        table, colon, name = key.partition(":")
        if colon and table in _TABLES:
            _table(data, _TABLES[table])[name] = (
                str(Path(value).absolute()) if table == "file" else value
            )
        elif key in _LISTS:
            words = [word for word in value.split(",") if word]
            data[key] = [str(Path(w).absolute()) for w in words] if key == "libdirs" else words
        elif key in _PATHS:
            data[key] = str(Path(value).absolute())
        elif key in _WORDS:
            data[key] = value
        elif key != "recipe":
            raise Refused(
                f"option {key}: unknown; known: recipe, loader, min_ram, mounts, libdirs, "
                "root_share, root_directory, file:PATH, command:NAME, env:NAME"
            )
    return _validate(data, base)


def _read(path: Path) -> dict[str, Any]:
    with name_errors(f"recipe {path}", fault=Refused), path.open("rb") as file:
        content = file.read(MAX_RECIPE + 1)
    if len(content) > MAX_RECIPE:
        raise Refused(f"recipe {path}: is larger than {MAX_RECIPE >> 20} MiB")
    with name_errors(f"recipe {path}", ValueError, fault=Refused):
        return tomllib.loads(content.decode())


def _validate(data: Mapping[str, Any], base: Path) -> OsvRecipe:
    known = {*_PATHS, *_WORDS, *_LISTS, *_TABLES.values()}
    unknown = sorted(set(data) - known)
    if unknown:
        raise Refused(f"{unknown[0]}: unknown; known: {', '.join(sorted(known))}")
    if not isinstance(data.get("loader"), str):
        raise Refused("loader: must be the path of OSv's loader-stripped.elf or loader.img")
    files = {_guest_path(path): base / source for path, source in _texts(data, "files").items()}
    commands = _texts(data, "commands")
    for name, line in commands.items():
        _check_command(name, line)
    if len(commands) > _MAX_COMMANDS:
        raise Refused(f"commands: there are {len(commands)}, and the limit is {_MAX_COMMANDS}")
    env = _texts(data, "env")
    fit = {name for name, value in env.items() if not {"\\", "\n"} & set(value)}
    dropped = sorted(set(env) - (fit & set(cmdline.guest_variables(env))))
    if dropped:
        raise Refused(f"env: {dropped[0]} is reserved, or has a value that OSv does not support")
    mounts = tuple(_guest_path(path) for path in _list(data, "mounts"))
    if any("," in path or len(",".join(mounts)) > _MAX_LABEL for path in mounts):
        raise Refused(
            f"mounts: a path contains ',', or the paths exceed {_MAX_LABEL} characters in total"
        )
    root_share, root_directory = _root(data, base, bool(files))
    return OsvRecipe(
        loader=base / data["loader"],
        files=files,
        commands=commands,
        env=env,
        mounts=mounts,
        libdirs=tuple(base / path for path in _list(data, "libdirs")),
        min_ram=_min_ram(data.get("min_ram", "64M")),
        root_share=root_share,
        root_directory=root_directory,
    )


def _root(data: Mapping[str, Any], base: Path, files: bool) -> tuple[str, Path | None]:
    share, directory = data.get("root_share", ""), data.get("root_directory")
    if not isinstance(share, str) or (share and not _SHARE.fullmatch(share)):
        raise Refused(f"root_share={share!r}: must be the name of a share of the site's config")
    if directory is None:
        if share and files:
            raise Refused("files: needs root_directory, a directory of the share for these files")
        return share, None
    if not isinstance(directory, str) or not share:
        raise Refused("root_directory: must be a path, and needs root_share")
    return share, base / directory


def _min_ram(text: Any) -> int:
    with name_errors(f"min_ram={text}", ValueError, fault=Refused):
        return size_mib(str(text))


def _check_command(name: str, line: str) -> None:
    if not script.COMMAND_NAME.fullmatch(name):
        raise Refused(f"commands: {name!r}: a name may have letters, digits, '_', '.', '-'")
    if len(line) > _MAX_LABEL:
        raise Refused(f"commands.{name}: is longer than {_MAX_LABEL} characters")
    try:
        found = script.parse(line.encode(), {})
    except Refused as error:
        raise Refused(f"commands.{name}: {error.refusals[0].message}") from None
    if len(found) != 1 or found[0].end != ";":
        raise Refused(f"commands.{name}: must run exactly one program")


def _guest_path(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or not path.isprintable():
        raise Refused(f"{path!r}: must be an absolute path without '..'")
    return str(pure)


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.setdefault(name, {})
    if not isinstance(found, dict):
        raise Refused(f"{name}: must be a table")
    return found


def _texts(data: Mapping[str, Any], name: str) -> dict[str, str]:
    found = data.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise Refused(f"{name}: must be a table of strings")
    return found


def _list(data: Mapping[str, Any], name: str) -> list[str]:
    found = data.get(name, [])
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise Refused(f"{name}: must be a list of strings")
    return found
