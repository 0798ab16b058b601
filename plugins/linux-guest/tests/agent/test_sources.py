"""The C sources: a file uses only those that agent.h declares above it."""

import re
from pathlib import Path

import vtorque_linux_guest.agent

SOURCES = Path(vtorque_linux_guest.agent.__file__).parent


def test_source_file_uses_only_files_declared_above_it() -> None:
    header = (SOURCES / "agent.h").read_text()
    parts = re.split(r"^/\* (\w+)\.c", header, flags=re.MULTILINE)[1:]
    order, texts = parts[::2], parts[1::2]
    assert {*order, "agent"} == {path.stem for path in SOURCES.glob("*.c")}
    declared = [set(re.findall(r"\b\w+(?=\()", text)) for text in texts]
    for place, name in enumerate(order):
        used = set(re.findall(r"\b\w+(?=\()", (SOURCES / f"{name}.c").read_text()))
        assert declared[place] & used, f"{name}.c defines no function that agent.h declares for it"
        above = set().union(*declared[: place + 1])
        below = set().union(*declared[place + 1 :]) - above
        assert not used & below, f"{name}.c uses {sorted(used & below)}"
