"""Doubles of a batch system's commands, which record their calls."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_testing.harness import ProgramResult


class RecordingCommand:
    """A program that records its calls: the double of ``qsub``, ``sbatch`` or ``qhold``.

    Args:
        path: path of the program; its directory is created.
    """

    def __init__(self, path: Path) -> None:
        self._notes = path.with_name(f".{path.name}.calls")
        self._notes.mkdir(parents=True, exist_ok=True)
        path.write_text(_RECORD.format(notes=self._notes))
        path.chmod(0o755)

    def answer(self, ended: ProgramResult) -> None:
        """Set output and exit status of the next call; later calls print nothing and return 0."""
        for name, data in (("out", ended.stdout), ("err", ended.stderr)):
            (self._notes / name).write_bytes(data)
        (self._notes / "code").write_text(str(ended.code))

    def calls(self) -> list[Call]:
        """Return the calls since the previous ``calls()``, in order."""
        found = sorted(self._notes.glob("call.*"), key=lambda path: int(path.suffix[1:]))
        calls = [_read_call(path) for path in found]
        for path in found:
            shutil.rmtree(path)
        return calls


@dataclass(frozen=True)
class Call:
    """One call of a :class:`RecordingCommand`.

    Attributes:
        argv: arguments without the program's name.
        stdin: standard input.
        environ: environment variables.
        files: for each argument that is a file's path, its index in ``argv`` and the content.
    """

    argv: tuple[str, ...]
    stdin: bytes
    environ: Mapping[str, str]
    files: Mapping[int, bytes]


_RECORD = """#!/bin/sh
n=1
while [ -e "{notes}/call.$n" ] || ! /bin/mkdir "{notes}/new.$n" 2>/dev/null; do n=$((n + 1)); done
d="{notes}/new.$n"
[ $# -eq 0 ] || printf '%s\\0' "$@" > "$d/argv"
/usr/bin/env -0 > "$d/environ"
[ -t 0 ] || /bin/cat > "$d/stdin"
i=0
for a; do [ ! -f "$a" ] || /bin/cp "$a" "$d/file.$i"; i=$((i + 1)); done
/bin/mv "$d" "{notes}/call.$n"
[ -e "{notes}/code" ] || exit 0
/bin/cat "{notes}/out"
/bin/cat "{notes}/err" >&2
code=$(/bin/cat "{notes}/code")
/bin/rm "{notes}/code"
exit "$code"
"""


def _read_call(path: Path) -> Call:
    def items(name: str) -> list[str]:
        file = path / name
        data = file.read_bytes() if file.exists() else b""
        return [os.fsdecode(item) for item in data.split(b"\0")[:-1]]

    stdin = path / "stdin"
    return Call(
        tuple(items("argv")),
        stdin.read_bytes() if stdin.exists() else b"",
        dict(item.split("=", 1) for item in items("environ")),
        {int(each.suffix[1:]): each.read_bytes() for each in path.glob("file.*")},
    )
