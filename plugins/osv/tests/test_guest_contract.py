"""The contract of all guest types, for OSv: the consoles are doubles with OSv's recorded output."""

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from vtorque_osv.console import BEGIN
from vtorque_osv.driver import CONSOLE_SOCKET, OsvDriver
from vtorque_osv.order import PROPERTIES, BootOrder, GuestProperties

from vtorque_core.api.guest_driver import BootedGuest
from vtorque_testing.guest import GuestContract, ShellScripts
from vtorque_testing.late_guest import booting
from vtorque_testing.planned import guest_plan

DOWN = "VFS: unmounting /dev\nVFS: unmounting /\nROFS: hit ratio is 1%\nPowering off.\n"


class ImagePrograms(ShellScripts):
    """The image's programs: ``/say N`` prints the text that was stored under this number."""

    def __init__(self):
        self.kept = []

    def say(self, text, code=0, stays=False):
        self.kept.append((text, code, stays))
        return b"/say %d\n" % (len(self.kept) - 1)

    def exit_with(self, code):
        return self.say("", code)

    def print_text(self, text):
        return self.say(text)

    def counts(self, lines):
        return self.say("".join(f"{n}\n" for n in range(1, lines + 1)))

    def wait_for_signal(self):
        return self.say("up\n", stays=True)


class OsvHarness:
    """See :class:`vtorque_testing.guest.GuestHarness`."""

    ready_port, ready_mark, run_port, patience = "", b"", CONSOLE_SOCKET, 120.0
    lacks = {  # noqa: RUF012
        "ready": "an OSv guest runs the job from its start",
        "signals": "OSv has no signals: TERM, INT and HUP end the guest",
        "terminal": "an interactive job needs a shell and is refused",
        "stdin": "the console is only an output",
        "stderr": "the console is one stream",
        "killed": "a crash ends OSv, which names only two kinds of crashes",
    }

    def __init__(self):
        self.driver, self.scripts = OsvDriver(), ImagePrograms()
        self._top = Path(tempfile.mkdtemp(prefix="vtorque-osv-"))
        self.plan = guest_plan(run_dir=self._top, state_dir=self._top)
        properties = GuestProperties(mode="cmdline", address="", begin=BEGIN)
        (self._top / PROPERTIES).write_bytes(properties.encode())

    @contextlib.contextmanager
    def boot(self, fails=""):
        assert not fails
        with booting(self._top, self._boot):
            yield

    def _boot(self, order):
        self._script = BootOrder.decode(order).script
        with socket.socket(socket.AF_UNIX) as console:
            console.connect(str(self._top / CONSOLE_SOCKET))
            return [BootedGuest("vn1", 0, os.dup(console.fileno()))]

    def connect(self, port):
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._console, args=(theirs,), daemon=True).start()
        return ours

    def _console(self, port):
        text, code, stays = self.scripts.kept[int(self._script.split()[1])]
        with port, contextlib.suppress(OSError):
            said = f"OSv v0.57\nCmdline: /x\n{BEGIN}\n{text}"
            said += f"program /say returned {code}\n" if code else ""
            port.sendall((said + DOWN * (not stays)).replace("\n", "\r\n").encode())
            while stays and port.recv(1):
                pass

    def close(self):
        shutil.rmtree(self._top)


class TestOsvGuest(GuestContract):
    @pytest.fixture
    def harness(self):
        made = OsvHarness()
        yield made
        made.close()
