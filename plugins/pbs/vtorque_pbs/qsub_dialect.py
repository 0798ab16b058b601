"""Differences between the commands of Torque and OpenPBS. No I/O; imported by ``vsub``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vtorque_pbs import convention as pbs

VARIABLE = "VTORQUE_REQUEST"
"""Job variable with the request: on OpenPBS always, on Torque if it is too long for ``other``."""

MAX_VARIABLE = 120_000
"""Bytes of a ``-v`` value. An argument is limited to 128 KiB (MAX_ARG_STRLEN, execve(2))."""


@dataclass(frozen=True)
class PbsDialect:
    """Command-line dialect of one PBS batch system.

    Attributes:
        name: Value of ``[batch] system``.
        getopt: qsub's option letters.
        long: Options that only print something.
        command: True if ``-- command args`` runs a command instead of a script.
        permutes: True if options may follow the script.
        find_script: Function that returns the index of the script's path in qsub's arguments, or
            None if the arguments contain no script.
        prefix_variable: Environment variable with the directive prefix, or "".
        home: PBS_HOME of a node.
        programs: Default directories of the commands on a node.
        all_nodes: Option of pbsnodes to list nodes.
        one_job: Option of qstat for all attributes of a job.
        all_jobs: Option of qstat for all attributes of all jobs.
        no_job: Pattern of qstat's message about an unknown job.
    """

    name: str
    getopt: str
    long: frozenset[str]
    command: bool
    permutes: bool
    find_script: Callable[[Sequence[str]], int | None]
    prefix_variable: str
    home: str
    programs: tuple[str, ...]
    all_nodes: str
    one_job: str
    all_jobs: str
    no_job: str


def _find_torque_script(words: Sequence[str]) -> int | None:
    """Find the script as Torque's qsub does, without getopt(3).

    Only the first letter of an option word counts. ``-`` and ``--`` are options whose value is the
    next word (qsub_functions.c, find_job_script_index).
    """
    is_value = False
    for place, word in enumerate(words):
        if is_value:
            is_value = False
        elif not word.startswith("-"):
            return place if word else None
        else:
            is_value = len(word) <= 2 and f"{word[1:]}:" in f"{pbs.TORQUE_GETOPT}-:"
    return None


def _find_openpbs_script(words: Sequence[str]) -> int | None:
    operand_indexes = pbs.split_qsub(words, pbs.OPENPBS_GETOPT).operand_indexes[:1]
    return next((place for place in operand_indexes if words[place] not in ("", "-")), None)


TORQUE = PbsDialect(
    name="torque",
    getopt=pbs.TORQUE_GETOPT,
    long=frozenset({"--version", "--about"}),
    command=False,
    permutes=True,
    find_script=_find_torque_script,
    prefix_variable="",  # qsub(1B) documents PBS_DPREFIX, but 6.1.3 ignores it
    home="/var/spool/torque",
    programs=("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    all_nodes="-a",
    one_job="-x",
    all_jobs="-x",
    no_job="Unknown Job Id",
)
OPENPBS = PbsDialect(
    name="openpbs",
    getopt=pbs.OPENPBS_GETOPT,
    long=frozenset({"--version"}),
    command=True,
    permutes=False,  # arguments after the script are an error
    find_script=_find_openpbs_script,
    prefix_variable="PBS_DPREFIX",
    home="/var/spool/pbs",
    programs=("/opt/pbs/bin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"),
    all_nodes="-av",
    one_job="-fw",
    all_jobs="-ftw",
    no_job="Unknown Job Id|Job has finished",
)

Options = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class QsubOptions:
    """Effective qsub options; the command line overrides directives.

    Attributes:
        resources: ``-l`` by name.
        variables: The ``-v`` list as written, or "".
        shell: Path from ``-S``, or None.
        interactive: ``-I``.
        command: Torque's ``-x``; the script is a command.
        display: ``-X``.
        args: ``-F``, the script's arguments.
        facts: Queue (``-q``) and account (``-A``), if given.
    """

    resources: Mapping[str, str]
    variables: str
    shell: str | None
    interactive: bool
    command: bool
    display: bool
    args: str
    facts: Mapping[str, str]


def merge_options(directives: Sequence[Options], line: Options) -> QsubOptions:
    """Merge the options of the directive lines, in order, with those of the command line.

    The last option wins, but ``-l`` resources are merged by name. ``-I`` counts only on the command
    line.
    """
    below = [option for options in directives for option in options if option[0] not in "Ix"]
    found = [*below, *line]
    resources: dict[str, str] = {}
    for letter, value in found:
        if letter == "l":
            resources.update(pbs.parse_resources(value))
    last = dict(found)
    shell = last.get("S", "").split(",", maxsplit=1)[0].partition("@")[0].strip()
    letters = {letter for letter, _ in line}
    named = {"queue": last.get("q", "").partition("@")[0], "account": last.get("A", "")}
    facts = {name: value for name, value in named.items() if value}
    flags = "I" in letters, "x" in letters, "X" in last
    args = last.get("F", "")
    return QsubOptions(resources, last.get("v", ""), shell or None, *flags, args, facts)
