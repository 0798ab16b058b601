"""Run this machine's Prometheus and InfluxDB on free ports, for one test."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: vtorque
  honor_labels: true
  authorization: {{credentials_file: {token}}}
  static_configs: [{{targets: ["{target}"]}}]
"""
INFLUXDB = """
reporting-disabled = true
bind-address = "127.0.0.1:{rpc}"
[meta]
  dir = "{top}/meta"
[data]
  dir = "{top}/data"
  wal-dir = "{top}/wal"
[http]
  bind-address = "127.0.0.1:{port}"
  log-enabled = false
[monitor]
  store-enabled = false
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get(url, data=None):
    """Return the JSON answer to a GET, or with ``data`` to a POST; None without an answer."""
    try:
        with urllib.request.urlopen(url, data, timeout=10) as answer:  # noqa: S310 - our own
            return json.loads(answer.read() or b"{}")
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def daemon(argv, log, ready):
    """Run a daemon until the block ends; ``ready()`` returns whether it serves."""
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 600
        while not ready() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        assert ready(), log.read_text()
        yield
    finally:
        process.kill()
        process.wait(180)


class Prometheus:
    """A Prometheus that scrapes one endpoint every second."""

    def __init__(self, top: Path, target: str, token: Path):
        self.url = f"http://127.0.0.1:{free_port()}"
        top.mkdir()
        self.config = top / "prometheus.yml"
        self.config.write_text(PROMETHEUS.format(target=target, token=token))
        self.argv = [
            "prometheus", f"--config.file={self.config}", f"--storage.tsdb.path={top}/data",
            f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn",
        ]  # fmt: skip
        self.log = top / "log"

    def run(self):
        return daemon(self.argv, self.log, lambda: get(f"{self.url}/api/v1/targets") is not None)

    def query(self, text):
        """Return the result of an instant query: (labels, value) of each series."""
        query = urllib.parse.urlencode({"query": text})
        answer = get(f"{self.url}/api/v1/query?{query}") or {"data": {"result": []}}
        return [(r["metric"], float(r["value"][1])) for r in answer["data"]["result"]]

    def value(self, text):
        """Return the value of the only series, None if there is none."""
        found = self.query(text)
        assert len(found) <= 1, found
        return found[0][1] if found else None


class InfluxDB:
    """An InfluxDB with one empty database."""

    def __init__(self, top: Path, database: str):
        self.port, self.database = free_port(), database
        self.url = f"http://127.0.0.1:{self.port}"
        top.mkdir()
        self.config = top / "influxdb.conf"
        self.config.write_text(INFLUXDB.format(top=top, port=self.port, rpc=free_port()))
        self.log = top / "log"

    @contextlib.contextmanager
    def run(self):
        argv = ["influxd", "run", "-config", str(self.config)]
        with daemon(argv, self.log, lambda: self.ask("SHOW DATABASES") is not None):
            self.ask(f"CREATE DATABASE {self.database}")
            yield

    def ask(self, text):
        data = urllib.parse.urlencode({"q": text, "db": self.database}).encode()
        return get(f"{self.url}/query", data)

    def last(self, name, **labels):
        """Return the newest value of a measurement and its tags, None if there is none."""
        where = " AND ".join(f"{k} = '{v}'" for k, v in labels.items())
        answer = self.ask(f'SELECT last(value) FROM "{name}" WHERE {where} GROUP BY *')  # noqa: S608
        series = (answer or {}).get("results", [{}])[0].get("series")
        return (series[0]["values"][0][1], series[0]["tags"]) if series else None
