"""A double of snapteld: no Snap, only its REST API of tasks, v1 and v2. Nothing is collected.

It follows Snap's docs/REST_API_V1.md, REST_API_V2.md and TASKS.md, and where these do not specify
the behavior, its sources (mgmt/rest, core/task.go, scheduler): POST leaves a task in state Stopped,
a running task is not deleted, two tasks may have one name, ``$NAME`` in a manifest is replaced by
snapteld's environment. For errors the documentation of v2 (in mgmt/rest/v2/api.go) gives other
codes than its code: with ``documented=True`` the former are used (404, 409), otherwise the code's
500.

As a program it prints its port: ``snapteld_double.py '{"password": "secret"}'``. ``GET /double``
returns the requests that it has received.
"""

import base64
import contextlib
import json
import os
import re
import ssl
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

UNAUTHORIZED = {
    "code": 401,
    "message": "Not authorized. Please specify the same password that used to start snapteld.",
}
KEYS = {
    "name",
    "deadline",
    "workflow",
    "schedule",
    "start",
    "max-failures",
    "version",
    "max-collect-duration",
    "max-metrics-buffer",
}
TYPES = {
    "list": ("scheduled_task_list_returned", "Scheduled tasks retrieved"),
    "get": ("scheduled_task_returned", "Scheduled task ({id}) returned"),
    "create": ("scheduled_task_created", "Scheduled task created ({id})"),
    "start": ("scheduled_task_started", "Scheduled task ({id}) started"),
    "stop": ("scheduled_task_stopped", "Scheduled task ({id}) stopped"),
    "enable": ("scheduled_task_enabled", "Scheduled task ({id}) enabled"),
    "delete": ("scheduled_task_removed", "Scheduled task ({id}) removed"),
}


class Failed(Exception):
    """An error of the scheduler. ``code``: the documented one."""

    def __init__(self, message, code=500):
        super().__init__(message)
        self.code = code


@dataclass
class SnapteldOptions:
    """The behavior of the double.

    ``slow``: seconds from a task's creation to the answer; ``stopping``: seconds that a task takes
    to stop; ``broken``: a task that is started is disabled; ``tls``: files of certificate and key.
    """

    password: str = ""
    documented: bool = False
    slow: float = 0.0
    stopping: float = 0.0
    broken: bool = False
    tls: tuple[str, ...] = ()
    port: int = 0


@dataclass
class SnapteldRequests:
    """The requests received. ``twice``: names that two tasks had at the same time."""

    requests: list = field(default_factory=list)
    manifests: list = field(default_factory=list)
    twice: list = field(default_factory=list)


class Scheduler:
    """The tasks."""

    def __init__(self, options):
        self.options, self.seen = options, SnapteldRequests()
        self.table = {}
        self.lock = threading.RLock()

    def get(self, task_id):
        if task_id not in self.table:
            raise Failed(f"Task not found: ID({task_id})", 404)
        task = self.table[task_id]
        if task["task_state"] == "Stopping" and time.monotonic() >= task["stopped"]:
            task["task_state"] = "Stopped"
        return task

    def create(self, body):
        task = json.loads(re.sub(r"\$(\w+)|\$.", lambda m: os.environ.get(m[1] or "", ""), body))
        for key in task:
            if key not in KEYS:
                raise Failed(f"Unrecognized key '{key}' in task creation request")
        for key in ("schedule", "workflow"):
            if not task.get(key):
                raise Failed(f"Task must include a {key}, and the {key} must not be empty")
        self.seen.manifests.append(task)
        task_id = str(uuid.uuid4())
        name = task.get("name") or f"Task-{task_id}"
        if any(other["name"] == name for other in self.table.values()):
            self.seen.twice.append(name)
        self.table[task_id] = {
            "id": task_id,
            "name": name,
            "deadline": "5s",
            "workflow": task["workflow"],
            "schedule": {"type": "windowed", "interval": task["schedule"].get("interval", "1s")},
            "creation_timestamp": int(time.time()),
            "last_run_timestamp": -1,
            "task_state": "Stopped",
            "stopped": 0.0,
        }
        if task.get("start"):
            self.start(task_id)
        return self.table[task_id]

    def start(self, task_id):
        task = self.get(task_id)
        if self.options.broken:
            task["task_state"] = "Disabled"
        if task["task_state"] == "Disabled":
            raise Failed("Task is disabled. Cannot be started.", 409)
        if task["task_state"] == "Running":
            raise Failed("Task is already running.")
        task["task_state"] = "Running"

    def stop(self, task_id):
        task = self.get(task_id)
        if task["task_state"] == "Running":
            task |= {
                "task_state": "Stopping",
                "stopped": time.monotonic() + self.options.stopping,
            }
        elif task["task_state"] != "Stopping":
            state = task["task_state"].lower()
            raise Failed(f"Task is {state}. Only running tasks can be stopped.")

    def enable(self, task_id):
        task = self.get(task_id)
        if task["task_state"] != "Disabled":
            raise Failed("Task must be disabled")
        task["task_state"] = "Stopped"

    def delete(self, task_id):
        if self.get(task_id)["task_state"] not in ("Stopped", "Disabled", "Ended"):
            raise Failed("Task must be stopped", 409)
        del self.table[task_id]


class SnapteldHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        """Log nothing."""

    def do_GET(self):
        self.handle_one()

    do_POST = do_PUT = do_DELETE = do_GET

    def handle_one(self):
        self.send(*self.answer())

    def answer(self):  # noqa: PLR0911 - the answers that there are
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        scheduler = self.server.scheduler
        if self.path == "/double":
            with scheduler.lock:
                seen = {**asdict(scheduler.seen), "tasks": list(scheduler.table.values())}
            return 200, seen
        scheduler.seen.requests.append(f"{self.command} {self.path}")
        if scheduler.options.password and not self.allowed(scheduler.options.password):
            return 401, UNAUTHORIZED
        found = re.fullmatch(r"/(v[12])/tasks(?:/([^/?]+))?(?:/(\w+)|\?action=(\w+))?", self.path)
        if not found:
            return 404, None
        version, task_id, v1_word, v2_word = found.groups()
        word = {("GET", False): "list", ("GET", True): "get", ("POST", False): "create"}.get(
            (self.command, task_id is not None), "delete" if self.command == "DELETE" else None
        )
        if self.command == "PUT":
            word = v1_word if version == "v1" else v2_word
        if word not in TYPES:
            return 400, {"message": "wrong action requested", "fields": {}}
        try:
            with scheduler.lock:
                value = self.act(scheduler, word, task_id, body)
        except (Failed, ValueError) as error:
            return self.fail(version, word, error)
        if word == "create":
            time.sleep(scheduler.options.slow)
        code = {"create": 201}.get(word, 200)
        if version == "v1":
            kind, message = TYPES[word]
            task_id = task_id or (value or {}).get("id")
            meta = {"code": code, "message": message.format(id=task_id), "type": kind, "version": 1}
            value = {"ScheduledTasks": value["tasks"]} if word == "list" else value
            return code, {"meta": meta, "body": value or {"id": task_id}}
        return (204 if value is None else code), value

    def act(self, scheduler, word, task_id, body):
        if word == "list":
            return {"tasks": [self.shown(scheduler.get(key), False) for key in scheduler.table]}
        if word == "create":
            return self.shown(scheduler.create(body), True)
        if word == "get":
            return self.shown(scheduler.get(task_id), True)
        return getattr(scheduler, word)(task_id)

    def shown(self, task, whole):
        scheme = "https" if self.server.scheduler.options.tls else "http"
        href = f"{scheme}://{self.headers['Host']}{self.path[:3]}/tasks/{task['id']}"
        hidden = {"stopped"} if whole else {"stopped", "workflow", "schedule"}
        return {k: v for k, v in task.items() if k not in hidden} | {"href": href}

    def fail(self, version, word, error):
        code = getattr(error, "code", 500)
        built = word == "get" or (version == "v1" and (code == 404 or word == "start"))
        if not (self.server.scheduler.options.documented or built):
            code = 500
        value = {"message": str(error), "fields": {}}
        if version == "v1":
            meta = {"code": code, "message": str(error), "type": "error", "version": 1}
            value = {"meta": meta, "body": value}
        return code, value

    def allowed(self, password):
        kind, _, word = self.headers.get("Authorization", "").partition(" ")
        with contextlib.suppress(ValueError):
            return kind == "Basic" and base64.b64decode(word).decode().partition(":")[2] == password
        return False

    def send(self, code, value):
        data = b"" if value is None else json.dumps(value, indent=2).encode()
        self.send_response(code)
        if code != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class SnapteldServer(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True

    def __init__(self, options):
        self.scheduler = Scheduler(options)
        super().__init__(("127.0.0.1", options.port), SnapteldHandler)
        if options.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*options.tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request, address):
        """Log nothing: a client has disconnected, or rejects the certificate."""


@contextlib.contextmanager
def serving(**options):
    """Run it in a thread; yield the server. ``server.server_port`` is its port."""
    server = SnapteldServer(SnapteldOptions(**options))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    with SnapteldServer(SnapteldOptions(**json.loads(sys.argv[1]))) as program:
        sys.stdout.write(f"{program.server_port}\n")
        sys.stdout.flush()
        program.serve_forever()
