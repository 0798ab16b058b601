"""Parse sizes, durations, counts and booleans. Only ValueError is raised."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]{1,15})\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE | re.ASCII)
_KIB = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
_DURATION = re.compile(r"([0-9]{1,9})\s*(ms|s|m|min|h|d)?", re.IGNORECASE | re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TRUE = frozenset({"enabled", "true", "yes", "on"})
_FALSE = frozenset({"disabled", "false", "no", "off"})
_AMBIGUOUS = frozenset({"0", "1"})
BOOLEAN_WORDS = _TRUE | _FALSE | _AMBIGUOUS  # words that boolean() recognizes
_MAX_MIB = 1 << 40  # one EiB in MiB: more is a typing error, and libvirt's XML takes 64 bits


def size_mib(text: str) -> int:
    """Return the MiB of ``512M``, ``2G``, ``1GiB``, ``2048K``; a plain number is MiB.

    Units are binary (1024).
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size: write a whole number with K, M, G or T, like 512M or 2G")
    kib = int(match[1]) * _KIB[(match[2] or "M").upper()]
    mib, rest = divmod(kib, 1024)
    if rest or not 0 < mib <= _MAX_MIB:
        raise ValueError("is not a whole number of MiB between 1M and 1048576T")
    return mib


def show_mib(mib: int) -> str:
    for unit, factor in (("T", 1024**2), ("G", 1024)):
        if mib and mib % factor == 0:
            return f"{mib // factor}{unit}"
    return f"{mib}M"


def count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII):
        raise ValueError("is not a whole number")
    return int(text)


def boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    if word in _AMBIGUOUS:
        raise ValueError(
            "is ambiguous (the old vTorque took 0 for enabled): write true or false instead"
        )
    raise ValueError("is not a boolean: write true or false (or enabled/disabled, yes/no, on/off)")


def duration(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a duration: write a whole number with ms, s, m, h or d, like 90s")
    return int(match[1]) * _SECONDS[(match[2] or "s").lower()]


def walltime(text: str) -> int:
    """Return the seconds of PBS's ``[[HH:]MM:]SS`` (pbs_resources(7))."""
    parts = text.strip().split(":")
    if not 1 <= len(parts) <= 4 or not all(re.fullmatch(r"[0-9]{1,9}", p, re.ASCII) for p in parts):
        raise ValueError("is not a walltime: write [[HH:]MM:]SS")
    seconds = 0
    for part, factor in zip(reversed(parts), (1, 60, 3600, 86400), strict=False):
        seconds += int(part) * factor
    return seconds
