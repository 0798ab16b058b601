"""The exporters' process: opens what needs root, then has no rights; what it says is logged."""

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monitoring import free_port
from patience import LONG, eventually
from vtorque_telemetry import exporters
from vtorque_telemetry.api import Sample
from vtorque_telemetry.outside import Outside
from vtorque_telemetry.settings import Settings

SAMPLES = [Sample("vtorque_x", 3.0, {"job": "1.s", "user": "ada"})]


def config(tmp_path: Path, **settings: object) -> Path:
    path = tmp_path / "v.toml"
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    path.write_text(f"[plugin.telemetry]\n{lines}")
    return path


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def outside(tmp_path: Path, port: int) -> Iterator[Outside]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    made = config(tmp_path, listen=f"127.0.0.1:{port}", token=str(token))
    found = Outside(made, ["prometheus"])
    yield found
    found.close()


def scraped(port: int) -> str:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer secret"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=LONG) as answer:  # noqa: S310 - our own
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def test_what_is_sent_is_served(outside: Outside, port: int) -> None:
    outside.write(SAMPLES, 0)
    eventually(lambda: 'job="1.s"' in scraped(port))
    outside.end({"1.s"})
    outside.write([], 0)
    eventually(lambda: "vtorque_x{" not in scraped(port))


def test_it_has_no_rights_and_is_ended(outside: Outside, port: int) -> None:
    outside.write(SAMPLES, 0)
    eventually(lambda: "vtorque_x{" in scraped(port))
    process = outside._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status")

    def has() -> dict[str, list[str]]:
        lines = (line.partition(":") for line in status.read_text().splitlines())
        return {name: value.split() for name, _, value in lines}

    eventually(lambda: has()["NoNewPrivs"] == ["1"])
    uid = str(Settings().uid if os.geteuid() == 0 else os.geteuid())
    eventually(lambda: has()["Uid"] == [uid] * 4)
    if os.geteuid() == 0:
        assert has()["Gid"] == [uid] * 4 and has()["Groups"] == []
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # one that has answered a request, and ended
            told = (task / "status").read_text()
            assert f"Uid:\t{uid}\t" in told and "CapEff:\t0000000000000000\n" in told
    outside.close()
    assert process.wait(LONG) is not None


def test_one_that_was_killed_is_started_again(outside: Outside, port: int) -> None:
    outside.write(SAMPLES, 0)
    assert outside._process is not None
    outside._process.kill()
    outside._process.wait(LONG)
    outside.write(SAMPLES, 0)
    eventually(lambda: "vtorque_x{" in scraped(port))


def test_what_it_says_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = Outside(config(tmp_path, listen="127.0.0.1:1"), ["prometheus"])
    outside.write(SAMPLES, time.monotonic() + LONG)
    eventually(lambda: "exporter prometheus: HostFault: everybody who reaches" in caplog.text)
    outside.close()


def test_the_text_file_is_written_by_root_alone() -> None:
    assert {name for name in ("prometheus", "textfile", "influxdb")
            if getattr(getattr(exporters, name), "as_root", False)} == {"textfile"}  # fmt: skip
