"""Torque's submit filter: plain ``qsub`` submits scripts with ``#VSUB -vm`` lines as VM jobs.

qsub runs this program as the user, with qsub's arguments, and submits the program's output
instead of the script. Directives that the program adds have lower precedence than the command line
(qsub(1B), SUBMITFILTER).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vtorque_admin.steps import MARK, Change, Check, ReplacedFile, edit_file
from vtorque_core.api import HostFault, UsageError
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_pbs import convention as pbs
from vtorque_pbs.qsub_dialect import Options

NAME = "vtorque-submitfilter"
_DEFAULT = Path("/usr/local/sbin/torque_submitfilter")  # used by qsub if torque.cfg names none
_PREFIXED = "libexec/qsub_filter"  # likewise, below Torque's prefix

_OFF = b"#vtorque# "
_OURS = b"# Written by " + MARK + b"; with the next line\n"
_CREATED = b"# Created by " + MARK + b"\n"
_FILTER = re.compile(rb"^[ \t]*SUBMITFILTER[ \t]+(\S+)[^\n]*\n?", re.MULTILINE)

_NOT_NEEDED = {"-l walltime"}  # options that the command line may override: time to start guests
# Such a program starts faster than a shell, and a shell reads pipes byte by byte.
_SOURCE = Path(__file__).with_name("submit_filter.c")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Os", "-s",
          "-Wl,--build-id=none")  # fmt: skip
_COMPILERS = (
    ("musl-gcc", "-static"),
    ("gcc", "-static"),
    ("gcc",),
)  # the last: no static C library


def build(place: Installation, site: Path | None) -> bytes:
    """Compile the filter, which runs the site's filter first, and vsub only for ``#VSUB`` lines.

    Raises:
        HostFault: No compiler is installed, or all fail.
    """
    paths = {"SITE": site or "", "VSUB": place.program.with_name("vsub")}
    defines = [f"-D{name}={_literal(os.fsencode(path))}" for name, path in paths.items()]
    problem = "the compiler gcc for the submit filter is missing: install gcc, or musl-tools"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, NAME)
        for cc, *static in _COMPILERS:
            found = shutil.which(cc)
            if found is None:
                continue
            argv = [found, *_FLAGS, *static, *defines, "-o", str(out), _SOURCE.name]
            done = subprocess.run(
                argv, cwd=_SOURCE.parent, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode == 0:
                return out.read_bytes()
            problem = f"{cc} could not compile the submit filter: {done.stderr[-2000:]}"
    raise HostFault(problem)


def _literal(text: bytes) -> str:
    """Return a C string literal."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text) + '"'


def steps(home: Path, place: Installation, bindir: str = "") -> list[SetupStep]:
    """Return the steps that install the filter and name it in torque.cfg.

    ``bindir`` is the directory of qsub; if it is empty, PATH is searched.
    """
    config = home / "torque.cfg"
    path = place.jobshell.with_name(NAME)
    program, problem = b"", ""
    try:
        program = build(place, _site_filter(config, path, bindir))
    except HostFault as error:
        problem = str(error)
    compiled = Check("compiler for the submit filter", problem)
    return [compiled, ReplacedFile(path, program), _config_line(config, path)]


def _site_filter(config: Path, ours: Path, bindir: str = "") -> Path | None:
    text = config.read_bytes() if config.exists() else b""
    found = [Path(os.fsdecode(name)) for name in _FILTER.findall(text.replace(_OFF, b""))]
    others = [each for each in found if each != ours]
    if others:
        return others[-1]
    qsub = shutil.which("qsub", path=f"{bindir}:{os.environ.get('PATH', os.defpath)}")
    prefixed = Path(qsub).parent.parent / _PREFIXED if qsub else _DEFAULT
    return next((each for each in (_DEFAULT, prefixed) if each.exists()), None)


def _config_line(config: Path, path: Path) -> Change:
    line = b"SUBMITFILTER " + os.fsencode(path) + b"\n"

    def without(text: bytes) -> bytes:
        if _OURS not in text:
            return text
        own = text.replace(_OURS + line, b"").replace(_CREATED, b"")
        return re.sub(rb"^" + _OFF, b"", own, flags=re.MULTILINE)

    def apply() -> None:
        created = b"" if config.exists() else _CREATED

        def with_ours(text: bytes) -> bytes:
            # Not appended: the last line may lack a newline.
            kept = _FILTER.sub(lambda match: _OFF + match[0], without(text))
            return created + _OURS + line + kept

        edit_file(config, with_ours, may_be_missing=True)

    def undo() -> None:
        if config.exists():
            edit_file(config, without, may_be_missing=_CREATED in config.read_bytes())

    return Change(
        f"set SUBMITFILTER {path} in {config}",
        lambda: config.exists() and _OURS + line in config.read_bytes(),
        apply,
        undo,
    )


def add_directives(content: bytes, prefix: str, words: Sequence[str], line: Options) -> bytes:
    """Return the script with added directives. ``words`` are pairs of option and value.

    Raises:
        UsageError: qsub's command line has an option, other than ``-l walltime``, that would
            override an added directive.
    """
    given = {_name(f"-{letter}", part) for letter, value in line for part in value.split(",")}
    pairs = list(zip(words[::2], words[1::2], strict=True))
    pairs = [pair for pair in pairs if _name(*pair) not in given & _NOT_NEEDED]
    if clash := [pair for pair in pairs if _name(*pair) in given]:
        shown = " ".join(shlex.join(pair) for pair in clash)
        raise UsageError(
            f"the VM job needs {shown}, but qsub's command line has other values. Use these "
            "values, move your options into #PBS lines of the script, or submit with vsub"
        )
    added = "".join(f"{prefix} {shlex.join(pair)}\n" for pair in pairs)
    at = _end_of_directives(content)
    return content[:at] + os.fsencode(added) + content[at:]


def _name(option: str, value: str) -> str:
    return f"{option} {value.partition('=')[0]}" if option == "-l" else option


def _end_of_directives(content: bytes) -> int:
    at = 0
    for line in content.splitlines(keepends=True):
        if line.strip() and not line.lstrip().startswith(b"#") and not line.startswith(b":"):
            break
        at += len(line)
    return at


def parse(argv: Sequence[str], getopt: str) -> pbs.QsubArgs:
    """Parse qsub's arguments as the filter gets them, without the script's name."""
    found = pbs.split_qsub(argv, getopt)
    operands = set(found.operand_indexes)
    rest = tuple(word for at, word in enumerate(found.rest) if at not in operands)
    return pbs.QsubArgs(found.options, (), (), None, found.vm, rest)
