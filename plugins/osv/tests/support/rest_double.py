"""OSv's REST server with its observed behavior, including oddities."""

import json
import threading
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PROGRAMS = ("/hello", "/other")


class Osv(ThreadingHTTPServer):
    """State of the machine; ``ends`` counts down the queries until a program has finished."""

    daemon_threads = True

    def __init__(self, asks=2):
        super().__init__(("127.0.0.1", 0), OsvRestHandler)
        self.environ, self.files, self.ran, self.asks = {}, {}, [], asks
        self.left = {}
        self.off = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)


class OsvRestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def answer(self, status, value=""):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def parts(self):
        url = urlsplit(self.path)
        return url.path, {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}

    def do_GET(self):
        path, query = self.parts()
        osv = self.server
        if path == "/os/version":
            self.answer(200, "v0.57.0-398-g0e34e4dc")
        elif path == "/app/finished":
            osv.left[query["tid"]] = osv.left.get(query["tid"], 0) - 1
            self.answer(200, "1" if osv.left[query["tid"]] < 0 else "0")
        elif path.startswith("/env/") and unquote(path[5:]) in osv.environ:
            self.answer(200, osv.environ[unquote(path[5:])])
        elif path == "/env/":
            self.answer(200, [f"{name}={value}" for name, value in osv.environ.items()])
        else:
            self.answer(400 if path.startswith("/env/") else 404)

    def do_PUT(self):
        path, query = self.parts()
        command = query.get("command", "")
        if path != "/app/":
            self.answer(404)
        elif ";" in command:
            self.answer(400, {"message": "Multiple commands are not supported"})
        elif any(part.split()[0] not in PROGRAMS for part in command.split("&") if part.strip()):
            self.answer(500, {"message": "Failed to load object"})
        else:
            tids = []
            for part in command.split("&"):
                self.server.ran.append(part.strip())
                tids.append(str(26 + len(self.server.ran)))
                self.server.left[tids[-1]] = self.server.asks
            self.answer(200, " ".join(tids))

    def do_POST(self):
        path, query = self.parts()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path in ("/os/shutdown", "/os/poweroff"):
            self.server.off.set()
            self.close_connection = True  # without an answer
        elif path.startswith("/env/"):
            self.server.environ[unquote(path[5:])] = query["val"]
            self.answer(200)
        elif path.startswith("/file/"):
            self.upload(unquote(path.removeprefix("/file/")), body)
        else:
            self.answer(404)

    def upload(self, path, body):
        kind = self.headers.get("Content-Type", "")
        if not path.startswith("/tmp/"):
            threading.Event().wait(5)  # a read-only file system: it hangs
            return
        if kind.startswith("multipart/form-data"):
            message = BytesParser(policy=HTTP).parsebytes(
                f"Content-Type: {kind}\r\n\r\n".encode() + body
            )
            for part in message.iter_parts():
                if part.get_param("name", header="content-disposition") == "file":
                    self.server.files[path] = part.get_payload(decode=True)
        self.answer(200)  # also for a raw body, which is not logged
