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
from collections.abc import Sequence
from pathlib import Path

from vtorque_admin.steps import MARK, Change, ReplacedFile, edit_file
from vtorque_core.api import UsageError
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

# read(1) reads the script byte by byte: up to its first command, where directives end, and then as
# far as that takes less time than to start cat(1) (1 ms, or 1000 bytes).
_NOT_NEEDED = {"-l walltime"}  # options that the command line may override: time to start guests
_SCRIPT = r"""#!/bin/sh
# {mark}: submits scripts with #VSUB lines as VM jobs.
tab='	'
add_lines() {{
  vm='' head='' end='
' command='' more=''
  while IFS= read -r line || {{ [ -n "$line" ] && end=''; }}; do
    head=$head$line$end
    case $command$line in
      '#VSUB '* | "#VSUB$tab"*) vm=1 ;;
      '#'* | '' | :*) ;;
      *)
        command=1
        [ -z "$vm" ] && [ "${{#head}}" -lt 1000 ] || {{ more=1; break; }} ;;
    esac
  done
  if [ -z "$vm" ]; then
    printf %s "$head"
    [ -z "$more" ] || exec cat
  else
    {{ printf %s "$head"; cat; }} | {vsub} --filter "$@" || return 255
  fi
}}
{run}"""
_ALONE = 'add_lines "$@"\n'
# The site's own filter changes the script first, and may refuse it by its exit status. A command
# substitution reads its output in blocks; the last line is the status.
_AFTER_SITE = r"""
if ! [ -x {site} ]; then
  add_lines "$@"
  exit
fi
end='
'
script=$({site} "$@"; echo "=$?")
code=${{script##*=}} script=${{script%=*}}
[ "$code" = 0 ] || exit "$code"
rest=$script
while :; do
  case $rest in
    '#VSUB '* | "#VSUB$tab"*)
      printf %s "$script" | {vsub} --filter "$@" || exit 255
      exit ;;
    '#'*"$end"* | "$end"* | :*"$end"*) rest=${{rest#*"$end"}} ;;
    *) break ;;
  esac
done
printf %s "$script"
"""


def script(place: Installation, site: Path | None) -> bytes:
    """Return the filter, which runs the site's filter first, and vsub only for ``#VSUB`` lines."""
    vsub = shlex.quote(str(place.program.with_name("vsub")))
    run = _ALONE
    if site is not None:
        run = _AFTER_SITE.format(site=shlex.quote(str(site)), vsub=vsub)
    mark = f"Written by {MARK.decode()}"
    return _SCRIPT.format(mark=mark, run=run, vsub=vsub).encode()


def steps(home: Path, place: Installation, bindir: str = "") -> list[SetupStep]:
    """Return the steps that install the filter and name it in torque.cfg.

    ``bindir`` is the directory of qsub; if it is empty, PATH is searched.
    """
    config = home / "torque.cfg"
    path = place.jobshell.with_name(NAME)
    given = _site_filter(config, path, bindir)
    return [ReplacedFile(path, script(place, given)), _config_line(config, path)]


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
