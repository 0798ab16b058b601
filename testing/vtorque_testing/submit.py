"""Submit a job as vsub does, in a child process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vtorque_core.api.batch_system import Needs
from vtorque_core.base.errors import VtorqueError
from vtorque_core.config.request import make_request, merge_pairs
from vtorque_testing.harness import OPTIONS, BatchHarness, ProgramResult

CHILD_TIME = 60  # seconds until a submission that hangs is killed


def run_vsub(
    harness: BatchHarness,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    blob: bytes | None = None,
    needs: Needs | None = None,
) -> ProgramResult:
    """Submit as vsub does, in a child process. The known ``-vm`` keys are :data:`OPTIONS`.

    Args:
        harness: the batch system.
        argv: the user's command line.
        stdin: the user's standard input.
        blob: bytes to send instead of the request.
        needs: resources that the guests need; None: defaults.
    """

    def submit() -> int:
        submitter = harness.system.submitter(harness.site)
        args = submitter.split(argv)
        pairs = merge_pairs(args.vm, args.directives)
        if not pairs and blob is None:
            return submitter.submit(args, None, None)
        request = make_request(pairs or (), OPTIONS, args.shell).encode() if blob is None else blob
        return submitter.submit(args, request, needs or Needs(1, 512))

    return run_in_child(submit, stdin, harness.environ, harness.directory)


def run_in_child(
    work: Callable[[], int], stdin: bytes, environ: Mapping[str, str], directory: Path
) -> ProgramResult:
    """Run a function in a child process with this standard input, environment and directory.

    The function may replace the process with exec.
    """
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin)
        given.seek(0)
        child = os.fork()
        if child == 0:
            files = [file.fileno() for file in (given, out, err)]
            _child(work, files, environ, directory)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return ProgramResult(code, out.read(), err.read())


def _child(
    work: Callable[[], int], files: Sequence[int], environ: Mapping[str, str], directory: Path
) -> None:
    code = 70  # EX_SOFTWARE of sysexits.h: a defect
    gc.disable()  # a collection would copy the test run's memory, page by page
    try:
        for target, source in enumerate(files):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = (
            open(n, mode, closefd=False)  # noqa: SIM115 (as long as the process)
            for n, mode in enumerate("rww")
        )
        os.chdir(directory)
        os.environ.clear()
        for name in ("COLUMNS", "LINES"):  # set by readline(3), invisible in os.environ
            os.unsetenv(name)
        os.environ.update(environ)
        signal.alarm(CHILD_TIME)
        code = work()
    except VtorqueError as error:
        sys.stderr.write(f"vsub: {error}\n")
        code = error.exit_code
    except BaseException:  # no exception may continue in this copy of the test run
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
