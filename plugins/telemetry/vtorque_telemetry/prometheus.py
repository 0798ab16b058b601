"""The endpoint for Prometheus: text over HTTP or HTTPS, for authorized clients.

The endpoint has the samples of all users. Therefore clients must send a token, a password or a
certificate, unless the site sets ``allow_anonymous = true``. The endpoint serves the last samples,
without those of ended jobs.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ssl
import threading
from collections.abc import Collection, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from typing import Any

from vtorque_core.api import HostFault, name_errors
from vtorque_core.api.node_job import Site
from vtorque_telemetry.api import Sample, read_secret
from vtorque_telemetry.exposition import CONTENT_TYPE, text
from vtorque_telemetry.settings import Settings

_AT_ONCE = 8  # clients at the same time; connections of more clients are closed
_TIMEOUT = 5.0  # seconds for TLS and for each read
_WHOLE = 10.0  # seconds for a request and its response


class Endpoint:
    """The Prometheus sink, see :class:`vtorque_telemetry.api.SampleSink`."""

    def __init__(self, settings: Settings) -> None:
        """Listen, as root. The server starts with the first :meth:`write`, without privileges.

        Raises:
            HostFault: authorization is not configured, the certificate is invalid, or the address
                is in use.
            ConfigError: the file with the token or the password is invalid.
        """
        if not (
            settings.token or settings.basic_auth or settings.client_ca or settings.allow_anonymous
        ):
            raise HostFault(
                "everyone who can reach the endpoint could read all users' samples: set token, "
                "basic_auth or client_ca in [plugin.telemetry], or allow_anonymous = true"
            )
        host = settings.listen.rpartition(":")[0]
        self._server = _Server((host.strip("[]"), settings.port), _words(settings), _tls(settings))
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, name="endpoint", daemon=True)

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._server.server_address[1])

    def write(self, samples: Sequence[Sample], _deadline: float) -> None:
        """Store the samples for the next scrape."""
        self._server.samples = samples
        if self._thread.ident is None:
            self._thread.start()

    def end(self, jobs: Collection[str]) -> None:
        """Remove the samples of ended jobs."""
        kept = [s for s in self._server.samples if s.labels.get("job") not in jobs]
        self._server.samples = kept

    def close(self) -> None:
        """Stop listening."""
        if self._thread.ident is not None:
            self._server.shutdown()
        self._server.server_close()


def _words(settings: Settings) -> tuple[bytes, ...]:
    """Return the accepted Authorization headers; empty if all clients are accepted."""
    words = []
    if settings.token:
        words.append(f"Bearer {read_secret(settings.token)}".encode())
    if settings.basic_auth:
        words.append(b"Basic " + base64.b64encode(read_secret(settings.basic_auth).encode()))
    return tuple(words)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.certificate:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.certificate, settings.key)
        if settings.client_ca:
            context.load_verify_locations(settings.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise HostFault(f"certificate, key or client_ca: {error}") from None
    return context


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], words: tuple[bytes, ...], tls: ssl.SSLContext | None
    ) -> None:
        self.samples: Sequence[Sample] = ()
        self.words = words
        self._tls = tls
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        with name_errors(f"listen = {address[0]}:{address[1]}"):
            super().__init__(address, _ScrapeHandler)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of the base class."""
        self.socket.setsockopt(1, 2, 1)  # SOL_SOCKET, SO_REUSEADDR: socket(7)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread, or close its connection if there are too many clients."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one client. The TLS handshake also runs in the client's thread."""
        try:
            request.settimeout(_TIMEOUT)
            connection: socket = request
            if self._tls is not None:
                connection = self._tls.wrap_socket(request, server_side=True)
            late = threading.Timer(_WHOLE, _shut_down, (connection,))
            late.daemon = True
            late.start()
            try:
                super().process_request_thread(connection, client_address)
            finally:
                late.cancel()
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients."""


def _shut_down(connection: socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(SHUT_RDWR)


class _ScrapeHandler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT
    server_version, sys_version = "vtorque", ""

    def do_GET(self) -> None:
        if not self._is_authorized():
            self._send(HTTPStatus.UNAUTHORIZED, b"who are you?\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, b"/metrics\n")
        else:
            self._send(HTTPStatus.OK, text(self.server.samples))

    def _is_authorized(self) -> bool:
        said = self.headers.get("Authorization", "").encode("utf-8", "replace")
        words = self.server.words
        return not words or any(hmac.compare_digest(said, word) for word in words)

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            if status is HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", 'Basic realm="vtorque"')
            self.send_header("Content-Type", CONTENT_TYPE if status == 200 else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def open_endpoint(site: Site) -> Endpoint:
    """Return the endpoint for Prometheus. Raises HostFault, ConfigError."""
    return Endpoint(site[Settings])
