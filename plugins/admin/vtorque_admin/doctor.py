"""Check a node. Plugins add checks with ``vtorque_health_checks``."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from vtorque_admin import networks, setup_batch
from vtorque_admin.steps import Check, Mark
from vtorque_core.api import (
    HostFault,
    VtorqueError,
    children,
    derive,
    health,
    hooks,
    printable,
    require_root_owned,
    run_tool,
)
from vtorque_core.api.health import LEAST_FREE, HealthResult, failure, ok, warning
from vtorque_core.api.setup_steps import SetupStep
from vtorque_core.live.libvirt import call
from vtorque_core.live.node_setup import (
    VIRTIOFSD,
    AnyNetwork,
    host_ids,
    kvm,
    netfilter,
    node_hardware,
    require_tree,
)
from vtorque_core.live.site_config import Plugins, Site

_CHILD_TIMEOUT = 10.0  # seconds; a home on NFS may hang
_KVM = Path("/dev/kvm")
_DEVICES = Path("/sys/class/net")
QEMU_CONF = Path("/etc/libvirt/qemu.conf")
_CONFINES = {  # by default all are on
    "seccomp_sandbox": "QEMU is not confined by its seccomp sandbox",
    "dynamic_ownership": "libvirt does not reset the owner of files",
    "clear_emulator_capabilities": "QEMU keeps its parent's capabilities",
}

# Debian packages: for jobs that root starts, and (_OWN) for jobs of a personal site, whose first
# job also builds an image.
_PACKAGES = {
    "qemu-img": "qemu-utils",
    "nft": "nftables",
    "ip": "iproute2",
    "virtlogd": "libvirt-daemon",
    "setfacl": "acl",
    "setpriv": "util-linux",
    "qemu-storage-daemon": "qemu-utils, on Debian 12 qemu-system-common",
    VIRTIOFSD: "virtiofsd, on Debian 12 qemu-system-common",
}
_OWN = ("qemu-img", "virtlogd", "setpriv", VIRTIOFSD)
_OWN_PACKAGES = {tool: _PACKAGES[tool] for tool in _OWN} | {
    "qemu-system-x86_64": "qemu-system-x86",
    "libvirtd": "libvirt-daemon-system",
    "musl-gcc": "musl-tools and gcc, for the first image",
}

Look = Callable[[Site], Iterable[HealthResult]]


@dataclass(frozen=True)
class Finding:
    """Result of one check. The fields are those of ``vtorque doctor --json``.

    Attributes:
        check: name of the check.
        plugin: plugin of the check, or ``core``.
        status: ok, warning or failed.
        message: what was found.
        fix: what to do about it.
    """

    check: str
    plugin: str
    status: str
    message: str
    fix: str = ""


def set_mark(site: Site, plugins: Plugins, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Mark this node in the batch system as fit for VM jobs, or as unfit if a check failed.

    Yields one finding. Until the iteration starts, the caller may add to ``findings``.
    """
    failures = (f"{each.check}: {each.message}" for each in findings if each.status == "failed")
    reason = printable(next(failures, ""))
    plugins.batch_system(site.batch.system).node(site).mark(not reason, reason)
    yield Finding("mark", "core", "ok", f"reported as {'un' if reason else ''}fit for VM jobs")


def examine(
    site: Site, plugins: Plugins, user: str | None = None, *, marks: bool = False
) -> Iterator[Finding]:
    """Run all checks. With ``user``, also check this user's requirements.

    With ``marks``, skip the check of the node's mark, which :func:`set_mark` then sets.
    """
    checks: list[tuple[str, Look]] = [
        ("code", check_code),
        ("tools", check_tools),
        ("libvirt", check_libvirt),
        ("acceleration", check_accel),
        ("network", check_network),
        ("shares", check_shares),
        ("directories", check_directories),
    ]
    if site.owner:  # a personal site has no root processes
        checks.append(("user namespaces", check_namespaces))
    else:
        checks += [
            ("confinement", check_confinement),
            (health.ALIKE, check_equal_values),
            ("batch system", lambda s: check_batch(s, plugins, marks=marks)),
        ]
    if user is not None:
        checks.append((f"user {user}", lambda _: check_user(user)))
    for name, check in checks:
        yield from _run("core", name, check, site)
    for contribution in plugins.each(hooks.vtorque_health_checks):
        if contribution.error is not None:
            yield Finding("health checks", contribution.plugin, "failed", str(contribution.error))
            continue
        item = contribution.item
        yield from _run(contribution.plugin, item.name, item.check, site)
    for name, error in sorted(plugins.broken.items()):
        fix = f"reinstall {plugins.distributions.get(name, name)}, or disable it in [plugins]"
        yield Finding("import", name, "failed", error, fix)


def _run(plugin: str, name: str, check: Look, site: Site) -> Iterator[Finding]:
    try:
        for result in check(site):
            yield Finding(name, plugin, result.status, result.message, result.fix)
    except Exception as error:
        yield Finding(name, plugin, "failed", f"{type(error).__name__}: {error}")


def check_libvirt(site: Site) -> Iterator[HealthResult]:
    """Check that libvirtd answers."""
    uri = site.node.libvirt_uri
    try:
        cpus, memory = node_hardware.host_cpus(uri), node_hardware.host_memory_mib(uri)
    except VtorqueError as error:
        start = "see tools" if site.owner else "start libvirtd (and virtlogd) on this node"
        yield failure(str(error), start)
        return
    yield ok(f"{uri} answers: {len(cpus)} CPUs, {memory} MiB")


def check_code(site: Site) -> Iterator[HealthResult]:
    """Check that only root can change code that root runs."""
    prefix = Path(sys.prefix)
    try:
        require_root_owned(prefix, site.owner)
        require_tree(prefix, site.owner)
    except VtorqueError as error:
        yield failure(str(error), "install vTorque as root where only root can write")
    else:
        yield ok(f"{prefix} is {_owner_text(site)}")


def check_confinement(site: Site) -> Iterator[HealthResult]:
    """Check that QEMU is confined, in case a guest takes control of its QEMU."""
    try:
        models = security_models(site.node.libvirt_uri)
        settings = qemu_settings(QEMU_CONF)
    except (OSError, VtorqueError) as error:
        yield failure(f"libvirt's confinement is unknown: {error}", "fix libvirt first")
        return
    again = "and restart libvirtd"
    found = sorted({"apparmor", "selinux"} & set(models))
    module = f"enable AppArmor or SELinux, set security_driver in {QEMU_CONF} {again}"
    if found:
        yield ok(f"QEMU is confined by {found[0]}")
    elif site.node.guest_uids and os.uname().machine == "x86_64":  # UEFI guests get no uid
        yield warning("QEMU is confined by a uid for each guest, but by no security module", module)
    else:
        yield failure(
            "one guest's QEMU may open another's files: there is no security module, nor a uid for "
            "each guest ([node] guest_uids = 0, or guests that boot through UEFI)",
            module,
        )
    user = models.get("dac", "").partition(":")[0].removeprefix("+")
    if user in ("", "0"):
        yield failure("QEMU runs as root", f"set user in {QEMU_CONF} {again}")
    else:
        yield ok(f"QEMU runs as uid {user}")
    for key, loss in _CONFINES.items():
        if settings.get(key, "1") == "0":
            yield warning(f"{loss}: {key} = 0", f"remove that line from {QEMU_CONF} {again}")
        else:
            yield ok(f"{key} is on")


def security_models(uri: str) -> dict[str, str]:
    """Map the name of each of libvirt's security models to QEMU's label.

    The label of ``dac`` is ``+UID:+GID`` (https://libvirt.org/formatcaps.html, secmodel).
    """
    text = call(uri, "capabilities", lambda c: str(c.getCapabilities()))
    return {
        model.findtext("model", ""): model.findtext("baselabel[@type='qemu']", "")
        for model in ElementTree.fromstring(text).findall("host/secmodel")  # noqa: S314 - libvirt's
    }


def qemu_settings(conf: Path) -> dict[str, str]:
    """Return the settings in libvirt's qemu.conf; empty without the file."""
    if not conf.exists():
        return {}
    lines = (line.strip() for line in conf.read_text("utf-8", "replace").splitlines())
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, equals, value in pairs if equals}


def check_accel(site: Site) -> Iterator[HealthResult]:
    """Check that guests run with KVM."""
    chosen = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    if not chosen.warning:
        yield ok(f"guests run with {chosen.type}")
        return
    fix = "enable virtualization in the firmware (or nested, in a VM)"
    if not site.owner:
        fix += '; or set [node] accel = "tcg" to accept emulation silently'
    elif _KVM.exists() and not os.access(_KVM, os.R_OK | os.W_OK):
        user = pwd.getpwuid(site.owner).pw_name
        fix = f"as root: usermod -aG kvm {user}; then log in again"
    yield warning(chosen.warning, fix)


def check_namespaces(_: Site) -> Iterator[HealthResult]:
    """Check that the caller can create a user namespace, which virtiofsd needs."""
    try:
        run_tool("unshare", "--user", "true", timeout=_CHILD_TIMEOUT)
    except HostFault as error:
        yield failure(
            f"virtiofsd cannot create a user namespace: {error}",
            "as root: sysctl kernel.unprivileged_userns_clone=1 "
            "kernel.apparmor_restrict_unprivileged_userns=0, whichever this kernel has",
        )
    else:
        yield ok("virtiofsd can create a user namespace")


def check_network(site: Site) -> Iterator[HealthResult]:
    """Check the guests' networks and the packet filter that protects this node."""
    if site.network.kind == "user":
        yield ok("each guest has a separate user network of QEMU")
        return
    if site.network.kind == "none":
        yield ok("guests have no network ([network] kind)")
        return
    if os.geteuid() == 0:  # modprobe(8) may be missing, or not know a part of the kernel
        try:
            run_tool("unshare", "--net", "ip", "link", "add", "type", "ifb")
        except HostFault as error:
            yield failure(f"packet filters need the kernel module ifb: {error}", "install it")
        yield from _check_filters()
    yield from _check_one_network(site, site.network, "run vtorque setup install")
    for name, network in site.networks.items():
        make = f"run vtorque setup install, or fix [networks.{name}]"
        yield from _check_one_network(site, network, make)


def _check_one_network(site: Site, network: AnyNetwork, make: str) -> Iterator[HealthResult]:
    if network.kind == "network":
        if networks.is_active(site, network.source):
            yield ok(f"libvirt network {network.source} is active")
            yield from _check_guard(site, network)
        else:
            yield failure(f"libvirt network {network.source} is not active", make)
    elif Path("/sys/class/net", network.source).exists():
        yield ok(f"{network.kind} {network.source} exists")
    else:
        fix = "create it, or change the network's table in the config"
        yield failure(f"{network.kind} {network.source} does not exist", fix)


def _check_filters() -> Iterator[HealthResult]:
    tables = run_tool("nft", "list", "tables", "bridge").splitlines()
    for tap in sorted(_DEVICES.glob("vt" + "[0-9a-f]" * 12)):  # not of unfiltered NICs
        if (tap / "brport").exists() and f"table bridge {tap.name}" not in tables:
            yield failure(
                f"the guest's NIC {tap.name} has no packet filter: it was flushed",
                "cancel the guest's job; use no nft flush ruleset while guests run",
            )


def _check_guard(site: Site, network: AnyNetwork) -> Iterator[HealthResult]:
    source = network.source
    if not netfilter.node_guard(network, site.node.libvirt_uri):
        yield ok(f"libvirt network {source} uses a bridge of the site: the node is not protected")
    elif netfilter.has_guard(source):
        open_ports = ", ".join(network.node_ports) or "no port"
        yield ok(f"guests of {source} reach {open_ports} of this node")
    else:
        yield warning(
            f"guests of {source} reach this node's own services: its packet filter was flushed",
            "run vtorque setup install; the next job start also repairs it",
        )


def check_shares(site: Site) -> Iterator[HealthResult]:
    """Check the shared directories, and that guest_uids and subordinate_ids do not overlap."""
    for name, share in site.shares.items():
        if share.kind == "nfs":
            yield warning(
                f"[shares.{name}] is mounted by the guests themselves: the NFS server trusts a "
                "guest's address, so root in any guest can act as any user on it",
                'kind = "virtiofs", or Kerberos on the server',
            )
        else:
            yield ok(f"[shares.{name}] {share.source} is served with the job owner's privileges")
    base, first = site.node.subordinate_ids, site.node.guest_uids
    if first and base and first + host_ids.COUNT > base:
        yield failure(
            f"[node] guest_uids {first} to {first + host_ids.COUNT - 1} overlap the ids of guest "
            f"root, [node] subordinate_ids {base} and above",
            f"set guest_uids to {base - host_ids.COUNT} or less",
        )
    for table in host_ids.TABLES if base else ():
        for owner, first, count in host_ids.ranges(table):
            if first + count > base:
                yield failure(
                    f"{table} gives {owner} ids above [node] subordinate_ids {base}",
                    "set subordinate_ids to a number above all ids in that file",
                )


def check_equal_values(site: Site) -> Iterator[HealthResult]:
    """Report values that must be equal on all nodes, for ``vtorque cluster doctor``. As root."""
    if os.geteuid() != 0:
        return
    yield ok(f"subordinate ids: {subordinate_id_rule(site.node.subordinate_ids)}")
    if site.paths.secret.exists():
        digest = derive(site.paths.secret.read_bytes(), "doctor", length=8).hex()  # reveals nothing
        yield ok(f"site secret: {digest}")


def check_directories(site: Site) -> Iterator[HealthResult]:
    """Check owner, mode and free space of vTorque's directories."""
    for path in (site.paths.state, site.paths.run):
        if not path.is_dir():
            missing = failure(f"{path} does not exist", "run vtorque setup install")
            yield ok(f"{path} is created by the first job") if site.owner else missing
            continue
        status = path.stat()
        if status.st_uid != site.owner or status.st_mode & 0o022:
            yield failure(f"{path} can be written by others than root", f"chmod go-w {path}")
        else:
            yield ok(f"{path} is {_owner_text(site)}")
    free = shutil.disk_usage(site.paths.state if site.paths.state.is_dir() else "/").free >> 20
    if free < LEAST_FREE:
        yield warning(f"{site.paths.state}: {free} MiB free", "free space for job disks")


def _owner_text(site: Site) -> str:
    return "your own" if site.owner else "root's"


def check_tools(site: Site) -> Iterator[HealthResult]:
    """Check that the required programs are installed."""
    who = "as root: " if site.owner else ""
    for tool, package in (_OWN_PACKAGES if site.owner else _PACKAGES).items():
        if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin"):
            yield ok(f"{tool} is there")
        else:
            yield failure(f"{tool} is missing", f"{who}install the package {package}")


def check_batch(site: Site, plugins: Plugins, *, marks: bool = False) -> Iterator[HealthResult]:
    """Check that all setup steps of the batch system are done, such as the hooks and the mark.

    If ``marks`` is true, the mark is not checked, because the caller sets it after all checks.
    """
    batch = site.batch.system
    found = setup_batch.steps_of(site, plugins, batch, site.path)
    steps = [step for step in found if not (marks and isinstance(step, Mark))]
    for step in steps:
        try:
            if step.is_applied():
                yield ok(f"{batch}: {step.text}")
            else:
                yield _missing_step(step, batch)
        except (VtorqueError, OSError) as error:
            yield failure(f"{batch}: not done: {type(step).__name__}", str(error))
    if not found:
        yield ok(f"{batch} calls vTorque by itself")


def _missing_step(step: SetupStep, batch: str) -> HealthResult:
    said = f"{batch}: not done: {step.text}"
    if isinstance(step, Mark):
        return warning(said, "if no check failed: vtorque doctor --mark")
    again = f"run vtorque setup install --batch {batch}"
    return failure(said, step.problem if isinstance(step, Check) else again)


def check_user(name: str) -> Iterator[HealthResult]:
    """Check that a user's jobs can run: account and home directory."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        yield failure(f"user {name} is unknown on this node", "add the user to it")
        return
    if user.pw_uid == 0:
        yield failure("root's jobs do not run in guests", "submit as an ordinary user")
        return
    if problem := children.run_in_child(lambda: _enter_home(user), _CHILD_TIMEOUT):
        yield failure(
            f"{name} cannot enter {user.pw_dir}: {problem}",
            "check the mount, owner and mode of the home directory",
        )
    else:
        yield ok(f"{user.pw_dir} is {name}'s own and can be entered")


def _enter_home(user: pwd.struct_passwd) -> None:
    if os.geteuid() == 0:
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    os.chdir(user.pw_dir)
    if os.stat(".").st_uid != user.pw_uid:  # noqa: PTH116 - after chdir
        raise HostFault("the directory belongs to another user")


def subordinate_id_rule(base: int, tables: Sequence[Path] = host_ids.TABLES) -> str:
    """Describe how this node chooses subordinate ids. Nodes with equal texts choose equal ids."""
    if base:
        return f"{base} + uid"
    lines = sorted(
        f"{number} {line}" for number, t in enumerate(tables) for line in host_ids.ranges(t)
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{' and '.join(map(str, tables))} ({digest[:16]})"
