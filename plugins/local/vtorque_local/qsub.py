"""Parse the command line and directives like Torque's qsub (qsub(1B))."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtorque_core.api import UsageError, name_errors, printable, walltime
from vtorque_core.api.directives import script_directives
from vtorque_local import order
from vtorque_pbs import convention as pbs

MAX_SCRIPT = 4 << 20  # bytes

_HOST_PATH = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*):(/.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class QsubJob:
    """A job as its submitter described it. An empty field means that its option was not given.

    Attributes:
        name: ``-N``, or derived from the script's name.
        out: ``-o`` as given, with any host.
        err: ``-e`` as given, with any host.
        join: ``oe``, ``eo`` or ``n``.
        initdir: ``-d``.
        shell: Absolute path of ``-S``.
        args: ``-F``.
        variables: ``-v``.
        environment: ``-V``.
        resources: ``-l`` by key.
        attributes: ``-W`` by key.
        array: ``-t``.
        interactive: ``-I``, only from the command line.
        display: ``-X``.
        walltime: Seconds; 0 means unlimited.
        mib: MiB of memory from ``-l mem``; 0 if not given.
        ppn: From ``-l``; 0 if not given.
    """

    name: str
    out: str = ""
    err: str = ""
    join: str = "n"
    initdir: str = ""
    shell: str = ""
    args: str = ""
    variables: str = ""
    environment: bool = False
    resources: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    array: str = ""
    interactive: bool = False
    display: bool = False
    walltime: int = 0
    mib: int = 0
    ppn: int = 0


def describe(args: pbs.QsubArgs, script: bytes) -> QsubJob:
    """Return the job; the command line overrides the script's directives.

    Raises:
        UsageError: An option is unsupported or invalid.
    """
    directives = script_directives(script)
    lines = [pbs.split_qsub(pbs.directive_words(line)).options for line in directives]
    options = [option for line in lines for option in line if option[0] != "I"]
    found: dict[str, Any] = {"name": pbs.default_job_name(script_operand(args))}
    found |= {"resources": {}, "attributes": {}}
    for letter, value in (*options, *args.options):
        option = letter if letter.startswith("--") else f"-{letter}"
        tables = {"l": found["resources"], "W": found["attributes"]}
        given = pbs.parse_resources(value) if letter in tables else {}
        for key in given or ("",):
            if f"{option} {key}".rstrip() not in SUPPORTED:
                raise UsageError(
                    f"{printable(f'{option} {key}'.rstrip(), 80)}: is not supported by the "
                    f"local batch system; supported: {', '.join(sorted(SUPPORTED))}"
                )
        if letter in tables:
            tables[letter].update(given)
        elif letter in _WITHOUT_EFFECT:
            _WITHOUT_EFFECT[letter](value)
        else:
            name, check = _OPTIONS[letter]
            found[name] = check(value)
    chunk = _chunk(found["resources"].get("select", "1"))
    found["resources"] |= {"mem": chunk["mem"]} if "mem" in chunk else {}
    for key, name, number in (("walltime", "walltime", walltime), ("mem", "mib", pbs.mem_mib)):
        value = found["resources"].get(key, "")
        with name_errors(f"-l {key}={printable(value)}", ValueError, fault=UsageError):
            found[name] = number(value) if value else 0
    for (letter, key), (pattern, wanted) in _VALUES.items():
        value = found["resources" if letter == "l" else "attributes"].get(key)
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise UsageError(f"-{letter} {key}={printable(value)}: is not {wanted}")
    nodes = found["resources"].get("nodes", "")
    if found.get("array") and found.get("interactive"):
        raise UsageError("-t cannot be combined with -I")
    found["ppn"] = pbs.ppn(nodes) if ":ppn=" in nodes else int(chunk.get("ncpus", "0"))
    if found["walltime"]:
        found["resources"]["walltime"] = pbs.show_walltime(found["walltime"])
    return QsubJob(**found)


def output_paths(job: QsubJob, host: str, workdir: str) -> list[tuple[str, int]]:
    """Return (path, number) for stdout and for stderr. With ``-j``, both have the same pair.

    Relative paths start at ``workdir``. If a path is a directory, the number (0 or 1) selects the
    default name there (:func:`vtorque_pbs.convention.output_names`).

    Raises:
        UsageError: A path is on another host.
    """
    hosts = (host, host.split(".", maxsplit=1)[0], "localhost")
    found = []
    for number, given in enumerate((job.out, job.err)):
        match = _HOST_PATH.fullmatch(given)
        if match and match[1] not in hosts:
            raise UsageError(f"{printable(given)}: output can only go to this host, {host}")
        path = match[2] if match else given
        found.append((os.path.join(workdir, path), number))  # noqa: PTH118 (the user's text)
    return {"oe": found[:1] * 2, "eo": found[1:] * 2}.get(job.join, found)


def check_outputs(paths: Iterable[str]) -> None:
    """Raise UsageError if the caller cannot create an output file now.

    Otherwise the job would boot its guests and then fail.
    """
    for path in paths:
        if reason := _why_not_created(path):
            raise UsageError(
                f"output file {printable(path)}: {reason}; give another place with -o and -e"
            )


def check_surroundings(job: QsubJob, workdir: str, *, bare: bool) -> None:
    """Raise UsageError, like Torque's qsub, if the caller cannot enter the directory of ``-d``.

    Without a guest (``bare``), the shell of ``-S`` must be a program of this host.
    """
    directory = job.initdir and os.path.join(workdir, job.initdir)  # noqa: PTH118 (user's text)
    shell = job.shell if bare else ""
    for option, path, is_kind, kind in (
        ("-d", directory, os.path.isdir, "directory that you may enter"),
        ("-S", shell, os.path.isfile, "program that you may run"),
    ):
        if path and not os.path.lexists(path):
            raise UsageError(f"{option} {printable(path)}: does not exist on this host")
        if path and not (is_kind(path) and os.access(path, os.X_OK)):
            raise UsageError(f"{option} {printable(path)}: is not a {kind}")


def _why_not_created(path: str) -> str:
    real = os.path.realpath(path)  # a link's target directory may not exist
    is_directory = path.endswith("/") or os.path.isdir(real)  # noqa: PTH112 (the user's text)
    place, mode = (real, os.W_OK | os.X_OK) if is_directory else (real, os.W_OK)
    try:
        os.stat(real)  # noqa: PTH116
    except FileNotFoundError:
        place = real if is_directory else os.path.dirname(real)  # noqa: PTH120
        mode = os.W_OK | os.X_OK
    except OSError as error:  # e.g. a too long name, or an unreadable directory
        return f"cannot be created: {error.strerror}"
    if not os.path.exists(place):  # noqa: PTH110
        return f"{printable(place)} does not exist"
    if os.path.islink(path) and not is_directory:  # noqa: PTH114
        return "is a symbolic link, which is not followed because a guest could have made it"
    return "" if os.access(place, mode) else f"{printable(place)} is not writable by you"


def variables(job: QsubJob, environ: Mapping[str, str], host: str, workdir: str) -> dict[str, str]:
    """Return the variables that the job inherits from the submitting environment."""
    found = dict(environ) if job.environment else {}
    if job.interactive:
        names = ("TERM", "DISPLAY", "XAUTHORITY") if job.display else ("TERM",)
        found |= {name: environ[name] for name in names if name in environ}
    found |= pbs.variable_list(job.variables, environ)
    return found | pbs.origin_environ(environ, host, workdir)


def script_operand(args: pbs.QsubArgs) -> str | None:
    """Return the script's path, or None for standard input."""
    operands = args.operands + (args.command or ())
    if len(operands) > 1:
        raise UsageError(
            f"{printable(operands[1])}: only one script is allowed; use -F 'ARGS' for its arguments"
        )
    return None if operands in ((), ("-",)) else operands[0]


def read_script(args: pbs.QsubArgs) -> bytes:
    """Return the script's content, or nothing for an interactive job without a script.

    Raises:
        UsageError: The script is unreadable or too large.
    """
    script = script_operand(args)
    if script is None and ("I", "") in args.options:
        return b""
    name = "standard input" if script is None else printable(script)
    try:
        # O_NONBLOCK: open(2) of a FIFO without a writer would hang.
        source = 0 if script is None else os.open(script, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(source, "rb", closefd=script is not None) as file:
            if script is not None and not stat.S_ISREG(os.fstat(source).st_mode):
                raise UsageError(f"script {name}: is not a regular file")
            content = file.read(MAX_SCRIPT + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"script {name}: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_SCRIPT:
        raise UsageError(f"script {name}: is longer than {MAX_SCRIPT >> 20} MiB")
    return content


def working_directory() -> str:
    """Return the directory of submission: PWD if it is valid, otherwise the result of getcwd(3)."""
    here = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):  # missing, or in an unreadable directory
        if here.startswith("/") and Path(here).samefile("."):
            return here
    return str(Path.cwd())


@contextlib.contextmanager
def terminal_kept() -> Iterator[None]:
    """Return a context that restores the terminal's settings after an interactive job."""
    import termios  # noqa: PLC0415 (other jobs do not need it)

    saved = termios.tcgetattr(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)


def _chunk(select: str) -> dict[str, str]:
    count, *pairs = select.split(":")
    found = dict(pair.partition("=")[::2] for pair in pairs)
    if count != "1" or set(found) - {"ncpus", "mem", "mpiprocs", "ompthreads"}:
        raise UsageError(
            f"-l select={printable(select)}: must be 1 or 1:ncpus=N:mem=SIZE (there is one node)"
        )
    for name in set(found) - {"mem"}:
        if not re.fullmatch(r"[1-9][0-9]{0,3}", found[name], re.ASCII):
            raise UsageError(
                f"-l select=: {name}={printable(found[name])}: is not between 1 and 9999"
            )
    return found


def _join(value: str) -> str:
    if value not in ("oe", "eo", "n"):
        raise UsageError(f"-j {printable(value)}: is not oe, eo or n")
    return value


def _array(value: str) -> str:
    order.array_tasks(value)
    return value


def _shell(value: str) -> str:
    shell = value.partition("@")[0]
    if not shell.startswith("/"):
        raise UsageError(f"-S {printable(value)}: is not an absolute path")
    return shell


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "N": ("name", pbs.check_job_name),
    "o": ("out", str),
    "e": ("err", str),
    "j": ("join", _join),
    "d": ("initdir", str),
    "S": ("shell", _shell),
    "F": ("args", pbs.check_script_args),
    "t": ("array", _array),
    "v": ("variables", str),
    "V": ("environment", lambda _: True),
    "I": ("interactive", lambda _: True),
    "X": ("display", lambda _: True),
}


def _check_mail(value: str) -> None:
    if value != "n":
        raise UsageError(
            f"-m {printable(value)}: this batch system sends no mail; write -m n, or omit -m"
        )


def _priority(value: str) -> None:
    if not re.fullmatch(r"[+-]?[0-9]{1,4}", value, re.ASCII) or not -1024 <= int(value) <= 1023:
        raise UsageError(f"-p {printable(value)}: is not between -1024 and 1023")


def _rerun(value: str) -> None:
    if value not in ("y", "n"):
        raise UsageError(f"-r {printable(value)}: is not y or n")


# ``local`` has no priorities or accounts, and reruns no job.
_WITHOUT_EFFECT: dict[str, Callable[[str], object]] = {
    "A": str,
    "M": str,
    "m": _check_mail,
    "p": _priority,
    "r": _rerun,
}
_VALUES = {
    ("l", "nodes"): (r"1(:ppn=[1-9][0-9]{0,3})?", "1 or 1:ppn=N: there is one node"),
    ("l", "place"): (  # pbs_resources(7B) of OpenPBS
        r"(?!:|$)(free|pack|v?scatter)?(:?(excl|exclhost|shared))?(:?group=\w+)?",
        "free, pack, scatter or vscatter, :excl, :exclhost or :shared, :group=RESOURCE",
    ),
    ("W", "block"): ("true|false", "true or false"),
}
_RESOURCES = ("mem", "nodes", "place", "select", "walltime")
SUPPORTED = (
    *(f"-{each}" for each in (*_OPTIONS, *_WITHOUT_EFFECT)),
    *(f"-l {each}" for each in _RESOURCES),
    "-W block",
)
