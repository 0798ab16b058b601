"""Plugin with a device whose release can be made to fail, for tests of teardown."""

import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

from vtorque_core.api.acquired import Resource
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader


@dataclasses.dataclass(frozen=True)
class AcmeCard(Resource):
    """A directory entry; a file beside it determines how its release behaves."""

    kind = "acme-card"
    path: str

    def create(self):
        Path(self.path).write_text("loaded")

    def release(self):
        mood = Path(self.path + ".mood")
        what = mood.read_text() if mood.exists() else ""
        if what == "fail":
            raise HostFault("card is busy")
        if what == "hang":
            time.sleep(60)
        if what == "die":
            os._exit(3)
        if what == "exit":
            sys.exit("leaving")
        Path(self.path).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class CardManager(AcmeCard):
    """A process that manages the cards of all jobs of the node."""

    kind = "acme-manager"
    scope = "node"

    def create(self):
        with Path(self.path).open("x") as file:
            file.write("running")


class AcmePlugin:
    """The plugin's node module."""

    def __init__(self, log=None, mood=""):
        self.log = log
        self.mood = mood

    @hookimpl
    def vtorque_resources(self):
        yield AcmeCard
        yield CardManager

    @hookimpl
    def vtorque_teardown(self, job):
        if self.mood == "hang":
            time.sleep(60)
        if self.mood == "raise":
            raise RuntimeError("counters are gone")
        if self.log:
            with self.log.open("a") as file:
                file.write(
                    json.dumps([job.job.id, job.job.attempt, job.job.owner, job.guests]) + "\n"
                )


def loaded(*modules):
    plugins = Plugins()
    for number, module in enumerate(modules or (AcmePlugin(),)):
        plugins.register(f"acme{number or ''}", module, "vtorque-acme 1.0.0")
    return plugins


ACTING = dict.fromkeys(("acme", "acme1", "acme2"), "vtorque-acme 1.0.0")


def starter(paths):
    """Return a function that starts a job's journal; ``take`` acquires for the plugin."""

    def start(job="42.srv", attempt=0, **more):
        header = JobHeader(JobAttempt(job, attempt, "u", 1000), "local", ACTING, **more)
        journal = Journal.start(paths, header)
        journal.take = functools.partial(journal.acquire, plugin="acme", phase="pre_boot")
        return journal

    return start


def in_other_process(work):
    """Run a function in a child; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid
