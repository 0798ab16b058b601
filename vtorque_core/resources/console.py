"""Resource: the process that records a guest's console."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from vtorque_core.api.daemon_process import DaemonProcess

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from vtorque_core.base import _console, _launch; sys.exit(_launch.main(_console.record))"
)


class ConsoleRecorder(DaemonProcess):
    """A process that records a console. ``argv``: see :mod:`vtorque_core.base._console`."""

    _launcher: ClassVar[tuple[str, ...]] = ("-c", _PROGRAM, str(Path(__file__).parents[2]))
