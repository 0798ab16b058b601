"""``vmgr images save``, with a recorded guest instead of libvirt."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from personal_site import PersonalSite
from vtorque_core.api import HostFault, Refused
from vtorque_core.live import libvirt
from vtorque_core.live.jobs import RunningGuest
from vtorque_own_images import command
from vtorque_testing import vmgr

PLACE = Path("/nonexistent")
GUEST = RunningGuest(0, 0, "vn1", "vt-1", "uuid", "test:///default", 1, 512, 0, 0.0, 1.0, PLACE)


class CopiedDomain:
    """A domain whose copy has these states; None is a state in which the copy has failed."""

    def __init__(self, *states: tuple[int, int] | None, alias: str = "ua-own-images-root") -> None:
        self.states: Iterator[tuple[int, int] | None] = iter(states)
        self.alias, self.calls = alias, list[str]()

    def XMLDesc(self, _: int) -> str:
        return f"<disk><alias name='{self.alias}'/></disk>"

    def blockCopy(self, disk: str, xml: str, _: None, flags: int) -> None:
        found = re.search("source file='([^']*)'", xml) or re.search('source file="([^"]*)"', xml)
        assert found and (disk, flags) == ("vdz", 4)
        Path(found[1]).write_bytes(b"copy")
        self.calls.append("copy")

    def blockJobInfo(self, _disk: str, _flags: int) -> dict[str, int]:
        state = next(self.states)
        return {} if state is None else {"cur": state[0], "end": state[1]}

    def blockJobAbort(self, _disk: str, flags: int) -> None:
        assert flags == 0
        self.calls.append("end")


@pytest.fixture
def copy_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the disk of a domain, and returns the copy's path."""
    monkeypatch.setattr(command, "_POLL", 0)

    def copy(domain: CopiedDomain | None) -> Path:
        def on_domain(_uri: str, _uuid: str, _what: str, work: Callable[[Any], Any]) -> Any:
            return None if domain is None else work(domain)

        monkeypatch.setattr(libvirt, "on_domain", on_domain)
        command.copy_disk(GUEST, tmp_path / "new.qcow2")
        return tmp_path / "new.qcow2"

    return copy


def test_copy_ends_when_it_is_complete(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    domain = CopiedDomain((0, 0), (0, 10), (9, 10), (10, 10))
    assert copy_of(domain).read_bytes() == b"copy"
    assert domain.calls == ["copy", "end"]
    assert [each.name for each in tmp_path.iterdir()] == ["new.qcow2"]


@pytest.mark.parametrize("states", [(None,), ((1, 10), None)])
def test_failed_copy_leaves_no_file(
    copy_of: Callable[..., Path], tmp_path: Path, states: tuple[Any, ...]
) -> None:
    with pytest.raises(HostFault, match="is there enough space"):
        copy_of(CopiedDomain(*states))
    assert list(tmp_path.iterdir()) == []


def test_interrupted_copy_is_canceled(copy_of: Callable[..., Path], tmp_path: Path) -> None:
    domain = CopiedDomain((1, 10))
    with pytest.raises((StopIteration, RuntimeError)):
        copy_of(domain)
    assert domain.calls == ["copy", "end"]
    assert list(tmp_path.iterdir()) == []


def test_file_that_appeared_during_the_save_is_kept(
    copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "new.qcow2").write_text("other")
    with pytest.raises(HostFault, match="File exists"):
        copy_of(CopiedDomain((10, 10)))
    assert [each.read_text() for each in tmp_path.iterdir()] == ["other"]


def test_guest_that_shares_the_directory_cannot_redirect_the_copy(
    copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    secret = tmp_path / "authorized_keys"
    secret.write_text("secret")

    class HostileDomain(CopiedDomain):
        def blockCopy(self, disk: str, xml: str, _: None, flags: int) -> None:
            for part in tmp_path.glob(".*.part"):
                part.rename(tmp_path / "kept")
                part.symlink_to(secret)
            if not (tmp_path / "kept").exists():  # it knows the name before the copy begins
                (tmp_path / f".new.qcow2.{os.getpid()}.part").symlink_to(secret)
            super().blockCopy(disk, xml, _, flags)

    made = copy_of(HostileDomain((10, 10)))
    assert secret.read_text() == "secret"
    assert not made.is_symlink() and made.read_bytes() == b"copy"


def test_guest_without_own_disk_is_refused(copy_of: Callable[..., Path]) -> None:
    with pytest.raises(Refused, match="does not boot your own disk"):
        copy_of(CopiedDomain(alias="ua-core-root"))
    with pytest.raises(HostFault, match="has ended"):
        copy_of(None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the config of a site with an administrator."""
    path = tmp_path / "site.toml"
    path.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    return path


def refused(config: Path, file: str) -> str:
    found = vmgr.run(config, "images", "save", "7.x", file).exception
    assert isinstance(found, Refused)
    return str(found)


def test_command_refuses_what_it_cannot_save(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = str(tmp_path / "new.qcow2")
    assert "only on your own machine" in refused(config, new)
    monkeypatch.setattr(PersonalSite, "paths", command.site_of(config).paths, raising=False)
    monkeypatch.setattr(command, "site_of", lambda _: PersonalSite())
    assert "no guest that is ready" in refused(config, new)
    (tmp_path / "old.qcow2").touch()
    assert "already exists" in refused(config, str(tmp_path / "old.qcow2"))
    for name in ("new.raw", "new"):
        assert "must end in .qcow2" in refused(config, str(tmp_path / name))
