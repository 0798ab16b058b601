"""Parse command lines of sbatch and salloc 22.05 as getopt_long(3) does.

Source: sbatch(1), salloc(1) and the behavior of the programs. Options precede the script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vtorque_core.api import UsageError, printable

NONE, REQUIRED, OPTIONAL = 0, 1, 2
COLON = ":"

_REQUIRED = """
account:A acctg-freq array:a batch bb bbf begin:b chdir:D cluster-constraint clusters:M comment
constraint:C container core-spec:S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task:c deadline
delay-boot dependency:d distribution:m error:e exclude:x export export-file extra-node-info:B gid
gpu-bind gpu-freq gpus:G gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input:i
job-name:J kill-on-invalid-dep licenses:L mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nodefile:F nodelist:w nodes:N ntasks:n ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket open-mode output:o partition:p power prefer priority profile
qos:q reservation signal sockets-per-node switches tasks-per-node thread-spec threads-per-core
time:t time-min tmp uid wait-all-nodes wckey wrap
"""
_OPTIONAL = "exclusive get-user-env nice no-kill:k propagate"
_NONE = """
contiguous help:h hold:H ignore-pbs no-requeue overcommit:O oversubscribe:s parsable quiet:Q reboot
requeue spread-job test-only usage use-min-nodes verbose:v version:V wait:W
"""
# Options of salloc only. Its -I (--immediate) is taken by vsub.
_SALLOC = (("", "immediate kill-command:K x11"), ("bell no-bell no-shell", ""))
# Newer than 22.05; an older sbatch rejects them. Abbreviations never match them.
_LATER_REQUIRED = "container-id extra prefer resv-ports segment tres-bind tres-per-task"
_LATER_NONE = "external stepmgr"

# Options of PBS that sbatch ignores. For those with another meaning, see pbs_options.
_PBS = {
    "l": ": on Slurm, request resources with -N, -n, -c, --mem and --time",
    "X": ": on Slurm, use --x11 with -I",
}

_ALIASES = {"tasks-per-node": "ntasks-per-node"}


@dataclass(frozen=True)
class OptionTable:
    """The options of sbatch or salloc.

    Attributes:
        kinds: Kind of an option's value (NONE, REQUIRED or OPTIONAL), by the option's long name.
        short: Long name by letter.
        exact: Long names that cannot be abbreviated.
    """

    kinds: Mapping[str, int]
    short: Mapping[str, str]
    exact: frozenset[str] = frozenset()

    def add_options(self, names: Iterable[str], exact: Iterable[str] = ()) -> OptionTable:
        """Return this table with the options ``names``; ``name=`` is an option with a value.

        Options in ``exact`` cannot be abbreviated.
        """
        more = {n.strip("-=").partition("=")[0]: n.endswith("=") for n in names}
        kinds = {name: REQUIRED if value else NONE for name, value in more.items()}
        return replace(self, kinds={**kinds, **self.kinds}, exact=self.exact | frozenset(exact))

    def find(self, word: str) -> str:
        """Return the long name of an option, given its name or an abbreviation."""
        if word in self.kinds:
            return word
        found = sorted(n for n in self.kinds if n.startswith(word) and n not in self.exact)
        if len(found) != 1:
            problem = (
                f"is ambiguous: {', '.join('--' + n for n in found)}" if found else "is unknown"
            )
            raise UsageError(f"option --{printable(word, 60)} {problem}")
        return found[0]


def _table(required: str, optional: str, none: str) -> OptionTable:
    kinds: dict[str, int] = {}
    short: dict[str, str] = {}
    for text, kind in ((required, REQUIRED), (optional, OPTIONAL), (none, NONE)):
        for word in text.split():
            name, _, letter = word.partition(":")
            kinds[name] = kind
            if letter:
                short[letter] = name
    later = OptionTable(kinds, short).add_options(
        [f"{n}=" for n in _LATER_REQUIRED.split()] + _LATER_NONE.split()
    )
    return replace(later, exact=frozenset((_LATER_REQUIRED + " " + _LATER_NONE).split()))


SBATCH = _table(_REQUIRED, _OPTIONAL, _NONE)
SALLOC = _table(_REQUIRED, f"{_OPTIONAL} {_SALLOC[0][1]}", f"{_NONE} {_SALLOC[1][0]}")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        vm: Values of ``-vm``.
        interactive: True with ``-I``.
        words: Option words as given, without ``-vm`` and ``-I``.
        plain: ``words`` without ``--wrap`` and a final ``--``.
        options: (long name, value) in order; the value may be "".
        operands: The script and its arguments.
        more: Further components of a heterogeneous job. The last component has the operands.
    """

    vm: tuple[str, ...] = ()
    interactive: bool = False
    words: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    operands: tuple[str, ...] = ()
    more: tuple[CommandLine, ...] = ()

    def last_value(self, name: str) -> str | None:
        """Return the value of the last option with that name, or None."""
        return next((v for n, v in reversed(self.options) if n == name), None)

    def has_option(self, *names: str) -> bool:
        """Return whether any of these options is present."""
        return any(n in names for n, _ in self.options)


def split(argv: Sequence[str], extra: Collection[str] = ()) -> CommandLine:
    """Parse the arguments of vsub.

    ``extra`` are options of the site's SPANK plugins; see :meth:`OptionTable.add_options`.
    """
    interactive = "-I" in _until_script(argv, SALLOC.add_options(extra))
    table = (SALLOC if interactive else SBATCH).add_options(extra)
    first, *more = _components(read(argv, table), table)
    if not more:
        return first
    words = list(first.words)
    for each in more:
        words += [COLON, *each.words]
    return replace(
        first,
        vm=first.vm + tuple(value for each in more for value in each.vm),
        words=tuple(words),
        options=first.options + tuple(o for each in more for o in each.options if o[0] == "wrap"),
        operands=more[-1].operands,
        more=tuple(more),
    )


def _components(line: CommandLine, table: OptionTable) -> Iterator[CommandLine]:
    if line.operands[:1] != (COLON,):
        yield line
        return
    yield replace(line, operands=())
    yield from _components(read(line.operands[1:], table), table)


def _until_script(argv: Sequence[str], table: OptionTable) -> Sequence[str]:
    try:
        return read(argv, table, ours=False).words
    except UsageError:
        return ()  # reported when the final command line is parsed


def read(argv: Sequence[str], table: OptionTable, *, ours: bool = True) -> CommandLine:
    """Parse ``argv``. If ``ours`` is True, the result's ``words`` omit vsub's option ``-I``."""
    vm: list[str] = []
    kept: list[str] = []
    plain: list[str] = []
    found: list[tuple[str, str]] = []
    interactive = False
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            kept.append(word)
            break
        if not word.startswith("-") or word == "-":
            words.insert(0, word)
            break
        if word == "-vm":
            vm.append(_value("-vm", words))
        elif word == "-I":
            interactive = True
            kept += [] if ours else [word]
        else:
            taken = [word]
            wraps = False
            for name, kind, glued in _options(word, table):
                value = glued
                if kind == REQUIRED and glued is None:
                    value = _value(f"option {word}", words)
                    taken.append(value)
                found.append((_ALIASES.get(name, name), value or ""))
                wraps = name == "wrap"
            kept += taken
            plain += [] if wraps else taken
    return CommandLine(
        tuple(vm), interactive, tuple(kept), tuple(plain), tuple(found), tuple(words)
    )


def _options(word: str, table: OptionTable) -> Iterable[tuple[str, int, str | None]]:
    if word.startswith("--"):
        given, equals, value = word[2:].partition("=")
        name = table.find(given)
        kind = table.kinds[name]
        if equals and kind == NONE:
            raise UsageError(f"option --{name} takes no value")
        yield name, kind, value if equals else None
        return
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in table.short:
            hint = _PBS.get(letter, "")
            raise UsageError(
                f"option -{printable(letter)} is unknown (in {printable(word, 60)}){hint}"
            )
        name = table.short[letter]
        kind = table.kinds[name]
        if kind == NONE:
            yield name, kind, None
        else:
            yield name, kind, letters or None
            return


def _value(option: str, words: list[str]) -> str:
    if not words:
        raise UsageError(f"{printable(option, 60)}: a value is missing")
    return words.pop(0)
