"""Exporters: access, format, and faults of one exporter."""

import base64
import contextlib
import grp
import http.client
import http.server
import logging
import os
import socket
import ssl
import stat
import subprocess
import threading
import time

import pytest

import sparing
from vtorque_core.api import ConfigError, HostFault
from vtorque_telemetry import prometheus, textfile
from vtorque_telemetry.api import Sample
from vtorque_telemetry.exposition import text
from vtorque_telemetry.influx import Influx, lines
from vtorque_telemetry.outlets import ExporterThread, close_all
from vtorque_telemetry.prometheus import Endpoint
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.textfile import Textfile

pytestmark = pytest.mark.e2e

SAMPLES = [
    Sample("a_total", 1.5, {"job": "1", "x": 'q"\\ ,='}, "counter", 1000.25, "all a"),
    Sample("b", 2, {"job": "1"}, "gauge", 1000.25, "b"),
    Sample("a_total", 0.1, {"job": "2", "x": ""}, "counter", 1000.25, "all a"),
]
TEXT = b"""# HELP a_total all a
# TYPE a_total counter
a_total{job="1",x="q\\"\\\\ ,="} 1.5
a_total{job="2",x=""} 0.1
# HELP b b
# TYPE b gauge
b{job="1"} 2
"""


def secret(tmp_path, word, mode=0o600):
    path = tmp_path / f"secret-{len([*tmp_path.iterdir()])}"
    path.write_text(word + "\n")
    path.chmod(mode)
    return str(path)


def soon():
    return time.monotonic() + 10


def eventually(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_samples_are_written_in_the_prometheus_text_format():
    assert text(SAMPLES) == TEXT
    assert text([]) == b""


def test_samples_are_written_in_the_influxdb_line_protocol():
    assert lines(SAMPLES).decode().splitlines() == [
        'a_total,job=1,x=q"/\\ \\,\\= value=1.5 1000250',
        "b,job=1 value=2.0 1000250",
        "a_total,job=2 value=0.1 1000250",
    ]


# -- Prometheus' endpoint --------------------------------------------------------------------------


@pytest.fixture
def endpoint():
    """Return a function that opens an endpoint on a free port; it is closed afterwards."""
    opened = []

    def start(**settings):
        sink = Endpoint(Settings(listen="127.0.0.1:0", **settings))
        opened.append(sink)
        sink.write(SAMPLES, soon())
        return sink

    yield start
    for sink in opened:
        sink.close()


def scrape(sink, word=None, path="/metrics", context=None):
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    more = {"context": context} if context else {}
    connection = kind("127.0.0.1", sink.port, timeout=10, **more)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": word} if word else {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def basic(word):
    return "Basic " + base64.b64encode(word.encode()).decode()


def test_metrics_endpoint_requires_authentication(endpoint, tmp_path):
    with pytest.raises(HostFault, match="set token, basic_auth or client_ca"):
        endpoint()
    assert scrape(endpoint(allow_anonymous=True)) == (200, TEXT)
    both = endpoint(token=secret(tmp_path, "s3cret"), basic_auth=secret(tmp_path, "prom:pass:word"))
    assert scrape(both, "Bearer s3cret") == (200, TEXT)
    assert scrape(both, basic("prom:pass:word")) == (200, TEXT)
    for word in (None, "Bearer", "Bearer s3cre", "Bearer s3cret2", basic("prom:pass"), "s3cret"):
        assert scrape(both, word)[0] == 401
    assert scrape(both, "Bearer s3cret", "/other")[0] == 404


def test_secrets_that_others_can_read_are_refused(endpoint, tmp_path):
    with pytest.raises(ConfigError, match="chmod 600"):
        endpoint(token=secret(tmp_path, "s3cret", 0o644))
    with pytest.raises(ConfigError):
        endpoint(token=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="one line"):
        endpoint(token=secret(tmp_path, ""))


def openssl(*argv, cwd):
    subprocess.run(["openssl", *argv], cwd=cwd, check=True, capture_output=True, timeout=180)


def test_tls_and_client_certificates(endpoint, tmp_path):
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("server", "client", "other"):
        words = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl(*new, *words, "-keyout", f"{name}.key", "-out", f"{name}.pem", cwd=tmp_path)
    at = {path.name: str(path) for path in tmp_path.iterdir()}
    sink = endpoint(certificate=at["server.pem"], key=at["server.key"], client_ca=at["client.pem"])

    def context(client=None):
        known = ssl.create_default_context(cafile=at["server.pem"])
        if client:
            known.load_cert_chain(at[f"{client}.pem"], at[f"{client}.key"])
        return known

    assert scrape(sink, context=context("client")) == (200, TEXT)
    for client in (None, "other"):
        with pytest.raises((OSError, ssl.SSLError, http.client.HTTPException)):
            scrape(sink, context=context(client))
    with pytest.raises((OSError, http.client.HTTPException)):  # no TLS at all
        scrape(sink)
    with pytest.raises(HostFault, match="certificate"):
        endpoint(certificate=at["client.pem"], key=at["server.key"], allow_anonymous=True)


def test_silent_clients_are_limited_and_closed(endpoint, monkeypatch):
    monkeypatch.setattr(prometheus, "_TIMEOUT", 0.5)
    monkeypatch.setattr(prometheus._ScrapeHandler, "timeout", 0.5)
    sink = endpoint(allow_anonymous=True)
    silent = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(20)]

    def reads():
        try:
            return scrape(sink)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    eventually(reads)
    assert threading.active_count() < 20
    for each in silent:
        each.close()


def test_client_with_an_endless_request_is_closed(endpoint, monkeypatch):
    monkeypatch.setattr(prometheus, "_WHOLE", 0.5)
    sink = endpoint(allow_anonymous=True)
    with socket.create_connection(("127.0.0.1", sink.port)) as slow:
        slow.settimeout(0.1)
        end = time.monotonic() + 30
        over = False
        while not over and time.monotonic() < end:
            try:
                slow.sendall(b"X")  # each arrives in time; the request never ends
                over = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                over = True
    assert over


def test_series_of_an_ended_job_are_removed(endpoint):
    sink = endpoint(allow_anonymous=True)
    sink.end({"1"})
    assert scrape(sink)[1] == text(SAMPLES[2:])
    sink.write([], soon())
    assert scrape(sink) == (200, b"")


def test_address_in_use_is_reported(endpoint):
    taken = endpoint(allow_anonymous=True).port
    with pytest.raises(HostFault, match=f"127.0.0.1:{taken}: Address already in use"):
        Endpoint(Settings(listen=f"127.0.0.1:{taken}", allow_anonymous=True))


def test_no_client_is_answered_before_the_first_samples():
    """Until then the process runs as root."""
    sink = Endpoint(Settings(listen="127.0.0.1:0", allow_anonymous=True))
    with socket.create_connection(("127.0.0.1", sink.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        sink.write(SAMPLES, soon())
        client.settimeout(180)
        assert client.recv(12) == b"HTTP/1.0 200"
    sink.close()
    Endpoint(Settings(listen="127.0.0.1:0", allow_anonymous=True)).close()


# -- textfile --------------------------------------------------------------------------------------


@pytest.fixture
def trust_directories(monkeypatch):
    """Accept pytest's directories as root's."""
    monkeypatch.setattr(textfile, "require_root_owned", lambda _path: None)


def test_textfile_is_replaced_atomically_and_removed(tmp_path, trust_directories):
    path = tmp_path / "textfiles/vtorque.prom"
    if os.geteuid() != 0:
        path.parent.mkdir()
    sink = Textfile(Settings(textfile=str(path)))
    sink.write(SAMPLES, soon())
    first = path.stat()
    assert (path.read_bytes(), stat.S_IMODE(first.st_mode)) == (TEXT, 0o640)
    sink.write(SAMPLES[:1], soon())
    assert path.stat().st_ino != first.st_ino
    (path.parent / ".vtorque.prom.new").write_text("left by a kill")
    sink.write(SAMPLES, soon())
    assert [*path.parent.iterdir()] == [path]
    sink.close()
    assert [*path.parent.iterdir()] == []
    sink.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_textfile_directory_is_created_for_its_user_and_group(tmp_path, trust_directories):
    path = tmp_path / "own/x.prom"
    for _ in range(2):
        Textfile(Settings(textfile=str(path), textfile_group="daemon"))
        made = path.parent.stat()
        group = grp.getgrnam("daemon").gr_gid
        assert (made.st_uid, made.st_gid) == (Settings().uid, group)
        assert stat.S_IMODE(made.st_mode) == 0o2755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_textfile_directory_owned_or_replaceable_by_others_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        Textfile(Settings(textfile=str(tmp_path / "new/x.prom")))
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(textfile, "require_root_owned", lambda _path: None)
    message = r"belongs to uid 0, but must belong to uid \d+ \(\[plugin.telemetry\] uid\)"
    with pytest.raises(ConfigError, match=message):
        Textfile(Settings(textfile=str(tmp_path / "x.prom")))
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(OSError, match="Not a directory"):
        Textfile(Settings(textfile=str(tmp_path / "link/x.prom")))


# -- InfluxDB --------------------------------------------------------------------------------------


class Double:
    """An HTTP server in place of InfluxDB; ``status`` and ``body`` are its answer."""

    def __init__(self, status=204, body=b"", hang=0.0):
        self.got, double = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                data = self.rfile.read(int(self.headers["Content-Length"]))
                double.got.append((self.path, self.headers.get("Authorization"), data))
                time.sleep(hang)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def influx():
    made = []

    def make(**answer):
        made.append(Double(**answer))
        return made[-1]

    yield make
    for double in made:
        double.close()


def test_influxdb_gets_lines_with_authentication(influx, tmp_path):
    double = influx()
    words = {
        "influx_token": secret(tmp_path, "tok"),
        "influx_url": f"{double.url}/api/v2/write?org=o&bucket=b",
    }
    sink = Influx(Settings(**words))
    sink.write(SAMPLES, soon())
    sink.write(SAMPLES, soon())
    sink.write([], soon())
    sink.close()
    assert double.got == 2 * [
        ("/api/v2/write?org=o&bucket=b&precision=ms", "Token tok", lines(SAMPLES))
    ]
    old = Influx(
        Settings(influx_url=f"{double.url}/write?db=v", influx_basic_auth=secret(tmp_path, "u:p"))
    )
    old.write(SAMPLES, soon())
    old.close()
    assert double.got[2][:2] == ("/write?db=v&precision=ms", basic("u:p"))


@pytest.mark.parametrize("status", sparing.each(4, [401, 400, 500, 302]))
def test_error_is_reported_and_the_next_write_is_tried(influx, status):
    double = influx(status=status, body=b'{"error":"no \x1b[31m"}' + b"x" * 5000)
    sink = Influx(Settings(influx_url=f"{double.url}/write?db=v"))
    for _ in range(2):
        with pytest.raises(HostFault, match=f"answers {status}: .*no  \\[31m"):
            sink.write(SAMPLES, soon())
    sink.close()


def test_hanging_refusing_or_invalid_server_is_an_error(influx):
    double = influx(hang=5.0)
    sink = Influx(Settings(influx_url=f"{double.url}/write?db=v"))
    with pytest.raises(OSError, match="timed out"):
        sink.write(SAMPLES, time.monotonic() + 0.2)
    sink.close()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def garbage():
        client, _ = listener.accept()
        client.sendall(b"\xff" * 1000 + b"\r\n\r\n")
        client.close()

    thread = threading.Thread(target=garbage)
    thread.start()
    sink = Influx(Settings(influx_url=f"http://127.0.0.1:{port}/write"))
    with pytest.raises((OSError, http.client.HTTPException)):
        sink.write(SAMPLES, soon())
    thread.join(180)
    listener.close()
    with pytest.raises(OSError, match="refused"):
        sink.write(SAMPLES, soon())


# -- Threads ---------------------------------------------------------------------------------------


class BadExporter:
    """A sink of another author that does ``work``."""

    def __init__(self, work):
        self.work, self.ended, self.closed = work, set(), False

    def write(self, samples, deadline):
        self.work(samples)

    def end(self, jobs):
        self.ended |= jobs

    def close(self):
        self.closed = True


def test_hanging_sink_delays_no_other_sink_and_is_reported_once(caplog):
    go, got = threading.Event(), []
    slow = ExporterThread("slow", BadExporter(lambda _: go.wait(1000)), 0.05)
    good = ExporterThread("good", BadExporter(got.append), 0.05)
    slow.give(SAMPLES, ())
    time.sleep(0.2)
    for _ in range(100):
        for outlet in (slow, good):
            outlet.give(SAMPLES, ())
    assert slow._thread.is_alive() and not go.is_set()
    eventually(lambda: got)
    assert [r.message for r in caplog.records] == [
        "exporter slow: no answer for 0.05 s; samples are being lost"
    ]
    assert slow.lost >= 99 * len(SAMPLES)
    close_all([slow, good])
    assert slow._thread.is_alive(), "close_all() waited for a hanging exporter"
    go.set()
    slow._thread.join(180)


def test_failing_sink_is_reported_once_until_it_works(caplog):
    caplog.set_level(logging.INFO)
    refused = OSError("connection refused")
    troubles = {1: refused, 2: refused, 3: refused, 5: ValueError("bad")}
    taken = []

    def work(samples):
        taken.append(samples)
        if len(taken) in troubles:
            raise troubles[len(taken)]

    sink = BadExporter(work)
    outlet = ExporterThread("o", sink, 5)

    def give(count):
        outlet.give(SAMPLES, {"9"})
        eventually(lambda: len(taken) == count and not outlet._since)

    for count in (1, 2, 3, 4, 5):
        give(count)
    outlet.close(soon())
    assert [r.message.partition(";")[0] for r in caplog.records] == [
        "exporter o: OSError: connection refused",
        "exporter o works again",
        "exporter o: ValueError: bad",
    ]
    assert (sink.ended, sink.closed) == ({"9"}, True)


def test_contradicting_settings_are_refused():
    for bad, said in (
        ({"interval": 0.1}, r"interval=0.1 \(s\) is too short: it must be at least 0.5 s"),
        ({"write_timeout": 0}, "write_timeout"),
        ({"app_series": -1}, "app_series"),
        ({"listen": "9177"}, "listen"),
        ({"listen": "h:99999"}, "listen"),
        ({"textfile_mode": "0666"}, "textfile_mode"),
        ({"textfile_mode": "rw"}, "textfile_mode"),
        ({"influx_url": "ftp://x"}, "influx_url"),
        ({"certificate": "/x"}, "certificate and key must be set"),
        ({"client_ca": "/x"}, "needs both"),
    ):
        with pytest.raises(ValueError, match=said):
            Settings(**bad)
