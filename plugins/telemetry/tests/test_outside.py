"""The sampler's unprivileged process: files opened as root, then no privileges."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from monitoring import free_port
from patience import LONG, eventually
from thread_statuses import thread_statuses
from vtorque_telemetry import unprivileged_sampler as module
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.tick import GuestFigures, JobFigures, Tick
from vtorque_telemetry.unprivileged_sampler import UnprivilegedExporters

pytestmark = pytest.mark.e2e  # processes are started and killed

LABELS = {"job": "1.s", "user": "ada", "node": "n1"}
GUEST = GuestFigures(0, {("vtorque_x", ()): 3.0})
TICK = Tick(1000.0, {"1.s.0": JobFigures(LABELS, (("run", 999.0),), {0: GUEST})})


def config(tmp_path: Path, **settings: object) -> Path:
    path = tmp_path / "v.toml"
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    path.write_text(f"[plugin.telemetry]\n{lines}")
    return path


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def separate_process(tmp_path: Path, port: int) -> Iterator[UnprivilegedExporters]:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    found = UnprivilegedExporters(
        config(tmp_path, listen=f"127.0.0.1:{port}", token=str(token), exporters=["prometheus"])
    )
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


def test_samples_are_served_until_the_job_has_ended(
    separate_process: UnprivilegedExporters, port: int
) -> None:
    separate_process.send(TICK, {})
    eventually(lambda: 'job="1.s"' in scraped(port))
    separate_process.send(Tick(1002.0, {}), {})
    eventually(lambda: "vtorque_x{" not in scraped(port))


def test_exporter_process_has_no_privileges_and_is_ended(
    separate_process: UnprivilegedExporters, port: int
) -> None:
    separate_process.send(TICK, {})
    eventually(lambda: "vtorque_x{" in scraped(port))
    assert separate_process._life is not None
    process = separate_process._life.process
    uid = str(Settings().uid if os.geteuid() == 0 else os.geteuid())
    for has in thread_statuses(process.pid).values():
        assert (has["Uid"], has["NoNewPrivs"]) == ([uid] * 4, ["1"])
        assert {has[f"Cap{kind}"][0] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
        if os.geteuid() == 0:
            assert has["Gid"] == [uid] * 4 and has["Groups"] == []
    separate_process.close()
    assert process.wait(LONG) is not None


def test_killed_process_is_restarted_and_gets_all_files(
    separate_process: UnprivilegedExporters, port: int
) -> None:
    ours, guests = socket.socketpair()
    ours.setblocking(False)
    files = {("1.s.0", 0): ours.fileno()}
    separate_process.send(TICK, files)
    guests.sendall(b"loss 1\n")
    eventually(lambda: separate_process.send(TICK, files) or "vtorque_app_loss" in scraped(port))
    assert separate_process._life is not None
    separate_process._life.process.kill()
    separate_process._life.process.wait(LONG)
    guests.sendall(b"loss 2\n")

    def told() -> bool:
        separate_process.send(TICK, files)
        return any(
            line.startswith("vtorque_app_loss") and line.endswith(" 2.0")
            for line in scraped(port).splitlines()
        )

    eventually(told)
    ours.close()
    guests.close()


def test_waiter_is_notified_after_the_last_sample(separate_process: UnprivilegedExporters) -> None:
    source, told = os.pipe()
    separate_process.send(Tick(1000.0, TICK.jobs, last="1.s.0"), {}, told)
    os.close(told)
    with open(source, "rb") as waits:  # noqa: PTH123 - a descriptor
        assert select.select([waits], [], [], LONG)[0]
        assert waits.read() == b""


def test_stopped_process_does_not_block_root(
    separate_process: UnprivilegedExporters,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    separate_process._argv = ("/bin/sleep", "1000")
    for _ in range(200):
        separate_process.send(TICK, {})
    assert separate_process._life is not None and caplog.text == ""
    first = separate_process._life.process
    assert first.poll() is None
    monkeypatch.setattr(module, "_STUCK", 0.0)
    separate_process.send(TICK, {})
    assert first.poll() is not None
    assert "; restarting it" in caplog.text
    separate_process.send(TICK, {})
    assert separate_process._life is not None and separate_process._life.process is not first


STARTS = """
import os, sys, time
from pathlib import Path
from vtorque_telemetry.unprivileged_sampler import UnprivilegedExporters
from vtorque_telemetry.tick import Tick
outside, (waits, told) = UnprivilegedExporters(Path(sys.argv[1])), os.pipe()
outside.send(Tick(1000.0, {}), {}, told)
os.close(told)
os.read(waits, 1)
print(outside._life.process.pid, flush=True)
time.sleep(1000)
"""


def test_stopped_process_ends_with_root(tmp_path: Path) -> None:
    """A change of its uid makes the kernel forget that it ends with its parent."""
    argv = [sys.executable, "-c", STARTS, str(config(tmp_path))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        pid = int(root.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        root.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_messages_of_exporters_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = UnprivilegedExporters(
        config(tmp_path, listen="127.0.0.1:1", exporters=["prometheus", "no"])
    )

    def said() -> bool:
        outside.send(TICK, {})
        return "exporter prometheus: HostFault: everyone who can reach" in caplog.text

    eventually(said)
    assert "exporter no: no installed distribution provides 'no'" in caplog.text
    outside.close()


def test_exporter_that_does_not_open_in_time_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert module._sink("slow", Future()) is None
    assert caplog.messages == ["exporter slow: not ready within 10 s"]


SENDS = """
import os, socket, sys, time
with socket.socket(fileno=0) as root:
    try:
        socket.send_fds(root, [b"x"], [1])
    except OSError as error:
        sys.stderr.write(f"{error}\\n")
while sys.stderr.write("noise\\n"):
    pass
"""


def test_output_of_a_compromised_process_is_discarded(
    separate_process: UnprivilegedExporters, caplog: pytest.LogCaptureFixture
) -> None:
    separate_process._argv = (sys.executable, "-c", SENDS)

    def said() -> bool:
        separate_process.send(TICK, {})
        return "noise" in caplog.text

    eventually(said)
    assert "Broken pipe" in caplog.text
    separate_process.close()
    before = len(caplog.records)
    assert 0 < before < 20_000
