"""What joblog, snap and telemetry together add to the start of a job: time that its user waits."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapteld_double
import watched_start
from patience import at_best

LIMIT = 20.0  # milliseconds
EXAMPLE = Path(snapteld_double.__file__).parents[2] / "vtorque_snap" / "example-task.json"


@contextlib.contextmanager
def snapteld() -> Iterator[str]:
    argv = [sys.executable, snapteld_double.__file__, "{}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://localhost:{int(process.stdout.readline())}"
        finally:
            process.kill()


def started(directory: Path, url: str, *plugins: str) -> float:
    """Return the milliseconds of one start, in a process as fresh and small as a hook's."""
    directory.mkdir()
    directory.chmod(0o755)
    task = directory / "task.json"
    shutil.copy(EXAMPLE, task)
    task.chmod(0o600)
    argv = [sys.executable, watched_start.__file__, directory, "1.srv", url, *plugins]
    path = ":".join(str(Path(m.__file__).parent) for m in (watched_start, snapteld_double))
    done = subprocess.run(
        argv, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return float(done.stdout)


@pytest.mark.full
def test_they_hold_up_a_start_for_little(tmp_path):
    """Both in turn; the best of each, since another program can only add to them."""
    bare: list[float] = []
    watched: list[float] = []

    def difference() -> float:
        n = len(bare)
        bare.append(started(tmp_path / f"bare{n}", "", "linux-guest"))
        three = ("linux-guest", "snap", "telemetry", "joblog")
        watched.append(started(tmp_path / f"all{n}", url, *three))
        return min(watched) - min(bare)

    with snapteld() as url:
        assert at_best(difference, LIMIT, least=5) < LIMIT, (bare, watched)
