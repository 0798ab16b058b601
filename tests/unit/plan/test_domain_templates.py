"""Templates of third parties and of the site: found, escaped, and named when they fail."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest

from vtorque_core.api.libvirt_domain import Channel, Element, ListElement
from vtorque_core.base.errors import ConfigError, HostFault, Refused
from vtorque_core.live.site_config import site_templates
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_testing.planned import guest_plan

GUEST = guest_plan(vcpus=2)
CONTROL = Channel("control", "org.vtorque.control", "/run/control.sock")


def draw(*elements: Element, templates: Path | None = None) -> str:
    merged = merge(Contributed("linux-guest", "vtorque-linux-guest 1.0", e) for e in elements)
    return render(DomainSpec(GUEST, "tcg", templates=templates), merged)


def parsed(*elements: Element, **keywords: Any) -> ElementTree.Element:
    return ElementTree.fromstring(draw(*elements, **keywords))  # noqa: S314 - our own


@dataclass(frozen=True)
class Beeper(ListElement):
    template: ClassVar[str] = "vtorque_acme:domain/beeper.xml.j2"
    name: str
    tone: str
    nothing: None = None


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "site" / "vtorque_acme"
    (package / "domain").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    template = package / "domain" / "beeper.xml.j2"
    template.write_text(
        '<beeper tone="{{ e.tone }}" n="{{ number }}" at="{{ guest.name }}" '
        'accel="{{ spec.accel }}"><alias name="{{ alias }}"/></beeper>'
    )
    yield template
    sys.modules.pop("vtorque_acme", None)


def test_element_of_a_third_party_is_rendered(acme: Path) -> None:
    devices = parsed(Beeper("a", "<&'"), Beeper("b", "c")).find("devices")
    assert devices is not None
    first, second = devices.findall("beeper")
    assert first.attrib == {"tone": "<&'", "n": "0", "at": "vt-42.srv.0-n1-0", "accel": "tcg"}
    assert second.get("n") == "1"
    assert second.find("alias").get("name") == "ua-linux-guest-b"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{{ e.tune }}", "UndefinedError"),
        ("{{ nothing }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("<beeper>", "malformed XML"),
        ("</x><x>", "malformed XML"),
        ("{{ e.nothing }}", "is None"),
    ],
)
def test_broken_template_is_named(acme: Path, text: str, what: str) -> None:
    acme.write_text(text)
    with pytest.raises(HostFault, match=f"vtorque_acme:domain/beeper.xml.j2.*{what}"):
        draw(Beeper("a", "b"))


def test_missing_template_or_package_is_named(acme: Path) -> None:
    acme.unlink()
    with pytest.raises(HostFault, match=r"vtorque_acme:domain/beeper\.xml\.j2"):
        draw(Beeper("a", "b"))

    @dataclass(frozen=True)
    class Nowhere(ListElement):
        template: ClassVar[str] = "vtorque_nowhere:x.xml.j2"
        name: str

    with pytest.raises(HostFault, match="vtorque_nowhere"):
        draw(Nowhere("a"))


def test_unknown_section_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(ListElement):
        section: ClassVar[str] = "nowhere"
        template: ClassVar[str] = "vtorque_core.plan.domain:templates/metadata.xml.j2"
        name: str

    with pytest.raises(Refused, match=r"plugin linux-guest.*'nowhere'"):
        draw(Lost("a"))


@pytest.fixture
def overrides(tmp_path: Path) -> Path:
    directory = tmp_path / "templates"
    directory.mkdir(mode=0o755)
    return directory


def test_site_template_replaces_the_default(overrides: Path, acme: Path) -> None:
    (overrides / "channel.xml.j2").write_text('<channel type="{{ e.port }}"/>')
    (overrides / "vtorque_acme").mkdir(mode=0o755)
    (overrides / "vtorque_acme" / "beeper.xml.j2").write_text('<site alias="{{ alias }}"/>')
    devices = parsed(CONTROL, Beeper("a", "b"), templates=overrides).find("devices")
    assert devices is not None
    assert devices.find("channel").get("type") == "org.vtorque.control"  # type: ignore[union-attr]
    assert devices.find("site").get("alias") == "ua-linux-guest-a"  # type: ignore[union-attr]


def test_template_that_others_can_write_is_rejected(overrides: Path) -> None:
    own = overrides / "channel.xml.j2"
    own.write_text("<channel/>")
    own.chmod(0o666)
    with pytest.raises(ConfigError, match=r"channel\.xml\.j2"):
        draw(CONTROL, templates=overrides)


def test_missing_override_directory_is_accepted(tmp_path: Path) -> None:
    assert draw(CONTROL, templates=tmp_path / "none") == draw(CONTROL)


def test_overridden_templates_are_listed(overrides: Path, acme: Path) -> None:
    for name in (
        "disk.xml.j2",
        "dsik.xml.j2",
        "vtorque_acme/beeper.xml.j2",
        "vtorque_gone/x.xml.j2",
    ):
        (overrides / name).parent.mkdir(exist_ok=True)
        (overrides / name).touch()
    assert site_templates(overrides) == {
        overrides / "disk.xml.j2": "vtorque_core.plan.domain:templates/disk.xml.j2",
        overrides / "dsik.xml.j2": "",
        overrides / "vtorque_acme/beeper.xml.j2": "vtorque_acme:domain/beeper.xml.j2",
        overrides / "vtorque_gone/x.xml.j2": "",
    }
    assert site_templates(overrides / "none") == {}
