"""A double of Keystone and Nova over HTTP for the driver's calls. No OpenStack was available."""

import contextlib
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = 4  # servers in one answer, so that a list has several


class Nova:
    def __init__(self):
        self.servers = {}
        self.down = False
        self.full = False
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    @contextlib.contextmanager
    def set(self, name):
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, False)

    def make(self, wanted):
        name = str(uuid.uuid4())
        with self.lock:
            self.servers[name] = {
                "id": name, "name": wanted["name"], "status": "ACTIVE",
                "metadata": wanted.get("metadata", {}), "created": _now(),
                "user_data": wanted.get("user_data", ""),
                "addresses": {"net": [{"addr": "10.0.0.7", "version": 4}]},
            }  # fmt: skip
        return name

    def answer(self, method, path, query, body):  # noqa: PLR0911 - one for each call
        """Return status, body and headers."""
        if path.startswith("/identity"):
            return self._identity(method)
        if self.down:
            return 503, {}, {}
        where = path.removeprefix("/compute/v2.1").rstrip("/")
        if where == "":
            about = {"id": "v2.1", "status": "CURRENT", "version": "2.90", "min_version": "2.1",
                     "links": [{"rel": "self", "href": f"{self.url}/compute/v2.1/"}]}  # fmt: skip
            return 200, {"version": about}, {}
        if where == "/limits":
            absolute = {"maxTotalInstances": 20, "totalInstancesUsed": len(self.servers)}
            return 200, {"limits": {"absolute": absolute, "rate": []}}, {}
        if where == "/servers" and method == "POST":
            if self.full:
                text = "Quota exceeded for instances: Requested 1, but already used 20 of 20"
                return 403, {"forbidden": {"message": text, "code": 403}}, {}
            return 202, {"server": {"id": self.make(body["server"])}}, {}
        if where == "/servers/detail":
            return 200, self._page(query), {}
        if where.startswith("/servers/") and method == "DELETE":
            gone = self.servers.pop(where.rpartition("/")[2], None) is None
            return (
                (404, {"itemNotFound": {"message": "not found"}}, {}) if gone else (204, None, {})
            )
        return 404, {}, {}

    def _page(self, query):
        with self.lock:
            names = sorted(self.servers)
            after = query.get("marker", "")
            found = [name for name in names if name > after]
            page = {"servers": [self.servers[name] for name in found[:PAGE]]}
        if len(found) > PAGE:
            url = f"{self.url}/compute/v2.1/servers/detail?marker={found[PAGE - 1]}"
            page["servers_links"] = [{"rel": "next", "href": url}]
        return page

    def _identity(self, method):
        if method == "POST":
            interface = {"interface": "public", "region": "r", "region_id": "r", "id": "e",
                         "url": f"{self.url}/compute/v2.1"}  # fmt: skip
            service = {"type": "compute", "name": "nova", "id": "s", "endpoints": [interface]}
            user = {"id": "u", "name": "u", "domain": {"id": "default", "name": "Default"}}
            token = {"methods": ["password"], "expires_at": "2099-01-01T00:00:00.000000Z",
                     "issued_at": _now(), "user": user, "catalog": [service],
                     "project": {"id": "p", "name": "p", "domain": user["domain"]}}  # fmt: skip
            return 201, {"token": token}, {"X-Subject-Token": "t"}
        about = {"id": "v3.14", "status": "stable",
                 "links": [{"rel": "self", "href": f"{self.url}/identity/v3/"}]}  # fmt: skip
        return 200, {"version": about}, {}

    def _handler(self):
        nova = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                from urllib.parse import parse_qsl, urlsplit

                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"null")
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query))
                status, answer, headers = nova.answer(self.command, parts.path, query, body)
                text = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": len(text)}.items():
                    self.send_header(name, str(value))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_):
                pass

        return Handler


def _now():
    import datetime

    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
