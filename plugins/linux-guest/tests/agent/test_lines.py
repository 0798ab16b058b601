"""The agent's line port: lines that a job appends to its file reach the host immediately."""

import socket
import stat
import time

import pytest

from local_agent import HostedAgent, run, sh
from patience import LONG
from vtorque_core.api import HostFault
from vtorque_core.api.guest_context import LinePort
from vtorque_linux_guest.boot.seed_contents import agent_conf

PATIENT = 2 * LONG  # seconds without a byte: the agent under its sanitizers, on a busy machine


class Lines:
    """The host's end of the port."""

    def __init__(self, directory):
        self.path = directory / "port"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(4)
        self.listener.settimeout(PATIENT)

    def accept(self):
        self.port = self.listener.accept()[0]
        self.port.settimeout(PATIENT)
        return self.port

    def read(self, size):
        data = b""
        while len(data) < size and (part := self.port.recv(65536)):
            data += part
        return data

    def close(self):
        self.listener.close()
        self.port.close()


@pytest.fixture
def lines(tmp_path, binary):
    """Return the host's end, the file, and a ready agent."""
    host = Lines(tmp_path)
    file = tmp_path / "metrics"
    extra = f"lines={file}\nlines_port=unix:{host.path}\n"
    with HostedAgent(binary, extra=extra) as agent:
        agent.ready()
        host.accept()
        yield host, file, agent
    host.close()


def append(file, data):
    with file.open("ab", buffering=0) as out:
        out.write(data)


def test_appended_lines_arrive_in_order(lines):
    host, file, agent = lines
    status = file.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (agent.uid, 0o600)
    append(file, b"a 1\n")
    assert host.read(4) == b"a 1\n"
    append(file, b"b 2\nhal")
    assert host.read(7) == b"b 2\nhal"
    with file.open("wb") as out:  # restarted
        out.write(b"c\n")
    assert host.read(2) == b"c\n"


def test_large_data_arrives_completely_and_slow_readers_delay_no_job(lines):
    host, file, agent = lines
    data = b"".join(b"line %d\n" % n for n in range(200_000))
    for start in range(0, len(data), 50_000):
        append(file, data[start : start + 50_000])  # the host reads nothing yet
    assert run(agent.session(), sh("echo ran"))[1] == b"ran\n"
    assert host.read(len(data)) == data


def test_host_can_disconnect_and_reconnect(lines):
    host, file, _ = lines
    append(file, b"a\n")
    assert host.read(2) == b"a\n"
    host.port.close()
    time.sleep(0.1)
    append(file, b"b\n")
    host.accept()
    append(file, b"c\n")
    assert host.read(4) == b"b\nc\n"
    host.port.sendall(b"x" * 10_000)  # no further output
    append(file, b"d\n")
    assert host.read(2) == b"d\n"


def test_metrics_file_that_cannot_be_created_fails_no_job(tmp_path, binary):
    host = Lines(tmp_path)
    extra = f"lines={tmp_path}/absent/metrics\nlines_port=unix:{host.path}\n"
    with HostedAgent(binary, extra=extra) as agent:
        agent.ready()
    host.port = host.listener
    host.close()


def test_agent_configuration_names_file_and_port(plan):
    text = agent_conf(plan(), [LinePort("/run/m", "org.acme.m")]).decode()
    assert "\nlines=/run/m\nlines_port=port:org.acme.m\n" in text
    assert "lines" not in agent_conf(plan(), []).decode()
    with pytest.raises(
        HostFault,
        match="two plugins request a LinePort, but a guest has only one: /run/m and /run/n",
    ):
        agent_conf(plan(), [LinePort("/run/m", "a"), LinePort("/run/n", "b")])
