"""Parse the file of ``-vm vcpu_pinning=FILE``, which maps vCPUs to host CPUs. No side effects.

The file has one line for each guest of a node, in rank order. A line is a list of host CPUs
(cpuset(7), "List format"). The n-th CPU is for the n-th vCPU, as in Slurm's ``--cpu-bind=map_cpu``.
CPU numbers are those of Linux (``lscpu -e``). Blank lines and ``#`` comments are ignored.
"""

from __future__ import annotations

import re

_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


def read(content: bytes, guests: int, vcpus: int) -> tuple[tuple[int, ...], ...]:
    """Return the host CPUs of each guest's vCPUs. A ValueError names the invalid line."""
    found: list[tuple[int, ...]] = []
    line_of: dict[int, int] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            cpus = numbers(words, vcpus)
        except ValueError as error:
            raise ValueError(f"line {number} {error}") from None
        if len(cpus) < vcpus:
            raise ValueError(f"line {number} has {len(cpus)} CPUs for {vcpus} vCPUs")
        for cpu in cpus:
            if cpu in line_of:
                raise ValueError(
                    f"line {number} contains CPU {cpu}, which line {line_of[cpu]} also contains"
                )
            line_of[cpu] = number
        found.append(cpus)
        if len(found) > guests:
            raise ValueError(f"line {number} is for no guest: a node has {guests} guests")
    if len(found) < guests:
        raise ValueError(f"has {len(found)} lines, but a node has {guests} guests")
    return tuple(found)


def numbers(text: str, most: int) -> tuple[int, ...]:
    """Expand ``0-3,8``. Raises ValueError for invalid text, duplicates or too many numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError("is not a list of numbers such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"contains {first}-{last}, where the first number is larger")
        found += range(first, min(last, first + most) + 1)  # one more than allowed suffices
        if len(found) > most:
            raise ValueError(f"contains more than {most} numbers")
    twice = next((each for n, each in enumerate(found) if each in found[:n]), None)
    if twice is not None:
        raise ValueError(f"contains {twice} twice")
    return tuple(found)
