"""Find ``-vm`` in a job script's directives, by the rules of PBS. Raises only Refused.

Sources: qsub(1B), "Directives", and OpenPBS's ``check_job_script.c``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from vtorque_core.base.errors import Refused, printable

VSUB_PREFIX = "#VSUB"
PBS_PREFIX = "#PBS"

_BLANKS = b" \t\v\f\r"  # isspace(3) in the C locale, without the newline
_HAS_VM = re.compile(r"(?:^|\s)-vm(?:\s|$)", re.ASCII)


def script_directives(content: bytes, prefix: str = PBS_PREFIX) -> tuple[str, ...]:
    """Return the text after ``prefix`` of each directive line, stripped.

    Accepts CRLF and invalid UTF-8 (``surrogateescape``). An empty ``prefix`` matches nothing.
    """
    found = (_strip_prefix(line, _bytes(prefix)) for _, line in _header(content))
    return tuple(_text(rest) for rest in found if rest is not None)


def vm_directives(content: bytes, pbs_prefix: str = PBS_PREFIX) -> tuple[str, ...]:
    """Return all ``-vm`` values in ``#VSUB`` and ``#PBS`` lines, in order.

    Raises Refused for a ``#VSUB`` line that is not ``-vm VALUE``, and for a ``#PBS`` line with
    ``-vm`` and other options: qsub would read ``-vm`` as ``-v m``.
    """
    values: list[str] = []
    for number, line in _header(content):
        own = _strip_prefix(line, VSUB_PREFIX.encode())
        old = _strip_prefix(line, _bytes(pbs_prefix))
        if own is not None:
            values += _vm_values(_text(own), number, _text(line))
        elif old is not None and _HAS_VM.search(_text(old)):
            values += _vm_values(_text(old), number, _text(line))
    return tuple(values)


def strip_pbs_vm(content: bytes, prefix: str = PBS_PREFIX) -> bytes:
    """Return the script without its ``#PBS -vm`` lines."""

    def drop_vm(number: int, line: bytes, directive: str) -> bytes:
        if not _HAS_VM.search(directive):
            return line
        _vm_values(directive, number, _text(line))
        return b""

    return rewrite_directives(content, prefix, drop_vm)


def rewrite_directives(
    content: bytes, prefix: str, rewrite: Callable[[int, bytes, str], bytes]
) -> bytes:
    """Return the script with each directive line replaced by the result of ``rewrite``.

    The arguments of ``rewrite`` are line number, line, and directive without prefix.
    """
    done, kept = 0, bytearray()
    for number, line in _header(content):
        done += len(line)
        rest = _strip_prefix(line, _bytes(prefix))
        kept += line if rest is None else rewrite(number, line, _text(rest))
    return bytes(kept) + content[done:]


def _header(content: bytes) -> Iterator[tuple[int, bytes]]:
    start, number = 0, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end + 1
        line = content[start:end]
        first = line.strip(_BLANKS + b"\n")[:1]
        if first not in (b"", b"#") and not line.startswith(b":"):
            return
        number += 1
        yield number, line
        start = end


def _strip_prefix(line: bytes, prefix: bytes) -> bytes | None:
    line = line.strip(_BLANKS + b"\n")
    return line[len(prefix) :] if prefix and line.startswith(prefix) else None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.strip(_BLANKS + b"\n").decode("utf-8", "surrogateescape")


def _vm_values(options: str, number: int, line: str) -> list[str]:
    import shlex  # noqa: PLC0415 (only scripts with -vm pay for it)

    where = f"line {number} of the script: {printable(line, 80)}"
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise Refused(f"{where}: {error}") from None
    comment = next((i for i, word in enumerate(words) if word.startswith("#")), len(words))
    words = words[:comment]
    if not words or len(words) % 2 or any(word != "-vm" for word in words[::2]):
        raise Refused(
            f"{where}: -vm takes one value and must be alone on its line",
            fix="write '#VSUB -vm key=value,key=value'",
        )
    return words[1::2]
