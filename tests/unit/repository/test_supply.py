"""Packages of an installation: each is pinned, listed, and checked by the audit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[3]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
DEBIAN_PYTHONS = ("3.11.2", "3.13.5")  # /usr/bin/python3 of Debian 12 and 13
WITH_PYTHON = {"pip"}
ASKED_BY_BACKEND = {"editables", "setuptools"}  # of hatchling; to compile libvirt-python


def projects() -> list[dict[str, Any]]:
    paths = [REPO / "pyproject.toml", *REPO.glob("plugins/*/pyproject.toml")]
    return [tomllib.loads(path.read_text(encoding="utf-8")) for path in paths]


def pins() -> dict[str, str]:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> list[Requirement]:
    """Return the projects' dependencies: to run, to build, and of all extras."""
    found: list[str] = []
    for project in projects():
        found += project["project"]["dependencies"] + project["build-system"]["requires"]
        for extra in project["project"].get("optional-dependencies", {}).values():
            found += extra
    return [Requirement(text) for text in found]


def test_install_line_of_a_plugin_names_all_required_own_distributions() -> None:
    lacking, lines = [], 0
    for path in sorted(REPO.glob("plugins/*/pyproject.toml")):
        wanted = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
        ours = {Requirement(text).name.removeprefix("vtorque-") for text in wanted}
        ours &= {each.name for each in REPO.glob("plugins/*")}
        page = path.with_name("README.md")
        for line in re.findall(r"^pip install \. .*", page.read_text(encoding="utf-8"), re.M):
            lines += 1
            missing = {*ours, path.parent.name} - {*re.findall(r"plugins/([a-z-]+)", line)}
            lacking += [f"{page}: ./plugins/{name} is not in: {line}" for name in missing]
    assert not lacking
    assert lines > 15


def needed() -> set[str]:
    """Return the names of all dependencies of the declared ones, on any supported Python."""
    ours = {canonicalize_name(project["project"]["name"]) for project in projects()}
    seen: set[tuple[str, str]] = set()
    pending = [(each, "") for each in declared()]
    while pending:
        wanted, extra = pending.pop()
        name = canonicalize_name(wanted.name)
        if name in ours | WITH_PYTHON or not applies(wanted, extra):
            continue
        for key in {"", *wanted.extras}:
            if (name, key) not in seen:
                seen.add((name, key))
                texts = metadata.distribution(name).requires or []
                pending += [(Requirement(text), key) for text in texts]
    return {name for name, _ in seen}


def applies(wanted: Requirement, extra: str) -> bool:
    if wanted.marker is None:
        return True
    about = [
        {"extra": extra, "python_version": v, "python_full_version": f"{v}.0"} for v in PYTHONS
    ]
    return any(wanted.marker.evaluate({**each, "sys_platform": "linux"}) for each in about)


def test_pins_are_exactly_the_required_packages():
    assert set(pins()) == needed() | ASKED_BY_BACKEND


def test_installed_versions_match_the_pins():
    other = {}
    for name, version in pins().items():
        if name != "setuptools" and (found := metadata.version(name)) != version:
            other[name] = found
    assert other == {}


def test_pins_admit_python_of_debian_12_and_13():
    rejected = {}
    for name in pins():
        supported = metadata.metadata(name).get("Requires-Python", "")
        if not all(SpecifierSet(supported).contains(each) for each in DEBIAN_PYTHONS):
            rejected[name] = supported
    assert rejected == {}


def test_pins_are_names_and_versions_only():
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines[1:] if not re.fullmatch(r"[\w.-]+==[\w.!+]+", line)]
    assert wrong == []
    assert lines[1:] == sorted(set(lines[1:]), key=str.lower)


@pytest.mark.parametrize("script", ["node", "test"])
def test_build_tools_are_pinned_too(script):
    """``pip -c`` does not reach the environment in which pip builds a wheel; this variable does."""
    text = (REPO / "scripts" / script).read_text(encoding="utf-8")
    before, _, _ = text.partition('"$build"/*.whl' if script == "node" else "bin/pip install")
    assert re.search(r"^ *export PIP_CONSTRAINT=.*constraints\.txt", before, re.MULTILINE)


# -- The list of installed packages ----------------------------------------------------------------


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a minimal installation: pip's records of some packages."""
    top = tmp_path_factory.mktemp("prefix")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", top], check=True)
    (target,) = top.glob("lib/python3*/site-packages")
    for name in ("vtorque-core", "vtorque-slurm", "click", "jinja2", "pluggy"):
        found = metadata.distribution(name)
        about = target / f"{name.replace('-', '_')}-{found.version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(found.read_text("METADATA") or "")
        if name.startswith("vtorque-"):
            url = {"url": f"file:///tmp/x/{name}.whl", "archive_info": {}}
            (about / "direct_url.json").write_text(json.dumps(url))
    return top / "bin/python3"


def sbom(python: Path, *argv: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, REPO / "scripts/sbom", python, *argv]
    return subprocess.run(
        command, capture_output=True, timeout=120, env=env, text=True, check=False
    )


@pytest.mark.full
def test_sbom_lists_the_installation(installation, tmp_path):
    """The script itself validates what it writes against CycloneDX's schema, or fails."""
    done = sbom(installation, "-o", str(tmp_path / "bom.json"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "bom.json").read_text(encoding="utf-8")
    bom = json.loads(text)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["name"] == "vtorque"
    parts = {part["purl"]: part for part in bom["components"] if "purl" in part}
    assert f"pkg:pypi/pluggy@{pins()['pluggy']}" in parts
    assert any(purl.startswith("pkg:deb/debian/qemu-utils@") for purl in parts)
    below = {each["ref"]: each.get("dependsOn", []) for each in bom["dependencies"]}
    ours = [part["bom-ref"] for part in bom["components"] if part["name"].startswith("vtorque-")]
    assert below["vtorque"] == sorted(ours)
    assert len(ours) == 2
    # Nothing that differs between two equal installations, or depends on the machine.
    assert "timestamp" not in bom["metadata"]
    assert "serialNumber" not in bom
    assert "file:" not in text
    assert str(installation.parent) not in text


@pytest.mark.full
def test_sbom_of_an_environment_without_vtorque_fails(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    done = sbom(tmp_path / "bin/python3")
    assert done.returncode == 1
    assert "has no vtorque-core" in done.stderr


@pytest.mark.full
def test_sbom_of_the_same_installation_is_reproducible():
    """The largest report: of all that tests have installed."""
    one, two = (sbom(Path(sys.executable), seed=seed) for seed in "12")
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout


# -- Hashes of installed packages ------------------------------------------------------------------


WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(directory: Path, name: str, content: str) -> Path:
    """Make a wheel of one module: PyPA, binary distribution format."""
    about = f"{name}-1.0.dist-info"
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", content)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", WHEEL)
        file.writestr(f"{about}/RECORD", "")
    return path


def lock(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPO / "scripts/lock", directory]
    return subprocess.run(command, capture_output=True, timeout=180, text=True, check=False)


@pytest.mark.full
def test_changed_wheel_is_not_installed(tmp_path):
    wheel(tmp_path, "vt_supply_test", "GOOD = 1\n")
    locked = lock(tmp_path).stdout
    assert re.fullmatch(r"vt-supply-test==1\.0 --hash=sha256:[0-9a-f]{64}\n", locked)
    (tmp_path / "lock").write_text(locked)
    wheel(tmp_path, "vt_supply_test", "GOOD = 0\n")
    command = [sys.executable, "-I", "-m", "pip", "install", "-q", "--no-index", "--isolated"]
    command += ["--find-links", tmp_path, "--require-hashes", "-r", tmp_path / "lock"]
    done = subprocess.run(
        [*command, "--target", tmp_path / "to", "--no-deps"],
        capture_output=True, timeout=180, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "to").exists()


def test_invalid_sets_of_wheels_cannot_be_locked(tmp_path):
    assert lock(tmp_path).returncode == 2
    wheel(tmp_path, "twice", "")
    (tmp_path / "twice-2.0-py3-none-any.whl").touch()
    assert "there are several wheels of twice: keep one" in lock(tmp_path).stderr
    (tmp_path / "twice-2.0-py3-none-any.whl").rename(tmp_path / "odd.whl")
    assert lock(tmp_path).returncode == 2


# -- advisories --------------------------------------------------------------------------------


class Advisories(BaseHTTPRequestHandler):
    """A double of osv.dev: reports one package as vulnerable, like its API."""

    bad = ""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = asked["package"]["name"]
        events = [{"introduced": "0"}, {"fixed": "99.9"}]
        affected = {
            "package": {"name": name, "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": events}],
        }
        vulnerable = {"vulns": [{"id": "PYSEC-1", "summary": "is bad", "affected": [affected]}]}
        answer = json.dumps(vulnerable if name == self.bad else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


def audit(url: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPO / "scripts/audit", "-s", "osv", "--osv-url", url]
    return subprocess.run(
        [*command, "--cache-dir", cache],
        capture_output=True,
        timeout=120,
        env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("bad", "code"), [pytest.param("", 0, marks=pytest.mark.full), ("jinja2", 1)]
)
def test_audit_queries_every_pin(service, tmp_path, monkeypatch, bad, code):
    monkeypatch.setattr(Advisories, "bad", bad)
    done = audit(service, tmp_path)
    assert done.returncode == code, done.stderr
    count = len(pins())
    assert f"{count} of {count} packages asked for, {code} vulnerabilities" in done.stdout
    vulnerable = f"jinja2 {pins()['jinja2']}: PYSEC-1, fixed in 99.9\n"
    assert (vulnerable in done.stdout) == bool(bad)


@pytest.mark.full
def test_audit_without_an_answer_fails(tmp_path):
    done = audit("http://127.0.0.1:1/v1/query", tmp_path)
    assert done.returncode == 3
    assert "scripts/audit: nobody knows: pip-audit ended with 1" in done.stderr
