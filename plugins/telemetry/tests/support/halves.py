"""Both halves of the sampler in one process."""

import os
from dataclasses import replace

from vtorque_telemetry.sampler import SamplerLoop
from vtorque_telemetry.samples import Samples
from vtorque_telemetry.settings import Settings


class Here:
    """A double of the separate process: receives ticks at once, and copies of files."""

    def __init__(self, settings, outlets):
        self.samples = Samples(settings, outlets)
        self._has = {}

    def send(self, tick, files, answer=-1):
        fresh = {name: file for name, file in files.items() if self._has.get(name) != file}
        self._has = dict(files)
        waits = [answer] if answer >= 0 else []
        copies = [os.dup(file) for file in (*fresh.values(), *waits)]
        self.samples.take(replace(tick, files=tuple(fresh)), copies)


def loop(paths, outlets, *stats, settings=None):
    """Return root's half; the other is in its ``here.samples``."""
    here = Here(settings or Settings(), outlets)
    made = SamplerLoop(paths, 2.0, here, *stats)
    made.here = here
    return made
