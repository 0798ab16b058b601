"""Contract that every image builder passes.

Example::

    class TestMine(BuilderContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

``MyHarness`` is a :class:`BuilderHarness`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.image_builder import Builder, Building, BuiltImage


class BuilderHarness(Protocol):
    """A builder and what it builds of.

    ``good`` are arguments of which it makes an image; ``bad`` are such that it refuses.
    """

    @property
    def builder(self) -> Builder:
        """The builder."""
        ...

    @property
    def good(self) -> Mapping[str, str]:
        """What ``-o key=value`` gives, of which an image can be built here."""
        ...

    @property
    def bad(self) -> Sequence[Mapping[str, str]]:
        """Arguments that are the admin's mistakes."""
        ...


class BuilderContract:
    """Subclass it, name it ``Test...``, and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> BuilderHarness:
        """Return the harness of the builder under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    @pytest.fixture
    def steps(self) -> list[str]:
        """Return the steps that were told."""
        return []

    @pytest.fixture
    def progress(self, steps: list[str]) -> Building:
        """Return what the builder tells its progress."""
        return Building(steps.append, lambda _done, _total: None)

    @pytest.fixture
    def staging(self, tmp_path: Path) -> Path:
        """Return the directory to build in, beside which nothing else is."""
        path = tmp_path / "pool" / "staging"
        path.mkdir(parents=True)
        return path

    def test_what_it_names_is_there(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """Plain names of files in the staging directory, each with something in it."""
        built = harness.builder.build(harness.good, staging, progress)
        names = _named(built)
        assert built.disk or built.initrd, "no disk and no initrd: nothing boots"
        assert names and all(Path(name).name == name for name in names), names
        for name in names:
            assert (staging / name).is_file() and not (staging / name).is_symlink(), name
            assert (staging / name).stat().st_size > 0, f"{name} is empty"

    def test_it_says_what_the_image_is(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """Of a kind of machine that there is, with RAM to boot in."""
        built = harness.builder.build(harness.good, staging, progress)
        assert built.arch in ("x86_64", "aarch64"), built.arch
        assert built.guest_type and built.distro
        assert 0 < built.min_ram_mib < 1 << 20
        assert built.disk_format in ("raw", "qcow2")
        if built.disk:
            begins = (staging / built.disk).read_bytes()[:4]
            assert (begins == b"QFI\xfb") == (built.disk_format == "qcow2"), built.disk_format

    def test_nothing_is_written_elsewhere(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """The rest of the pool, and what it builds of, stay as they are."""
        before = _all_below(staging.parents[1], staging)
        harness.builder.build(harness.good, staging, progress)
        assert _all_below(staging.parents[1], staging) == before

    def test_steps_are_told(
        self, harness: BuilderHarness, staging: Path, progress: Building, steps: list[str]
    ) -> None:
        """Who waits sees what is done: a line each."""
        harness.builder.build(harness.good, staging, progress)
        assert steps, "no step was told"
        assert all(step and step.isprintable() for step in steps), steps

    def test_an_option_that_there_is_not_is_refused(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """And is named: a misspelt one would build another image."""
        with pytest.raises(Refused, match="no-such-option"):
            harness.builder.build({**harness.good, "no-such-option": "1"}, staging, progress)

    def test_the_admins_mistakes_are_refused(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """As Refused: a host fault, or a traceback, would be somebody else's."""
        for number, arguments in enumerate(harness.bad):
            place = staging / str(number)
            place.mkdir()
            with pytest.raises(Refused):
                harness.builder.build(arguments, place, progress)

    def test_a_disk_that_is_too_large_is_refused(
        self, harness: BuilderHarness, staging: Path, steps: list[str]
    ) -> None:
        """By the site's limit."""
        limited = Building(steps.append, lambda _done, _total: None, max_disk=1)
        try:
            built = harness.builder.build(harness.good, staging, limited)
        except (Refused, HostFault):
            return
        assert built.disk is None, "a disk of more than max_disk was built"


def _named(built: BuiltImage) -> list[str]:
    return [name for name in (built.disk, built.kernel, built.initrd) if name]


def _all_below(top: Path, but: Path) -> dict[str, object]:
    """Return all files but those in one directory: their sizes and times."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        if path == but or but in path.parents or path == but.parent:
            continue
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found
