"""The settings ``[plugin.warm]`` and the shapes (sizes) of warm guests."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import count, duration, setting, show_mib, size_mib

_KEYS = ("img", "vcpus", "ram")


@dataclass(frozen=True)
class WarmShape:
    """A size of warm guests, as values of ``-vm`` options.

    Attributes:
        least: Number of guests that are always kept.
        most: Number of guests that may be kept if jobs requested them recently.
        age: Seconds after which a guest is replaced.
    """

    img: str
    vcpus: int
    ram: int
    least: int = 1
    most: int = 1
    age: float = 86400.0

    def __str__(self) -> str:
        """Return the shape as it is configured."""
        return f"img={self.img} vcpus={self.vcpus} ram={show_mib(self.ram)}"

    @property
    def options(self) -> dict[str, str]:
        """Return the ``-vm`` keys and values."""
        return {"img": self.img, "vcpus": str(self.vcpus), "ram": show_mib(self.ram)}


def parse_shape(text: str) -> WarmShape:
    """Parse a shape such as ``img=micro vcpus=2 ram=1G min=1 max=3``. Raises ValueError."""
    words = [word.partition("=") for word in text.split()]
    given = {key: value for key, _, value in words}
    if len(given) < len(words) or any(not value for value in given.values()):
        raise ValueError(f"shapes: {text!r}: write each key once, as key=value")
    unknown = sorted({*given} - {*_KEYS, "min", "max", "max_age"})
    missing = [key for key in _KEYS if key not in given]
    if unknown or missing:
        problem = (
            f"the key {unknown[0]} is unknown" if unknown else f"the key {missing[0]} is missing"
        )
        raise ValueError(
            f"shapes: {text!r}: {problem}; the keys are img, vcpus, ram, min, max, max_age"
        )
    try:
        vcpus, ram = count(given["vcpus"]), size_mib(given["ram"])
        least = count(given.get("min", "1"))
        most = count(given.get("max", str(max(1, least))))
        age = duration(given.get("max_age", "1d"))
    except ValueError as error:
        raise ValueError(f"shapes: {text!r}: a value {error}") from None
    if not vcpus or most < max(1, least) or most > _MOST or age < _YOUNGEST:
        raise ValueError(
            f"shapes: {text!r}: vcpus must be at least 1, min at most max, max at most {_MOST}, "
            f"and max_age at least {_YOUNGEST:g} s"
        )
    return WarmShape(given["img"], vcpus, ram, least, most, age)


_MOST, _YOUNGEST = 64, 60.0


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.warm]``."""

    shapes: tuple[str, ...] = setting(
        (),
        doc="warm guests to keep: img=micro vcpus=2 ram=1G min=1 max=3 max_age=1d; empty: none",
    )
    max_memory: str = setting(
        "",
        doc="maximum memory of all warm guests, such as 8G; without shapes, the shapes "
        "that jobs requested most are kept; empty: as the shapes need",
    )
    hotplug_ports: int = setting(
        8, doc="maximum number of devices that can be hot-plugged: NICs, seed, shares, disks"
    )
    failure_backoff: float = setting(
        10.0, doc="delay after a failed boot; doubled each time", unit="s"
    )
    eviction_backoff: float = setting(
        60.0,
        doc="delay after a job needed the memory of a warm guest; doubled up to 10 min, "
        "until a job takes a guest",
        unit="s",
    )
    policy: str = setting(
        "", doc="entry point of vtorque1.warm that chooses the shapes; empty: this plugin"
    )

    def __post_init__(self) -> None:
        """Reject invalid values with a ValueError."""
        self.shape_list()
        if self.max_memory:
            try:
                size_mib(self.max_memory)
            except ValueError as error:
                raise ValueError(f"max_memory={self.max_memory!r} is invalid: {error}") from None
        if not 2 <= self.hotplug_ports <= 24:
            raise ValueError(f"hotplug_ports={self.hotplug_ports} is invalid: it must be 2 to 24")
        if not 0 < self.failure_backoff <= 3600:
            raise ValueError(
                f"failure_backoff={self.failure_backoff:g} (s) is invalid: it must be more than "
                "0 and at most 3600 s"
            )
        if not 0 <= self.eviction_backoff <= 600:
            raise ValueError(
                f"eviction_backoff={self.eviction_backoff:g} (s) is invalid: it must be 0 to 600 s"
            )

    def shape_list(self) -> list[WarmShape]:
        """Return the parsed shapes."""
        return [parse_shape(text) for text in self.shapes]

    @property
    def budget(self) -> int | None:
        """The memory limit in MiB for all warm guests; None means no limit."""
        return size_mib(self.max_memory) if self.max_memory else None
