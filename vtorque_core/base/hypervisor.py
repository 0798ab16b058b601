"""All calls to libvirt. Only this module imports libvirt, and only when it is needed.

Every call has a timeout. After the timeout, libvirt may still complete the call. All functions
raise HostFault if libvirt fails or does not answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pwd
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeVar
from xml.etree import ElementTree

from vtorque_core import __version__
from vtorque_core.base.errors import HostFault

T = TypeVar("T")

STAGE = "libvirt"
CALL_TIMEOUT = 60.0
"""Seconds for one call. The first createXML after a QEMU update takes seconds to probe QEMU."""
LOOKUP = 10.0
"""Seconds for one call that libvirtd answers from memory."""
_POLL = 0.05
_CLOSE_TIMEOUT = 5.0

_connections: dict[str, Any] = {}
_lock = threading.Lock()


def _drop_connections() -> None:
    for connection in _connections.values():
        connection._o = None  # what virConnect.__del__ would close (libvirt-python, libvirt.py)
    _connections.clear()


os.register_at_fork(after_in_child=_drop_connections)


@cache
def library() -> ModuleType:
    """Return the module libvirt. Raises HostFault if it is not installed."""
    try:
        import libvirt  # noqa: PLC0415 - takes 22 ms, which only root needs
    except ImportError as error:
        raise HostFault(f"the Python package libvirt-python is unusable: {error}") from None
    # By default the library prints every error to stderr, which is the job's output.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    module: ModuleType = libvirt
    return module


class Overdue(Exception):
    """The called code has not returned in time. Its thread may still run."""


def run_bounded(work: Callable[[], T], seconds: float, name: str = "") -> T:
    """Return the result of ``work``, which runs in a daemon thread.

    Raises Overdue after ``seconds``.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    context = contextvars.copy_context()  # the log's guest and plugin
    thread = threading.Thread(target=context.run, args=(run,), name=name or None, daemon=True)
    thread.start()
    thread.join(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not results:
        raise Overdue
    return results[0]


def _bounded(work: Callable[[], T], action: str, timeout: float) -> T:
    try:
        return run_bounded(work, timeout, f"libvirt {action}")
    except Overdue:
        raise HostFault(
            f"{action}: no answer from libvirtd within {timeout:g} s. Check its log, "
            "and restart it; running guests are not affected",
            stage=STAGE,
        ) from None


def call(uri: str, what: str, work: Callable[[Any], T], timeout: float = CALL_TIMEOUT) -> T:
    """Return the result of ``work(connection)``. Error messages begin with ``what``."""
    module = library()
    deadline = time.monotonic() + timeout
    connection = _bounded(lambda: _connect(uri), what, timeout)
    try:
        return _bounded(lambda: work(connection), what, deadline - time.monotonic())
    except HostFault:
        _connections.pop(uri, None)
        raise
    except module.libvirtError as error:
        if error.get_error_code() == module.VIR_ERR_RPC or not _is_alive(connection):
            _connections.pop(uri, None)
        raise HostFault(f"{what}: {error}", stage=STAGE) from error


def _is_alive(connection: Any) -> bool:
    try:
        return bool(connection.isAlive())  # sends no message
    except library().libvirtError:
        return False


def _connect(uri: str) -> Any:
    module = library()
    with _lock:
        known = _connections.get(uri)
    if known is not None and _is_alive(known):
        return known
    try:
        fresh = module.open(uri)
    except module.libvirtError as error:
        raise HostFault(
            f"libvirtd does not answer at {uri} ({error}): start libvirtd and "
            "virtlogd (systemctl start libvirtd), then run vtorque doctor",
            stage=STAGE,
        ) from None
    with _lock:
        _connections[uri] = fresh
    return fresh


def close() -> None:
    while _connections:
        _, connection = _connections.popitem()
        with contextlib.suppress(HostFault, library().libvirtError):
            _bounded(connection.close, "close", _CLOSE_TIMEOUT)


def on_domain(
    uri: str, uuid: str, what: str, work: Callable[[Any], T], timeout: float = CALL_TIMEOUT
) -> T | None:
    """Return the result of ``work(domain)``, or None if the domain does not exist."""
    return call(uri, what, lambda c: if_exists(lambda: work(c.lookupByUUIDString(uuid))), timeout)


def if_exists(work: Callable[[], T]) -> T | None:
    """Return the result of ``work()``, or None if libvirt reports a missing domain or network."""
    module = library()
    try:
        return work()
    except module.libvirtError as error:
        if error.get_error_code() in (module.VIR_ERR_NO_DOMAIN, module.VIR_ERR_NO_NETWORK):
            return None
        raise


# -- domains ----------------------------------------------------------------------------------


def create_domain(uri: str, xml: str, *, paused: bool = False) -> None:
    flags = library().VIR_DOMAIN_START_VALIDATE
    flags |= library().VIR_DOMAIN_START_PAUSED if paused else 0
    call(uri, "start domain", lambda c: c.createXML(xml, flags))


def saved_xml(uri: str, path: str) -> str:
    secure = library().VIR_DOMAIN_SAVE_IMAGE_XML_SECURE
    return call(uri, "read saved domain", lambda c: str(c.saveImageGetXMLDesc(path, secure)))


def restore_domain(uri: str, path: str, xml: str, timeout: float = CALL_TIMEOUT) -> None:
    paused = library().VIR_DOMAIN_SAVE_PAUSED
    call(uri, "restore domain", lambda c: c.restoreFlags(path, xml, paused), timeout)


def versions(uri: str) -> dict[str, str]:
    """Return the versions, by component, that must be equal on both nodes of a migration."""

    def work(connection: Any) -> dict[str, str]:
        host = ElementTree.fromstring(connection.getCapabilities()).find("host/cpu")  # noqa: S314
        model, able = "", list[str]()
        if host is not None:
            model = f"{host.findtext('vendor', '')} {host.findtext('model', '')}"
            able = sorted(each.get("name", "") for each in host.iterfind("feature"))
        return {
            "vTorque": __version__,
            "libvirt": str(connection.getLibVersion()),
            "QEMU": str(connection.getVersion()),
            "processor": " ".join((model, *able)).strip(),
        }

    return call(uri, "versions", work, LOOKUP)


def resume_domain(uri: str, uuid: str, timeout: float = CALL_TIMEOUT) -> None:
    """Resume a domain if it is not running."""
    work = _skip_in_state(library().VIR_DOMAIN_RUNNING, lambda domain: domain.resume())
    if on_domain(uri, uuid, "resume domain", work, timeout) is None:
        raise HostFault("the guest ended immediately after its start", stage=STAGE)


def suspend_domain(uri: str, uuid: str, timeout: float = CALL_TIMEOUT) -> None:
    """Pause a domain if it is not paused."""
    work = _skip_in_state(library().VIR_DOMAIN_PAUSED, lambda domain: domain.suspend())
    if on_domain(uri, uuid, "suspend domain", work, timeout) is None:
        raise HostFault("the guest ended before it could be suspended", stage=STAGE)


def cpu_shares(uri: str, uuid: str, shares: int = 0) -> int:
    """Set a domain's ``cpu_shares``, unless ``shares`` is 0. Return the previous value.

    Returns 0 if the domain has ended or there are no CPU control groups.
    """
    module = library()

    def work(domain: Any) -> int:
        live = module.VIR_DOMAIN_AFFECT_LIVE
        try:
            had = int(domain.schedulerParametersFlags(live)["cpu_shares"])
        except module.libvirtError as error:
            if error.get_error_code() == module.VIR_ERR_OPERATION_INVALID:
                return 0
            raise
        if shares:
            domain.setSchedulerParametersFlags({"cpu_shares": shares}, live)
        return had

    return on_domain(uri, uuid, "CPU shares", work, LOOKUP) or 0


def _skip_in_state(state: int, work: Callable[[Any], Any]) -> Callable[[Any], bool]:
    return lambda domain: domain.state()[0] == state or work(domain) == 0


def adopt_domain(
    uri: str,
    uuid: str,
    devices: Sequence[str],
    metadata: tuple[str, str, str],
    cpus: tuple[bool, ...] = (),
    attached: Callable[[], None] = lambda: None,
) -> None:
    """Add a job's devices, metadata and CPUs to a warm (paused) domain, and resume it.

    Calls ``attached`` before the resume. The last device follows it, and signals that the others
    are present. ``metadata`` is XML, its prefix and its namespace. ``cpus`` has True for each host
    CPU that vCPUs and emulator may use; empty: any.
    """
    live = library().VIR_DOMAIN_AFFECT_LIVE

    def work(domain: Any) -> bool:
        if domain.state()[0] != library().VIR_DOMAIN_PAUSED:
            raise HostFault("the guest is not paused", stage=STAGE)
        domain.setMetadata(library().VIR_DOMAIN_METADATA_ELEMENT, *metadata, live)
        if cpus:
            for number in range(domain.maxVcpus()):
                domain.pinVcpuFlags(number, cpus, live)
            domain.pinEmulator(cpus, live)
        for device in devices[:-1]:
            domain.attachDeviceFlags(device, live)
        attached()
        domain.resume()
        for device in devices[-1:]:
            domain.attachDeviceFlags(device, live)
        return True

    if not on_domain(uri, uuid, "adopt domain", work):
        raise HostFault("the guest has ended", stage=STAGE)


def destroy_domain(uri: str, uuid: str, deadline_s: float = 60.0) -> None:
    """Kill a domain, if it exists, and wait until it has ended.

    A domain with the same UUID that starts meanwhile is not killed.
    """
    deadline = time.monotonic() + deadline_s
    # libvirtd locks a domain while it kills QEMU, for up to 15 s (virProcessKillPainfully).
    domain_id = call(uri, "find domain", lambda c: _running_id(c, uuid), deadline_s)
    if domain_id is None:
        return
    failure = ""
    while True:
        left = deadline - time.monotonic()
        now = call(uri, "find domain", lambda c: _running_id(c, uuid), max(left, 1.0))
        if now != domain_id:
            return
        if left <= 0:
            raise HostFault(
                f"domain {uuid} (id {domain_id}) did not end within {deadline_s:g} "
                f"s{': ' + failure if failure else ''}; if its QEMU is in state D, "
                "its storage or a device hangs",
                stage=STAGE,
            )
        failure = call(uri, "destroy domain", lambda c: _destroy(c, uuid, domain_id), left)
        if failure:
            time.sleep(_POLL)


def _running_id(connection: Any, uuid: str) -> int | None:
    number = if_exists(lambda: int(connection.lookupByUUIDString(uuid).ID()))
    return number if number is not None and number >= 0 else None


def _destroy(connection: Any, uuid: str, doomed: int) -> str:
    module = library()
    domain = if_exists(lambda: connection.lookupByUUIDString(uuid))
    if domain is None or domain.ID() != doomed:
        return ""
    try:
        domain.destroy()
    except module.libvirtError as error:
        if error.get_error_code() in (module.VIR_ERR_NO_DOMAIN, module.VIR_ERR_OPERATION_INVALID):
            return ""
        return str(error)
    return ""


def domain_runs(uri: str, uuid: str) -> bool:
    """Return True if the domain exists and runs or is paused."""
    module = library()
    alive = (module.VIR_DOMAIN_RUNNING, module.VIR_DOMAIN_BLOCKED, module.VIR_DOMAIN_PAUSED)
    return bool(on_domain(uri, uuid, "domain state", lambda d: d.state()[0] in alive, LOOKUP))


# -- the node ---------------------------------------------------------------------------------


def qemu_uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise HostFault(
            f"QEMU must run as user {user!r}, who does not exist; install "
            "libvirt's QEMU driver or set [node] qemu_user",
            stage=STAGE,
        ) from None


# -- networks ---------------------------------------------------------------------------------


def network_names(uri: str) -> list[str]:
    active = library().VIR_CONNECT_LIST_NETWORKS_ACTIVE
    networks = call(uri, "list networks", lambda c: c.listAllNetworks(active), LOOKUP)
    return [str(network.name()) for network in networks]


def network_xml(uri: str, name: str) -> str | None:
    """Return the XML of a network, or None if it does not exist or is not active."""

    def xml(connection: Any) -> str | None:
        network = if_exists(lambda: connection.networkLookupByName(name))
        return str(network.XMLDesc()) if network is not None and network.isActive() else None

    return call(uri, f"network {name}", xml)
