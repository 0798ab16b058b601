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
    """The builder under test, and its input."""

    @property
    def builder(self) -> Builder:
        """The builder under test."""
        ...

    @property
    def valid_arguments(self) -> Mapping[str, str]:
        """Values of ``-o KEY=VALUE`` from which the builder builds an image on this machine."""
        ...

    @property
    def invalid_arguments(self) -> Sequence[Mapping[str, str]]:
        """Invalid values of ``-o KEY=VALUE``, each of which the builder must refuse."""
        ...


class BuilderContract:
    """Tests of a builder. Subclass as ``Test...`` and override the fixture ``harness``."""

    @pytest.fixture
    def harness(self) -> BuilderHarness:
        """Return the harness of the builder under test."""
        raise NotImplementedError("override the fixture harness() in the subclass")

    @pytest.fixture
    def steps(self) -> list[str]:
        """Return the list of steps that the builder has reported."""
        return []

    @pytest.fixture
    def progress(self, steps: list[str]) -> Building:
        """Return the object to which the builder reports its progress."""
        return Building(steps.append, lambda _done, _total: None)

    @pytest.fixture
    def staging(self, tmp_path: Path) -> Path:
        """Return the empty directory in which the builder creates the image."""
        path = tmp_path / "pool" / "staging"
        path.mkdir(parents=True)
        return path

    def test_named_files_exist(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """The files that the builder names must exist in the staging directory, and be nonempty.

        Their names must be plain file names, and the files must not be symbolic links.
        """
        built = harness.builder.build(harness.valid_arguments, staging, progress)
        names = _named_files(built)
        assert built.disk or built.initrd, "no disk and no initrd: nothing boots"
        assert names and all(Path(name).name == name for name in names), names
        for name in names:
            assert (staging / name).is_file() and not (staging / name).is_symlink(), name
            assert (staging / name).stat().st_size > 0, f"{name} is empty"

    def test_image_is_described(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """The image must name a known architecture and disk format, and a plausible RAM size."""
        built = harness.builder.build(harness.valid_arguments, staging, progress)
        assert built.arch in ("x86_64", "aarch64"), built.arch
        assert built.guest_type and built.distro
        assert 0 < built.min_ram_mib < 1 << 20
        assert built.disk_format in ("raw", "qcow2")
        if built.disk:
            begins = (staging / built.disk).read_bytes()[:4]
            assert (begins == b"QFI\xfb") == (built.disk_format == "qcow2"), built.disk_format

    def test_nothing_is_written_outside_the_staging_directory(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """The builder must not change files outside of the staging directory."""
        before = _all_below(staging.parents[1], staging)
        harness.builder.build(harness.valid_arguments, staging, progress)
        assert _all_below(staging.parents[1], staging) == before

    def test_steps_are_reported(
        self, harness: BuilderHarness, staging: Path, progress: Building, steps: list[str]
    ) -> None:
        """The builder must report its steps, as printable lines."""
        harness.builder.build(harness.valid_arguments, staging, progress)
        assert steps, "no step was reported"
        assert all(step and step.isprintable() for step in steps), steps

    def test_unknown_option_is_refused(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """An unknown option must be refused, and the error must name the option."""
        with pytest.raises(Refused, match="no-such-option"):
            harness.builder.build(
                {**harness.valid_arguments, "no-such-option": "1"}, staging, progress
            )

    def test_mistakes_of_an_admin_are_refused(
        self, harness: BuilderHarness, staging: Path, progress: Building
    ) -> None:
        """An administrator's mistake must raise Refused, not HostFault or another exception."""
        for number, arguments in enumerate(harness.invalid_arguments):
            place = staging / str(number)
            place.mkdir()
            with pytest.raises(Refused):
                harness.builder.build(arguments, place, progress)

    def test_too_large_disk_is_refused(
        self, harness: BuilderHarness, staging: Path, steps: list[str]
    ) -> None:
        """A disk larger than the site's ``max_disk`` must be refused."""
        limited = Building(steps.append, lambda _done, _total: None, max_disk=1)
        try:
            built = harness.builder.build(harness.valid_arguments, staging, limited)
        except (Refused, HostFault):
            return
        assert built.disk is None, "a disk of more than max_disk was built"


def _named_files(built: BuiltImage) -> list[str]:
    return [name for name in (built.disk, built.kernel, built.initrd) if name]


def _all_below(top: Path, but: Path) -> dict[str, object]:
    """Return mode, size and time of all files below ``top``, except those in ``but``."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        if path == but or but in path.parents or path == but.parent:
            continue
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found
