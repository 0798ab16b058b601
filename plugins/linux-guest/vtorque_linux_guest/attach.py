"""Attach a terminal to a guest's console. virsh(1) can do this only for pseudo-terminals."""

from __future__ import annotations

import os
import socket
import sys
import termios
import tty
from pathlib import Path

from vtorque_core.api import Refused, name_errors
from vtorque_core.api.children import wait_readable

_LEAVE = b"\x1d"  # Ctrl-], as in virsh(1)


def attach(path: Path) -> None:
    """Copy between the terminal and a console's socket, until Ctrl-] or the guest's end.

    Standard input must be a terminal. Raises Refused if nothing serves the socket.
    """
    with socket.socket(socket.AF_UNIX) as console:
        with name_errors(f"the guest's console {path}", fault=Refused):
            console.connect(str(path))
        before = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)
        try:
            sys.stderr.write("attached to the console: leave with Ctrl-]\r\n")
            left = _copy(console)
        finally:
            termios.tcsetattr(0, termios.TCSAFLUSH, before)
    sys.stderr.write("\n" if left else "\nthe console has ended\n")


def _copy(console: socket.socket) -> bool:
    """Copy in both directions. Return True if the user typed Ctrl-], False if the console ended."""
    while True:
        ready = wait_readable([0, console.fileno()])
        if console.fileno() in ready:
            output = console.recv(1 << 16)
            if not output:
                return False
            while output:
                output = output[os.write(1, output) :]
        if 0 in ready:
            typed = os.read(0, 4096)
            if not typed or _LEAVE in typed:
                return True
            console.sendall(typed)
