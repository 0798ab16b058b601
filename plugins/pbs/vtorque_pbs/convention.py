"""Torque's conventions: hook arguments, resource list, exit codes, qsub's getopt.

Torque, OpenPBS and ``vtorque-local`` use this module. It imports only the standard library, because
``vsub`` imports it. Facts without a man page were observed on Torque 6.1.3 and OpenPBS 23.06.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeVar

from vtorque_core.api import Refused, UsageError, name_errors, printable
from vtorque_core.api.batch_system import Outcome

TORQUE_GETOPT = "a:A:b:c:C:d:D:e:EfF:hi:Ij:J:k:K:l:L:m:M:nN:o:p:P:q:r:S:t:T:u:v:Vw:W:Xxz"
OPENPBS_GETOPT = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:q:r:R:S:u:v:VW:XzP:"

PROLOGUE_RUN = 0  # the job runs, as after a prologue that was killed by a signal
# 1: the job ends. Its output is never delivered, so the user would see no reason.
PROLOGUE_REQUEUE = 2  # any other code: immediate, endless requeue, unless the job is held first

# exit_status of a job as Torque records it (epilogue argument 10, qstat -f)
STATUS_LOST = -4  # JOB_EXEC_INITABT: the job was running when the daemon was restarted
STATUS_NO_START = -2  # the prologue failed
STATUS_WALLTIME = -11
STATUS_SIGNAL = 256  # plus the signal's number
STATUS_DELETED = STATUS_SIGNAL + 15  # qdel sends SIGTERM

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.]*=", re.ASCII)
_MEM = re.compile(r"([0-9]{1,15})([kmgt]?)(b|w)?", re.IGNORECASE | re.ASCII)
_MEM_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Parts of a word, quoted as in the POSIX mode of Python's shlex.
_PIECE = (
    r"(?P<blanks>[{blanks}]+)|(?P<plain>[^{blanks}'\"\\]+)|(?P<single>'[^']*')"
    r"|(?P<double>\"(?:[^\"\\]|\\.)*+\")|(?P<escaped>\\.)|(?P<open>['\"\\])"
)
_NAME = re.compile(r"[!-.0-~]+", re.ASCII)  # printable, without blanks and slashes
MAX_JOB_NAME = 230  # leaves room for .o<number> below NAME_MAX (255)

# Variables that qsub copies from the submitting environment: qsub(1B), "Environment variables".
_ORIGIN = ("HOME", "LANG", "LOGNAME", "PATH", "MAIL", "SHELL", "TZ")


# -- hook arguments ---------------------------------------------------------------------------

A = TypeVar("A", "PrologueArgs", "EpilogueArgs")


@dataclass(frozen=True)
class PrologueArgs:
    """Arguments of a Torque prologue. ``script`` (the .SC file) belongs to the user."""

    job_id: str
    user: str
    group: str
    job_name: str
    resources: str
    queue: str
    account: str = ""
    script: str = ""

    def argv(self) -> list[str]:
        """Return the arguments in Torque's order."""
        return [str(value) for value in astuple(self)]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> PrologueArgs:
        """Parse the arguments (without the program's name). Raise ValueError if invalid."""
        return _parse(cls, argv, 6)


@dataclass(frozen=True)
class EpilogueArgs:
    """Arguments of a Torque epilogue. The constants ``STATUS_*`` are values of ``exit_status``."""

    job_id: str
    user: str
    group: str
    job_name: str
    session: str
    resources: str
    used: str
    queue: str
    account: str = ""
    exit_status: str = "0"
    script: str = ""

    def argv(self) -> list[str]:
        """Return the arguments in Torque's order."""
        return [str(value) for value in astuple(self)]

    @classmethod
    def from_prologue(
        cls, job: PrologueArgs, session: int, seconds: float, status: int
    ) -> EpilogueArgs:
        """Return the epilogue's arguments for the job with these prologue arguments.

        ``session`` is the pid of the session leader, ``seconds`` is the run time, and ``status`` is
        Torque's exit_status.
        """
        used = f"walltime={show_walltime(seconds)}"
        first = (job.job_id, job.user, job.group, job.job_name, str(session), job.resources, used)
        return cls(*first, job.queue, job.account, str(status), job.script)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> EpilogueArgs:
        """Parse the arguments (without the program's name). Raise ValueError if invalid."""
        return _parse(cls, argv, 8)


def _parse(cls: type[A], argv: Sequence[str], least: int) -> A:
    most = len(fields(cls))
    if not least <= len(argv) <= most:
        raise ValueError(f"got {len(argv)} arguments, but Torque passes {least} to {most}")
    if not argv[0] or not argv[1]:
        raise ValueError("the first two arguments must be the job id and the user")
    return cls(*argv)


# -- resources --------------------------------------------------------------------------------


def parse_resources(text: str) -> dict[str, str]:
    """Parse ``nodes=1:ppn=2,other=vt1:X,walltime=01:00:00`` into a dictionary.

    A part without ``key=`` belongs to the preceding value. As in Torque, the last value of a
    repeated key wins. Never raises.
    """
    found: dict[str, list[str]] = {}
    last = ""
    for part in text.split(","):
        match = _KEY.match(part)
        if match:
            last = match[0][:-1]
            found[last] = [part[match.end() :]]
        elif last:
            found[last].append(part)
    return {key: ",".join(parts) for key, parts in found.items()}


def build_resources(resources: Mapping[str, str]) -> str:
    """Format resources as a list that :func:`parse_resources` can parse."""
    return ",".join(f"{key}={value}" for key, value in resources.items())


def request_token(resources: Mapping[str, str]) -> str | None:
    """Return the first ``vt1:...`` word of the resource ``other``, or None for a bare-metal job.

    The word is untrusted user text; decode it with ``request.from_token``.
    """
    words = resources.get("other", "").split(",")
    return next((word for word in words if word.startswith("vt1:")), None)


def ppn(nodes: str) -> int:
    """Return ``ppn`` (processors per node) before the first ``+`` of ``nodes``; 1 if missing."""
    match = re.search(r":ppn=([0-9]{1,6})(?=[:+]|$)", nodes.split("+", maxsplit=1)[0], re.ASCII)
    return int(match[1]) if match else 1


def mem_mib(text: str) -> int:
    """Convert a PBS size such as ``2gb`` or ``1gw`` to MiB, rounded up (pbs_resources(7B), size).

    A plain number is in bytes; ``w`` means words of 8 bytes. Raises ValueError if invalid.
    """
    match = _MEM.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError("is not a size: write a whole number with kb, mb, gb or tb")
    word = 8 if (match[3] or "b").lower() == "w" else 1
    return -(-int(match[1]) * _MEM_BYTES[match[2].lower()] * word // (1 << 20))


def show_walltime(seconds: float) -> str:
    """Format seconds as ``HH:MM:SS``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"


# -- exit codes -------------------------------------------------------------------------------


def prologue_exit(outcome: Outcome, *, elsewhere: bool) -> int:
    """Return the exit status of a Torque prologue.

    A job with a refused request still starts, because Torque would otherwise requeue it endlessly.
    The job shell then only prints the reason. After a host fault, Torque requeues the job if
    another node may run it (``elsewhere``). The caller must limit these requeues (``qhold -h s``).
    """
    if outcome is Outcome.HOST_FAULT and elsewhere:
        return PROLOGUE_REQUEUE
    return PROLOGUE_RUN


def status_of(returncode: int) -> int:
    """Convert ``Popen.returncode`` to Torque's exit_status: the code, or 256 plus the signal."""
    return returncode if returncode >= 0 else STATUS_SIGNAL - returncode


def shell_code(status: int) -> int:
    """Convert a Torque exit_status to an exit code (0 to 255).

    256+n becomes 128+n, as in shells. Exceeded walltime (-11) becomes 143 (SIGTERM). Other negative
    values wrap as in exit(3): -2 becomes 254.
    """
    if status == STATUS_WALLTIME:
        return 128 + 15
    return 128 + status - STATUS_SIGNAL if status >= STATUS_SIGNAL else status & 0xFF


# -- the submit command -----------------------------------------------------------------------


@dataclass(frozen=True)
class QsubArgs:
    """A parsed qsub command line.

    Attributes:
        options: (letter, value) in order. A flag's value is "". Long options have their full name.
        operands: Non-option arguments before ``--``.
        operand_indexes: Indexes of the operands in ``rest``.
        command: Arguments after ``--``, or None. For Torque these are operands.
        vm: Values of ``-vm``.
        rest: All arguments except ``-vm`` and its values.
    """

    options: tuple[tuple[str, str], ...]
    operands: tuple[str, ...]
    operand_indexes: tuple[int, ...]
    command: tuple[str, ...] | None
    vm: tuple[str, ...]
    rest: tuple[str, ...]


def split_qsub(argv: Iterable[str], optstring: str = TORQUE_GETOPT) -> QsubArgs:
    """Parse a command line like getopt(3) with permutation, and extract ``-vm``.

    ``-vm`` must be a separate argument where an option is allowed. ``-vmore`` and ``-vm=1`` remain
    ``-v`` options, and ``-N -vm`` names the job. To pass a variable ``m``, users write ``-v m``.

    Raises:
        UsageError: An option is unknown or lacks its value.
    """
    takes = {c: optstring[i + 1 : i + 2] == ":" for i, c in enumerate(optstring) if c != ":"}
    options: list[tuple[str, str]] = []
    operand_indexes: list[int] = []
    vm: list[str] = []
    rest: list[str] = []
    command: tuple[str, ...] | None = None
    words = iter(argv)
    for word in words:
        if word == "-vm":
            vm.append(_value("-vm", words))
            continue
        rest.append(word)
        if word == "--":
            command = tuple(words)
            rest.extend(command)
        elif word == "-" or not word.startswith("-"):
            operand_indexes.append(len(rest) - 1)
        elif word.startswith("--"):
            options.append((word, ""))
        else:
            _cluster(word[1:], takes, words, options, rest)
    operands = tuple(rest[place] for place in operand_indexes)
    return QsubArgs(
        tuple(options), operands, tuple(operand_indexes), command, tuple(vm), tuple(rest)
    )


def _cluster(
    letters: str,
    takes: Mapping[str, bool],
    words: Iterable[str],
    options: list[tuple[str, str]],
    rest: list[str],
) -> None:
    for i, letter in enumerate(letters):
        if letter not in takes:
            raise UsageError(f"-{printable(letter)}: unknown option of the submit command")
        if not takes[letter]:
            options.append((letter, ""))
            continue
        value = letters[i + 1 :]
        if not value:
            value = _value(f"-{letter}", words)
            rest.append(value)
        options.append((letter, value))
        return


class MissingValue(UsageError):
    """Error for a command line whose last option lacks its value."""


def _value(option: str, words: Iterable[str]) -> str:
    for word in words:
        return word
    raise MissingValue(f"{option}: a value is missing")


def split_words(text: str, blanks: str = " \t\r\n") -> list[str]:
    """Split at ``blanks`` like ``shlex.split``, but in linear time, even for hostile text."""
    words: list[str] = []
    word: list[str] | None = None
    piece = re.compile(_PIECE.format(blanks=re.escape(blanks)), re.DOTALL)
    for match in piece.finditer(text):
        kind, part = match.lastgroup, match[0]
        if kind == "blanks":
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        if kind == "open":
            raise ValueError("No escaped character" if part == "\\" else "No closing quotation")
        if kind == "double":
            part = re.sub(r'\\([\\"])', r"\1", part[1:-1])
        elif kind in ("single", "escaped"):
            part = part[1:-1] if kind == "single" else part[1:]
        word = [] if word is None else word
        word.append(part)
    return words if word is None else [*words, "".join(word)]


def directive_words(line: str) -> list[str]:
    """Return the arguments on a directive line, unquoted. Raise UsageError if invalid."""
    with name_errors(f"#PBS {printable(line, 80)}", ValueError, fault=UsageError):
        return split_words(line)


def variable_list(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Parse a ``-v`` value such as ``A=1,B='x,y',C``; the value of C is taken from ``environ``.

    Quotes and backslashes protect commas (qsub(1B)). Unset variables are omitted. Raises
    UsageError.
    """
    found: dict[str, str] = {}
    with name_errors(f"-v {printable(text, 80)}", ValueError, fault=UsageError):
        items = split_words(text, ",")
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip()
        if not name or "\0" in item:
            raise UsageError(f"-v {printable(text, 80)}: the name of a variable is missing")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found


def is_job_name(name: str) -> bool:
    """Return whether a name is valid for a job and for the job's output files.

    A default name (from the script's name) may start with any character. The rules for ``-N`` are
    stricter, see :func:`check_job_name`.
    """
    return _NAME.fullmatch(name) is not None and len(name) <= MAX_JOB_NAME


def check_job_name(name: str) -> str:
    """Return a valid ``-N`` name. Raise UsageError otherwise.

    As in qsub(1B), the name starts with a letter and is printable without white space. It also
    contains no slash and has at most MAX_JOB_NAME characters.
    """
    if not is_job_name(name) or not name[0].isalpha():
        raise UsageError(
            f"-N {printable(name, 80)}: a job name must start with a letter and have at most "
            f"{MAX_JOB_NAME} printable ASCII characters without blanks and slashes"
        )
    return name


_UTF8_MARK = b"\xef\xbb\xbf"
# Byte order marks of UTF-16 and UTF-32, and "#" in these encodings without a mark.
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff", b"#\0", b"\0#", b"\0\0\0#")
# Not in text: all control characters but tabs, line ends, form feeds and escapes.
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")


def _is_invisible(text: bytes) -> bool:
    """Return whether the text contains non-ASCII bytes, and all its characters are invisible."""
    found = text.decode("utf-8", "ignore")
    return not text.isascii() and not any(c.isprintable() and not c.isspace() for c in found)


def check_script(content: bytes) -> None:
    """Raise Refused if Torque cannot read a script's directives or interpreter line.

    Torque's qsub accepts such a script, but ignores its directives, and the job fails.
    """
    if content.startswith(_WIDE):
        raise Refused(
            "the script is in UTF-16 or UTF-32, which interpreters cannot read",
            fix="convert it: iconv -f UTF-16 -t UTF-8 SCRIPT (or -f UTF-32)",
        )
    first, newline, _ = content.partition(b"\n")
    before, interpreter, _ = first.partition(b"#!")
    if content.startswith(_UTF8_MARK) or (interpreter and _is_invisible(before)):
        raise Refused(
            "the script begins with a byte order mark or another invisible character, which hides "
            "its directives and interpreter",
            fix="save it as UTF-8 without this character: LC_ALL=C sed -i '1s/^[^#]*//' SCRIPT",
        )
    if _CONTROL.search(first):
        raise Refused(
            "the script is a program or another binary file",
            fix="submit a shell script that runs it",
        )
    if b"\r" in first:
        ends = "sed -i 's/\\r$//' SCRIPT" if newline else "tr '\\r' '\\n' <SCRIPT >NEW"
        raise Refused(
            "the script has DOS line ends (CR LF), so its interpreter cannot be found"
            if newline
            else "the script has CR line ends, so its interpreter cannot be found",
            fix=f"convert it: {ends}",
        )


def check_script_args(text: str) -> str:
    """Return the value of ``-F``. Raise UsageError if the job shell cannot split it into words."""
    import shlex  # noqa: PLC0415 (few jobs have arguments)

    try:
        shlex.split(text)
    except ValueError as error:
        raise UsageError(f"-F {printable(text, 80)}: {error}; quote it as for a shell") from None
    return text


def default_job_name(script: str | None) -> str:
    """Return the job name for a script's path, with unusual characters replaced, or ``STDIN``."""
    if script is None:
        return "STDIN"
    return re.sub(r"[^!-.0-~]", "_", os.path.basename(script))[:MAX_JOB_NAME] or "STDIN"  # noqa: PTH119


def output_names(job_name: str, job_id: str) -> tuple[str, str]:
    """Return ``NAME.oN`` and ``NAME.eN`` with N from :func:`sequence`."""
    number = sequence(job_id)
    return f"{job_name}.o{number}", f"{job_name}.e{number}"


def sequence(job_id: str) -> str:
    """Return the number of a job id, for file names: ``22``, or ``22-0`` for an array's task."""
    return job_id.partition(".")[0].replace("[", "-").removesuffix("]")


def origin_environ(environ: Mapping[str, str], host: str, workdir: str) -> dict[str, str]:
    """Return the ``PBS_O_*`` variables that qsub sets from the submitting environment."""
    found = {f"PBS_O_{name}": environ[name] for name in _ORIGIN if name in environ}
    return found | {"PBS_O_HOST": host, "PBS_O_WORKDIR": workdir}
