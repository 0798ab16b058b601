"""Format numbers for people."""

from __future__ import annotations

import datetime

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(amount: float) -> str:
    """Format bytes with up to three digits."""
    number, unit = byte_unit(amount)
    return f"{amount / number:.{0 if number == 1 or amount / number >= 100 else 1}f} {unit}"


def byte_unit(most: float) -> tuple[float, str]:
    """Return the unit for amounts up to ``most`` bytes: the bytes per unit, and the unit's name."""
    step = 0
    while most >= 1000 * 1024**step and step < len(_BINARY) - 1:
        step += 1
    return float(1024**step), _BINARY[step]


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02} h"


def percent(share: float) -> str:
    """Format a fraction as a percentage, with one decimal place below 10 %."""
    return f"{share * 100:.1f} %" if 0 < share < 0.0995 else f"{share * 100:.0f} %"


def clock(time: float) -> str:
    """Format Unix seconds as local time with offset; empty if out of range."""
    try:
        when = datetime.datetime.fromtimestamp(time).astimezone()
    except (OverflowError, ValueError, OSError):
        return ""
    return when.strftime("%Y-%m-%d %H:%M:%S %z")
