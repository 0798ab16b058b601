"""Extract a job's output and exit status from OSv's console. No I/O.

QEMU always exits with 0, so the console is the only source. With ``--verbose`` OSv prints
(core/app.cc, runtime.cc, core/shutdown.cc)::

    Cmdline: runscript /dev/vblk1
    Setting in environment: ...     the last such line ends the boot messages
    will return 42                  the program's output
    program /hello returned 42      its exit status, unless 0
    program exited with status 7    it has called exit()
    VFS: unmounting /dev            shutdown
    Powering off.                   the end; without this line, OSv has crashed

Every line ends with CR LF. Output after a program's last newline may be lost, because OSv does not
flush stdio when the program ends.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

NOT_FOUND = 127  # POSIX sh, 2.8.2
CANNOT_RUN = 126
ABORTED = 134  # 128 + SIGABRT
FAULTED = 139  # 128 + SIGSEGV
BEGIN = "Setting in environment: VTORQUE_OUTPUT=begins"
BEGIN_REST = "Rest API server running on port "
BEGIN_SEED = "cloud-init: copied file "
TAIL = 40  # lines
_MAX_LINE = 65536  # maximum bytes of an incomplete line that are buffered
_MAX_TAIL = 1000  # bytes of a line of the tail; 200 characters are shown
_MAX_HELD = 256  # lines; a shutdown prints about a dozen
_KNOWN = (
    b"program ", b"VFS: unmounting ", b"ROFS: ", b"Powering off.", b"Aborted", b"[backtrace]",
    b"Requested termination of ", b"random: ", b"[virtiofs] inode ", b"[I/",
)  # fmt: skip
_WAY_DOWN = re.compile(
    rb"(.*?)(VFS: unmounting .*|ROFS: .*|Requested termination of .*, waiting\.\.\.)", re.DOTALL
)
_KERNELS_OWN = re.compile(  # may appear at any time
    rb"random: device unblocked\.|\[virtiofs\] inode \d+, .*|\[I/\d+ dhcp\]: .*"
)
_EXITED = re.compile(rb"^(.*)program exited with status (-?\d+)$", re.DOTALL)
_RETURNED = re.compile(rb"^(.*)program (\S+) returned (-?\d+)$", re.DOTALL)
_NOT_RUN = re.compile(
    rb"Failed to parse command line\.|This image has an empty command line\..*"
    rb"|unrecognized option: .*|Failed to load object: .*\. Powering off\."
    rb"|Failed to .*\. Powering off\."
)
_END = b"Powering off."


@dataclass(frozen=True)
class ProgramResult:
    """The job's exit status, with ``reason`` and ``detail`` after a failure.

    ``booted`` is true if OSv started to run the command line.
    """

    code: int
    booted: bool
    reason: str = ""
    detail: tuple[str, ...] = ()


class OsvConsole:
    """A parser of the console's bytes, which returns the program's output."""

    def __init__(self, programs: Collection[str], begin: str = BEGIN) -> None:
        """Start reading a console.

        Args:
            programs: the programs of the job; only their exit statuses count.
            begin: text with which the last line before the output begins.
        """
        self._programs = {program.encode() for program in programs}
        self._begin = begin.encode()
        self._booted = False
        self._line = b""  # the part of the current line that was not returned yet
        self._held: list[bytes] = []  # lines that may belong to the shutdown
        self._tail: deque[bytes] = deque(maxlen=TAIL)
        self._crash: list[bytes] | None = None
        self._code = 0
        self._ended = False
        self._refused = ""

    @property
    def booted(self) -> bool:
        """True if OSv has started to run the command line."""
        return self._booted

    def feed(self, data: bytes) -> bytes:
        """Parse more bytes of the console, and return the program's output in them.

        Bytes that may belong to a message of OSv are buffered until a later call decides.
        """
        out = []
        *lines, rest = (self._line + data).split(b"\n")
        for line in lines:
            out.append(self._process_line(line.removesuffix(b"\r")))
        self._line = rest
        if self._may_go(rest):
            keep = b"\r" if rest.endswith(b"\r") else b""
            out.append(self._release() + rest[: len(rest) - len(keep)])
            self._line = keep
        elif len(rest) > _MAX_LINE:  # a line of a boot or crash, which is shown only in part
            self._line = self._process_line(rest)
        return b"".join(out)

    def end(self) -> tuple[bytes, ProgramResult]:
        """Return the rest of the output and the outcome, after the console was closed."""
        rest = b""
        if self._line and self._booted and self._crash is None and not self._ended:
            rest, self._line = self._release() + self._line, b""
        if self._line:
            self._tail.append(self._line)
        if not self._ended and self._crash is None:
            rest += self._release()
        return rest, self._outcome()

    def _outcome(self) -> ProgramResult:
        tail = tuple(_printable_line(line) for line in self._tail)
        if self._refused:
            code = NOT_FOUND if self._refused.startswith("Failed to load") else CANNOT_RUN
            return ProgramResult(code, self._booted, self._refused)
        if self._crash is not None:
            detail = tuple(_printable_line(line) for line in self._crash[:TAIL])
            fault = any("page_fault" in line for line in detail)
            what = "an invalid memory access" if fault else "abort"
            reason = f"the program crashed ({what}), and OSv with it"
            return ProgramResult(FAULTED if fault else ABORTED, self._booted, reason, detail)
        if not self._booted:
            return ProgramResult(CANNOT_RUN, False, "OSv ended before it started the job", tail)
        if not self._ended:
            reason = "OSv ended without shutting down: it crashed or was powered off"
            return ProgramResult(ABORTED, True, reason, tail)
        return ProgramResult(self._code, True)

    def _process_line(self, line: bytes) -> bytes:
        self._tail.append(line[:_MAX_TAIL])
        if self._crash is not None:
            self._crash += [line[:_MAX_TAIL]] if len(self._crash) < TAIL else []
            return b""
        if self._booted:
            text = self._output(line)
            return text + self._release() if len(self._held) > _MAX_HELD else text
        self._booted = line.startswith(self._begin)
        if _NOT_RUN.fullmatch(line):
            self._refused = _printable_line(line)
        return b""

    def _output(self, line: bytes) -> bytes:
        said, down = self._record_status(line), _WAY_DOWN.fullmatch(line)
        if line == b"[backtrace]":
            self._crash, self._held = [each for each in self._held if each], []
        elif _KERNELS_OWN.fullmatch(line):
            return b""
        elif line == _END:
            self._ended, self._held = True, []
        elif _NOT_RUN.fullmatch(line):
            self._refused, self._ended = _printable_line(line), True
        elif said is not None:
            return self._release() + said if said else b""
        elif down is not None:  # follows output without a final newline
            text = self._release() + down[1] if down[1] else b""
            self._held.append(down[2])
            return text
        elif line == b"Aborted" or (not line and self._aborting()):
            self._held.append(line)
        else:
            return self._release() + line + b"\n"
        return b""

    def _aborting(self) -> bool:
        return bool(self._held) and self._held[-1] == b"Aborted"

    def _record_status(self, line: bytes) -> bytes | None:
        """Record the exit status that a line reports; return the text before the report.

        Returns None for a line without an exit status.
        """
        found = _EXITED.match(line)
        if found is not None:
            self._note(int(found[2]))
            return found[1]
        found = _RETURNED.match(line)
        if found is not None and found[2] in self._programs:
            self._note(int(found[3]))
            return found[1]
        return None

    def _note(self, code: int) -> None:
        self._code = self._code or code & 0xFF

    def _release(self) -> bytes:
        held, self._held = self._held, []
        return b"".join(line + b"\n" for line in held)

    def _may_go(self, line: bytes) -> bool:
        """Return whether an incomplete line can be output now.

        Return False while the line may still become a message of OSv.
        """
        if not line or not self._booted or self._crash is not None or self._ended:
            return False
        if self._held and not line.strip(b"\r"):
            return False
        return len(line) > _MAX_LINE or not any(
            known.startswith(line.rstrip(b"\r")) or line.startswith(known)
            for known in (*_KNOWN, b"Failed to ")
        )


def _printable_line(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
