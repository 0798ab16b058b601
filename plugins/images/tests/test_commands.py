"""The commands of ``vmgr images``."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from counting import calls
from vtorque_core.api import (
    ConfigError,
    HostFault,
    JobAttempt,
    Paths,
    Refused,
    UsageError,
    VtorqueError,
)
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.strategies import ImageBuilder
from vtorque_core.api.values import hookimpl
from vtorque_core.base.locks import job_lock
from vtorque_core.live import images
from vtorque_core.live.images import FileRecord, Sidecar, describe, lookup
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_core.resources.lease import ImageUse
from vtorque_images import allowed, table
from vtorque_images import pool_commands as command
from vtorque_testing import vmgr


class Fake:
    """A builder that takes ``kernel=`` and fails according to ``fail=``."""

    def build(
        self, arguments: Mapping[str, str], staging: Path, progress: Callable[[str], None]
    ) -> BuiltImage:
        progress("faking")
        if "fail" in arguments:
            raise RuntimeError(arguments["fail"])
        (staging / "k").write_text(arguments.get("kernel", "kernel"))
        return BuiltImage("linux", "micro", "x86_64", 64, kernel="k")


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    (tmp_path / "site.toml").write_text(f"""
[images]
pool = "{path}"
cache = "{tmp_path}/cache"
keep = 0
[paths]
state = "{tmp_path}/state"
run = "{tmp_path}/run"
[options.img]
deny = ["secret-*"]
""")
    real = images.load

    class Builders:
        @hookimpl
        def vtorque_image_builders(self) -> Iterator[ImageBuilder]:
            yield ImageBuilder("fake", Fake)

    def load(config: Path, *, node: bool = True) -> Any:
        site, plugins = real(config, node=node)
        plugins.register("fake", Builders(), "vtorque-fake 1.0")
        return site, plugins

    monkeypatch.setattr(images, "load", load)
    for module in (allowed, command, images):
        monkeypatch.setattr(module, "effective_root", lambda: True)
    return path


def run(*args: str, config: Path | None = None) -> Result:
    return vmgr.run(config or Path(CONFIG["path"]), "images", *args)


CONFIG: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _config(tmp_path: Path) -> None:
    CONFIG["path"] = str(tmp_path / "site.toml")


def raised(*args: str) -> Any:
    return run(*args).exception


def test_build_list_show_verify_remove(pool: Path) -> None:
    built = run("build", "m", "fake", "-o", "kernel=one")
    assert built.exit_code == 0
    assert " s  faking" in built.stderr
    assert lookup(pool, "m").kernel is not None
    assert "micro" in run("list").stdout
    listed = json.loads(run("list", "--json").stdout)
    assert [(row["name"], row["distro"], row["min_ram_mib"]) for row in listed] == [
        ("m", "micro", 64)
    ]
    shown = json.loads(run("show", "m").stdout)
    assert (shown["builder"], shown["sha256"]) == ("fake", lookup(pool, "m").sha256)
    assert run("verify").stdout.startswith("m: ok, sha256 ")
    assert run("remove", "m").exit_code == 0
    assert list(pool.iterdir()) == []


def test_broken_image_is_listed_with_exit_status_1(pool: Path) -> None:
    run("build", "m", "fake")
    kernel = lookup(pool, "m").kernel
    assert kernel is not None
    kernel.write_text("changed")
    listed = run("list")
    assert listed.exit_code == 1
    assert "broken" in listed.stdout
    assert "broken" in json.loads(run("list", "--json").stdout)[0]
    verified = run("verify", "m")
    assert verified.exit_code == 1
    assert "k has sha256" in verified.stderr


@pytest.mark.parametrize(
    "args",
    [("build", "m", "fake"), ("remove", "m")],
)
def test_only_root_changes_the_pool(
    pool: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    run("build", "m", "fake")
    before = describe(pool, "m")
    monkeypatch.setattr(images, "effective_root", lambda: False)
    assert isinstance(raised(*args), UsageError)
    assert describe(pool, "m") == before


def test_bad_arguments_are_refused(pool: Path) -> None:
    assert isinstance(raised("build", "../m", "fake"), Refused)
    assert "fake" in str(raised("build", "m", "other"))
    for option in ("kernel", "=x", ""):
        assert isinstance(raised("build", "m", "fake", "-o", option), UsageError)
    assert "each key once" in str(raised("build", "m", "fake", "-o", "a=1", "-o", "a=2"))
    assert list(pool.iterdir()) == []


def test_failing_builder_is_named_and_leaves_nothing(pool: Path) -> None:
    error = raised("build", "m", "fake", "-o", "fail=no space")
    assert isinstance(error, HostFault)
    assert "image builder fake failed: RuntimeError: no space" in str(error)
    assert list(pool.iterdir()) == []


def disk(path: Path, letter: bytes = b"1") -> Path:
    """Make a raw disk with a partition table."""
    path.write_bytes(bytes(446) + b"\x80" + bytes(3) + b"\x83" + bytes(3) + bytes([8, 0, 0, 0]))
    with path.open("ab") as file:
        file.write(bytes([8, 0, 0, 0]) + bytes(48) + b"\x55\xaa" + letter * 100_000)
        file.truncate(1 << 20)
    return path


FACTS = ("--guest-type", "linux", "--distro", "tiny", "--arch", "x86_64")


def in_use(pool: Path, name: str) -> str:
    """Let a job of this node use the image; return its id."""
    image = lookup(pool, name)
    file = image.disk or image.kernel
    assert file is not None
    paths = Paths(pool.parent / "state", pool.parent / "run")
    header = JobHeader(JobAttempt("7.srv", 0, "u", 1), "local")
    with job_lock(paths, "7.srv"), Journal.start(paths, header) as journal:
        journal.acquire(ImageUse(str(file.parent)), plugin="core", phase="pre-boot")
    return "7.srv"


def test_add_update_label_show_remove(pool: Path, tmp_path: Path) -> None:
    file = disk(tmp_path / "tiny.img")
    added = run("add", str(file), *FACTS, "--label", "a=b", "--min-ram", "99")
    assert added.exit_code == 0, added.output
    assert "tiny is in the pool: tiny x86_64, boots from its disk" in added.stdout
    assert "note: no known operating system was found: no known file" in added.stderr
    assert "converting raw to qcow2" in added.stderr
    job = in_use(pool, "tiny")
    (row,) = json.loads(run("list", "--json").stdout)
    assert (row["used_by"], row["min_ram_mib"], row["labels"]) == ([job], 99, {"a": "b"})
    assert row["size"] >= row["on_disk"] > 0
    table = run("list").stdout.splitlines()
    assert table[0].split() == [
        *("NAME", "TYPE", "DISTRO", "ARCH", "SIZE", "AGE", "USED", "BY", "VERIFIED")
    ]
    assert table[1].split()[:4] == ["tiny", "linux", "tiny", "x86_64"]
    assert table[1].split()[6] == job
    updated = run("update", "tiny", str(disk(file, b"2")), "--json")
    assert updated.exit_code == 0, updated.output
    new = json.loads(updated.stdout)
    assert new["version"] != row["version"]
    assert (pool / "tiny" / row["version"]).is_dir(), "the version of a running job was removed"
    assert json.loads(run("show", "tiny").stdout)["used_by"] == [job]
    assert run("label", "tiny", "c=d=e", "a-").stdout == "c=d=e\n"
    assert json.loads(run("label", "tiny", "--json").stdout) == {"c": "d=e"}
    assert f"is in use by {job}" in str(raised("remove", "tiny"))
    removed = run("remove", "tiny", "--when-free")
    assert removed.stdout == f"removed tiny; its files are kept until {job} end\n"
    assert json.loads(run("list", "--json").stdout) == []


def test_list_shows_descriptions_and_is_filtered_by_labels(pool: Path) -> None:
    for name in ("a", "b"):
        run("build", name, "fake")
    assert "DESCRIPTION" not in run("list").stdout
    run("label", "a", "description=Debian with CUDA 12", "cuda=12")
    run("label", "b", "cuda=11")
    head, first, second = run("list").stdout.splitlines()
    assert head.endswith("  DESCRIPTION")
    assert first.endswith("  Debian with CUDA 12")
    assert second.endswith("  -")
    for labels, names in (
        (("cuda=12",), ["a"]),
        (("cuda=11",), ["b"]),
        (("cuda=12", "site=x"), []),
    ):
        options = [word for label in labels for word in ("--label", label)]
        assert [row["name"] for row in json.loads(run("list", "--json", *options).stdout)] == names
    assert isinstance(raised("list", "--label", "cuda"), UsageError)


def test_files_of_a_removed_image_are_kept_for_other_nodes(pool: Path, tmp_path: Path) -> None:
    config = tmp_path / "site.toml"
    config.write_text(config.read_text().replace("keep = 0", 'keep = "2d"'))
    run("build", "m", "fake")
    said = run("remove", "m").stdout
    assert said.startswith(
        "removed m; its files are kept for 2 days, because jobs of other nodes may"
    )
    assert list(pool.glob("m/v*"))
    run("build", "m", "fake", "-o", "kernel=2")
    assert json.loads(run("remove", "m", "--now", "--json").stdout)["kept"] == []
    run("build", "n", "fake")
    assert run("remove", "n", "--now").stdout == "removed n\n"
    assert not (pool / "n").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("add", "FILE", "../m", *FACTS),
        ("add", "FILE", "a\nb", *FACTS),
        ("add", "FILE", "m"),
        ("add", "FILE", "m", "--guest-type", "nonsense", *FACTS[2:]),
        ("add", "FILE", "m", *FACTS, "--label", "x"),
        ("add", "/dev/zero", "m", *FACTS),
        ("update", "m", "FILE", *FACTS),
        ("label", "m", "a"),
        ("label", "m", "a=b"),
        ("remove", "m"),
        ("default", "m"),
        ("sync", "m"),
        ("sync",),
    ],
)
def test_bad_commands_change_nothing(pool: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    file = str(disk(tmp_path / "f.img"))
    result = run(*(file if arg == "FILE" else arg for arg in args))
    assert isinstance(result.exception, VtorqueError)
    assert "\n" not in str(result.exception)
    assert list(pool.iterdir()) == []
    assert "default =" not in (tmp_path / "site.toml").read_text()


def test_users_see_only_allowed_images(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open", "secret-1"):
        run("build", name, "fake")
    assert {row["name"] for row in json.loads(run("list", "--json").stdout)} == {"open", "secret-1"}
    for module in (command, allowed):
        monkeypatch.setattr(module, "effective_root", lambda: False)
    assert {row["name"] for row in json.loads(run("list", "--json").stdout)} == {"open"}
    assert "secret" not in run("list").stdout
    assert run("show", "open").exit_code == 0
    for args in (("show", "secret-1"), ("label", "secret-1"), ("verify", "secret-1")):
        assert "img=secret-1: is not allowed" in str(raised(*args))
    assert "secret" not in run("verify").stdout


def test_default_image_is_set(pool: Path, tmp_path: Path) -> None:
    config = tmp_path / "site.toml"
    run("build", "m", "fake")
    run("build", "secret-1", "fake")
    assert run("default").stdout.startswith("none: ")
    before = config.read_text()
    assert run("default", "m").stdout == "m\n"
    assert config.read_text() == before.replace("[options.img]\n", '[options.img]\ndefault = "m"\n')
    assert json.loads(run("default", "--json").stdout) == {"default": "m"}
    assert "m*" in run("list").stdout
    run("build", "n", "fake")
    run("default", "n")
    assert config.read_text() == before.replace("[options.img]\n", '[options.img]\ndefault = "n"\n')
    kept = config.read_text()
    assert isinstance(raised("default", "secret-1"), ConfigError), (
        "a denied image became the default"
    )
    assert isinstance(raised("default", "other"), Refused)
    assert config.read_text() == kept


def test_list_is_printed_as_a_table(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("build", "m", "fake")
    (row,) = json.loads(run("list", "--json").stdout)
    table.show([row, {"name": "x", "broken": "bad [b]"}])
    head, first, last = capsys.readouterr().out.splitlines()
    assert head.startswith("NAME") and first.startswith("m ")
    assert last == "x  broken: bad [b]"


# -- Speed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_cost_of_one_more_image_in_a_list_is_bounded(tmp_path: Path, form: tuple[str, ...]) -> None:
    """The CPU time of the command with 2,000 images is in bench/run.py."""
    called = []
    for count in (10, 110):
        pool = tmp_path / str(count)
        many_images(pool, count)
        config = tmp_path / "site.toml"
        config.write_text(f'[images]\npool = "{pool}"\n[paths]\nstate = "{tmp_path}/state"\n')
        run = functools.partial(vmgr.run, config, "images", "list", *form)
        assert run().output.count("tiny") >= count
        called.append(calls(run))
    assert called[1] - called[0] < 100 * 1000, called


def test_list_neither_hashes_files_nor_starts_processes(pool: Path, tmp_path: Path) -> None:
    many_images(tmp_path / "many", 3)
    code = (
        "import hashlib, sys; from pathlib import Path; from vtorque_core.images import pool\n"
        "seen = []; sys.addaudithook(lambda e, a: seen.append((e, str(a))))\n"
        f"found = pool.listing(Path({str(tmp_path / 'many')!r}))\n"
        "assert len(found) == 3\n"
        "started = ('subprocess', 'os.posix_spawn', 'os.fork')\n"
        "assert not [e for e, _ in seen if e.startswith(started)]\n"
        "opened = [a for e, a in seen if e == 'open']\n"
        "assert len(opened) == 3 and all('image.json' in a for a in opened), opened\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def many_images(pool: Path, count: int) -> None:
    """Fill a pool with images of three files each."""
    pool.mkdir(mode=0o755, parents=True)
    files = {"disk": "disk.qcow2", "kernel": "vmlinuz", "initrd": "initrd"}
    built = BuiltImage("linux", "tiny", "x86_64", 256, labels={"init": "cloud-init"}, **files)  # type: ignore[arg-type]
    for number in range(count):
        name, version = f"image-{number:04}", "v0"
        home = pool / name / version
        home.mkdir(mode=0o755, parents=True)
        records = {}
        for file in files.values():
            (home / file).write_bytes(b"x")
            (home / file).chmod(0o644)
            records[file] = FileRecord.from_status("0" * 64, (home / file).lstat())
        now = "2025-01-01T00:00:00+00:00"
        sidecar = Sidecar(name, built, version, "test", now, records)
        (pool / name / "image.json").write_text(json.dumps(sidecar.as_json(), indent=2))
