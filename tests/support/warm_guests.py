"""Warm guests of a real node, and the jobs that claim them."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

TELLS = """#!/bin/sh
cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid
head -c 16 /dev/urandom | od -An -tx1
date +%s; stat -c %Y started; hostname; id -un
"""
_LONG = 1200  # seconds: only ends a failing test
TAKEN = "was booted before: "


@dataclass
class Warm:
    """The node, with waiting warm guests."""

    node: object

    def command(self, *words, check=True):
        config = ("--config", str(self.node.config))
        return self.node.root("vtorque", "warm", *config, *words, check=check).stdout.decode()

    def waiting(self):
        """Return the keys of the waiting guests."""
        self.hurry()
        guests = json.loads(self.command("--json"))["guests"]
        return {each["key"] for each in guests if each["state"] == "waits"}

    def hurry(self):
        """Set the nice value of the service and of booting guests to 0.

        Their 19 would keep them from booting at all on a busy machine.
        """
        place = f"{self.node.state}/".encode(), str(self.node.config).encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if any(path in (process / "cmdline").read_bytes() for path in place):
                    for thread in (process / "task").iterdir():
                        if os.getpriority(os.PRIO_PROCESS, int(thread.name)) > 0:
                            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)

    def await_full(self, number=1):
        """Wait until this many wait; return their keys."""
        return self.node.wait_for(
            lambda: found if len(found := self.waiting()) >= number else None,
            _LONG,
            what=f"{number} warm guests",
        )

    def job(self, *args, text=TELLS):
        """Run a job; return its output's lines and its log's messages."""
        (self.node.home / "started").touch()
        result = self.node.job(text, *args, timeout=_LONG)
        assert result.code == 0, result.err
        assert result.err == b""
        kept = max((self.node.state / "kept").glob("*/*/"), key=lambda p: p.stat().st_mtime)
        log = [json.loads(line) for line in (kept / "log.jsonl").read_text().splitlines()]
        return result.out.decode().splitlines(), [str(each["message"]) for each in log]


@contextlib.contextmanager
def kept_warm(clean, config, shape, number=1):
    """Keep this many guests ready until the end of the block."""
    config("plugin.warm", f'shapes = ["{shape} min={number} max={number}"]')
    found = Warm(clean)
    found.command("start")
    try:
        found.await_full(number)
        yield found
    finally:
        found.command("stop")
        for path in (clean.home / "started", clean.home / "job.sh"):
            path.unlink(missing_ok=True)


def took(log):
    return [message.removeprefix(TAKEN) for message in log if message.startswith(TAKEN)]
