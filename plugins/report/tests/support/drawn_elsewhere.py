"""Plots are drawn by a separate process.

The drawing library has four threads and 100 MB of memory, which each later fork of the tests would
copy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vtorque_report import drawing

DRAW = """
import json, sys
from vl_convert import vegalite_to_svg
for line in sys.stdin:
    spec, options = json.loads(line)
    print(json.dumps(vegalite_to_svg(spec, **options)), flush=True)
"""


@pytest.fixture(scope="session", autouse=True)
def draw_elsewhere() -> Iterator[None]:
    started: list[subprocess.Popen[str]] = []
    drawn: dict[str, str] = {}

    def draw(spec: Any, **options: Any) -> str:
        line = json.dumps([spec, options])
        if line not in drawn:  # a plot takes 40 ms
            drawn[line] = draw_line(line)
        return drawn[line]

    def draw_line(line: str) -> str:
        if not started:
            argv = [sys.executable, "-c", DRAW]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True))
        process = started[0]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        svg: str = json.loads(process.stdout.readline())
        return svg

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_renderer", [draw])
        yield
    for process in started:
        process.communicate(timeout=180)
