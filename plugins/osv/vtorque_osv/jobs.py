"""Run a job in the OSv guests of this node, from the job shell.

Each guest runs the whole script, and has its rank and names in environment variables. OSv cannot
receive signals. Therefore TERM, INT and HUP end the job at once, and the epilogue deletes the
guests. Other signals are ignored.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from vtorque_core.api import Refused
from vtorque_core.api.guest_driver import (
    BootedGuest,
    GuestDied,
    ReadyGuest,
    Script,
    Streams,
    boot_guests,
)
from vtorque_osv import cmdline
from vtorque_osv.console import OsvConsole, ProgramResult
from vtorque_osv.order import PROPERTIES, BootOrder, GuestProperties
from vtorque_osv.restjob import RestJob
from vtorque_osv.script import ProgramCall, parse

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)
_CHUNK = 65536


class _JobSignaled(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def run(guest: ReadyGuest, script: Script, streams: Streams) -> int:
    """Run the script in each guest; return the job's exit status, 128+n for signal n.

    If guests fail, the exit status of the failed guest with the lowest rank is returned.

    Raises:
        Refused: OSv cannot run the script.
        HostFault: the guests do not start.
        GuestDied: OSv ended before it ran the job.
    """
    properties = GuestProperties.decode((guest.run_dir / PROPERTIES).read_bytes())
    commands = _check(script, properties)
    try:
        with _signals():
            order = BootOrder(script.content, cmdline.guest_variables(script.environ), script.cwd)
            booted = boot_guests(guest, order.encode())
            return _OsvJob(guest, commands, streams, properties, order).run(booted)
    except _JobSignaled as ended:
        return 128 + ended.number


def _check(script: Script, properties: GuestProperties) -> tuple[ProgramCall, ...]:
    if script.interactive:
        raise Refused("an interactive job needs a shell, which OSv does not have")
    if script.args:
        raise Refused("a job script for OSv cannot have arguments, because these need a shell")
    return parse(script.content, properties.named)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    def end(number: int, _frame: FrameType | None) -> None:
        raise _JobSignaled(number)

    before = {number: signal.signal(number, end) for number in _ENDING}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Output:
    guest: BootedGuest
    console: OsvConsole
    prefix: bytes
    rest: RestJob | None = None
    outcome: ProgramResult | None = None
    line: bytes = field(default=b"")

    def lines(self, data: bytes, *, last: bool = False) -> bytes:
        """Return the part of a guest's output that can be written now.

        With several guests, return only whole lines, and put the guest's name before each. With
        ``last``, also return an incomplete line.
        """
        if not self.prefix:
            return data
        *whole, self.line = (self.line + data).split(b"\n")
        if last and self.line:
            whole.append(self.line)
        return b"".join(self.prefix + line + b"\n" for line in whole)


@dataclass(frozen=True)
class _OsvJob:
    guest: ReadyGuest
    commands: Sequence[ProgramCall]
    streams: Streams
    properties: GuestProperties
    order: BootOrder

    def run(self, booted: Sequence[BootedGuest]) -> int:
        """Write the guests' output until all guests have ended; return the job's exit status."""
        outputs = [self._output(each, several=len(booted) > 1) for each in booted]
        with selectors.DefaultSelector() as selector:
            for each in outputs:
                selector.register(each.guest.console, selectors.EVENT_READ, each)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._pump(key.data):
                        selector.unregister(key.fd)
                        os.close(key.fd)
        return self._end(outputs)

    def _output(self, booted: BootedGuest, *, several: bool) -> _Output:
        programs = {each.words[0] for each in self.commands}
        rest = None
        if self.properties.mode == "rest":
            directory = self.guest.run_dir.parent / f"g{booted.rank}"
            properties = GuestProperties.decode((directory / PROPERTIES).read_bytes())
            environ = {**self.order.environ, **properties.environ}
            rest = RestJob(properties, environ, self.commands)
            rest.start()
        prefix = f"{booted.hostname}: ".encode() if several else b""
        return _Output(booted, OsvConsole(programs, self.properties.begin), prefix, rest)

    def _pump(self, output: _Output) -> bool:
        try:
            data = os.read(output.guest.console, _CHUNK)
        except ConnectionResetError:
            data = b""
        text = output.console.feed(data)
        if not data:
            more, output.outcome = output.console.end()
            text += more
        self._write(self.streams.stdout, output.lines(text, last=not data))
        return bool(data)

    def _end(self, outputs: Sequence[_Output]) -> int:
        code = 0
        for output in outputs:
            outcome = output.outcome
            if outcome is None:  # impossible, because its console has ended
                raise GuestDied(
                    f"{output.guest.hostname}: the guest ended without reporting a result"
                )
            said = output.rest.stop() if output.rest is not None else ""
            if not outcome.booted:
                self._print_reason(output, outcome.reason, outcome.detail)
                raise GuestDied(outcome.reason)
            if outcome.reason or said:
                self._print_reason(output, outcome.reason or said, outcome.detail)
            code = code or outcome.code or (1 if said else 0)
        return code

    def _print_reason(self, output: _Output, reason: str, detail: Sequence[str]) -> None:
        lines = [f"vtorque: {output.guest.hostname}: {reason}", *(f"| {line}" for line in detail)]
        self._write(self.streams.stderr, "".join(f"{line}\n" for line in lines).encode())

    def _write(self, descriptor: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk or a closed reader does not stop the job
            while data:
                data = data[os.write(descriptor, data) :]
