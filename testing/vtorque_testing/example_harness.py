"""Harness of the example batch adapter, with a double of its batch system."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from vtorque_core.api import Paths
from vtorque_core.api.batch_system import Outcome
from vtorque_testing.commands import RecordingCommand
from vtorque_testing.example import ACME, AcmeNode, Settings, options_of
from vtorque_testing.harness import (
    Dialect,
    HookCall,
    OwnValue,
    PluginSite,
    ProgramResult,
    ShellCall,
    StartedJob,
    Submission,
)


class AcmeHarness:
    """BatchHarness for the example batch system acme, which it simulates."""

    system = ACME
    dialect = Dialect(
        options=("-n", "name", "-k", "a note"),
        directive="# acme reads no scripts",
        unknown="-z",
        arguments=lambda script, words: [script, *words],
        share=lambda cpus, mib: ["-c", str(cpus), "-m", str(mib)],
        exits={outcome: int(outcome is Outcome.HOST_FAULT) for outcome in Outcome},
        carries=40_000,
        permutes=False,
        takes_stdin=False,
        array=("-a", "2"),
        two_nodes=("-N", "2"),
        interactive=("-i",),
        own=(OwnValue(("-k", "my own"), lambda job: _note(job).startswith("my own")),),
    )

    def __init__(self, root: Path) -> None:
        self.directory, self._spool, self._hooks = root / "home", root / "spool", root / "etc"
        for path in (self.directory, self._spool, self._hooks, root / "bin"):
            path.mkdir()
        (self._hooks / "vtorque").write_text("#!/bin/sh\n# the site's own hook of that name\n")
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(self.directory)}
        self._acmesub = RecordingCommand(root / "bin/acmesub")
        self._acmestat, self._jobs = root / "bin/acmestat", list[str]()
        settings = Settings(str(root / "bin/acmesub"), str(self._acmestat), str(self._hooks))
        self.site = PluginSite(Paths(jobshell=root / "libexec/vtorque-jobshell"), (settings,))
        self._numbers = itertools.count(1)
        self.serve(True)

    def last_input(self) -> Submission | None:
        """Return the last call of acmesub."""
        calls = self._acmesub.calls()
        if not calls:
            return None
        call, number = calls[-1], next(self._numbers)
        content = next(iter(call.files.values()), None)
        if content is not None:
            (self._spool / str(number)).write_bytes(content)
        self._jobs += [str(number), f"{number}.0", f"{number}.1"]
        self.serve(True)
        return Submission(str(number), call.argv, call.environ, content)

    def answer(self, ended: ProgramResult) -> bool:
        """Set the output and exit status of the next call of acmesub."""
        self._acmesub.answer(ended)
        return True

    def start(
        self, job: Submission, *, nodes: int = 1, element: int = 0, forged: str | None = None
    ) -> StartedJob:
        """Return what acme starts for the job."""
        options, operands = options_of(job.argv)
        job_id = f"{job.job_id}.{element}" if "-a" in options else job.job_id
        names = [f"n{i}" for i in range(1, nodes + 1)]
        environ = {"ACME_JOB": job_id, "ACME_USER": "ada", "ACME_NODES": ",".join(names)}
        environ["ACME_NOTE"] = _note(job) if forged is None else forged
        node = AcmeNode(self.site)
        hooks = [HookCall(node, (), environ | {"ACME_NODE": name}) for name in names]
        argv = (str(self._spool / job.job_id), *operands[1:])
        return StartedJob(tuple(hooks), ShellCall(argv, environ, None))

    def end(self, job: Submission) -> None:
        """Remove the job from acme's list."""
        self._jobs.remove(job.job_id)
        self.serve(True)

    def serve(self, up: bool) -> None:
        """Make acmestat succeed or fail."""
        words = " ".join(self._jobs)
        self._acmestat.write_text(f"#!/bin/sh\necho {words}\n" if up else "#!/bin/sh\nexit 1\n")
        self._acmestat.chmod(0o755)

    def setup_root(self) -> Path | None:
        """Return the directory in which the setup steps install the hooks that acme runs."""
        return self._hooks


def _note(job: Submission) -> str:
    return options_of(job.argv)[0].get("-k", "")
