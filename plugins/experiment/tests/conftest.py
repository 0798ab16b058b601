"""Plots are drawn by a process of their own.

What draws has four threads and a hundred MB, which each later fork of the tests would copy.
"""

import json
import subprocess
import sys

import pytest

from vtorque_experiment import plots

DRAW = """
import json, sys
from vl_convert import vegalite_to_svg
for line in sys.stdin:
    spec, options = json.loads(line)
    print(json.dumps(vegalite_to_svg(spec, **options)), flush=True)
"""


@pytest.fixture(scope="session", autouse=True)
def elsewhere():
    started = []

    def draw(spec, **options):
        if not started:
            argv, pipe = [sys.executable, "-c", DRAW], subprocess.PIPE
            started.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True))
        process = started[0]
        process.stdin.write(json.dumps([spec, options]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_renderer", [draw])
        yield
    for process in started:
        process.communicate(timeout=180)
