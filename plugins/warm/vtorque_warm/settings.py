"""``[plugin.warm]``, and what a shape is."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.api import count, duration, setting, show_mib, size_mib

_KEYS = ("img", "vcpus", "ram")


@dataclass(frozen=True)
class Shape:
    """A size of guest that is kept: as jobs ask for it with ``-vm``.

    ``least``: so many are there always; ``most``: so many may be, if jobs ask for them lately.
    ``age``: seconds after which one is made anew.
    """

    img: str
    vcpus: int
    ram: int
    least: int = 1
    most: int = 1
    age: float = 86400.0

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"img={self.img} vcpus={self.vcpus} ram={show_mib(self.ram)}"

    @property
    def wanted(self) -> dict[str, str]:
        """Return the ``-vm`` keys and values."""
        return {"img": self.img, "vcpus": str(self.vcpus), "ram": show_mib(self.ram)}


def parsed(text: str) -> Shape:
    """Return the shape of ``img=micro vcpus=2 ram=1G least=1 most=3``. Raises ValueError."""
    words = [word.partition("=") for word in text.split()]
    given = {key: value for key, _, value in words}
    if len(given) < len(words) or any(not value for value in given.values()):
        raise ValueError(f"shapes: {text!r}: write each word once, as key=value")
    unknown = sorted({*given} - {*_KEYS, "least", "most", "age"})
    missing = [key for key in _KEYS if key not in given]
    if unknown or missing:
        wrong = f"there is no {unknown[0]}" if unknown else f"{missing[0]} is missing"
        raise ValueError(f"shapes: {text!r}: {wrong}; it has img, vcpus, ram, least, most, age")
    try:
        vcpus, ram = count(given["vcpus"]), size_mib(given["ram"])
        least = count(given.get("least", "1"))
        most = count(given.get("most", str(max(1, least))))
        age = duration(given.get("age", "1d"))
    except ValueError as error:
        raise ValueError(f"shapes: {text!r}: a value {error}") from None
    if not vcpus or most < max(1, least) or most > _MOST or age < _YOUNGEST:
        raise ValueError(
            f"shapes: {text!r}: vcpus is at least 1, least at most most, most {_MOST}, and age "
            f"at least {_YOUNGEST:g} s"
        )
    return Shape(given["img"], vcpus, ram, least, most, age)


_MOST, _YOUNGEST = 64, 60.0


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.warm]``."""

    shapes: tuple[str, ...] = setting(
        (),
        doc="guests to keep ready: img=micro vcpus=2 ram=1G least=1 most=3 age=1d; none by default",
    )
    memory: str = setting(
        "",
        doc="at most so much memory for all of them, such as 8G; without shapes those that jobs "
        "asked for most; empty: what the shapes need",
    )
    ports: int = setting(8, doc="devices that can be plugged into one: NIC, seed, shares, disks")
    pause: float = setting(
        10.0, doc="after a guest that did not get ready; then twice that", unit="s"
    )
    rest: float = setting(
        60.0,
        doc="after a job needed the memory of one: none is booted; then twice that, up to 10 min, "
        "until a job takes one",
        unit="s",
    )
    policy: str = setting(
        "", doc="who says which shapes: an entry point of vtorque1.warm; empty: this plugin"
    )

    def __post_init__(self) -> None:
        """Check what types do not say. Raises ValueError."""
        self.kept()
        if self.memory:
            try:
                size_mib(self.memory)
            except ValueError as error:
                raise ValueError(f"memory is {self.memory!r}: {error}") from None
        if not 2 <= self.ports <= 24:
            raise ValueError(f"ports is {self.ports}, must be 2 to 24")
        if not 0 < self.pause <= 3600:
            raise ValueError(f"pause is {self.pause:g} s, must be over 0 and at most 3600 s")
        if not 0 <= self.rest <= 600:
            raise ValueError(f"rest is {self.rest:g} s, must be 0 to 600 s")

    def kept(self) -> list[Shape]:
        """Return the shapes. Raises ValueError."""
        return [parsed(text) for text in self.shapes]

    @property
    def budget(self) -> int | None:
        """MiB for all guests; None: no limit but their number."""
        return size_mib(self.memory) if self.memory else None
