"""Configure an installed systemd system reproducibly, to boot fast for one job.

This code runs no program of the image.
"""

from __future__ import annotations

import re
import stat
from importlib.resources import files

from vtorque_core.api import Refused
from vtorque_linux_guest.guest.agent_start import AGENT, START, UNIT, agent_unit, start_script
from vtorque_linux_guest.image.filetree import FileTree, TreeNode
from vtorque_linux_guest.image.recipe import DEBIAN

_GENERATORS = "etc/systemd/system-generators"  # a link to /dev/null masks: systemd.generator(7)
_UNITS = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")

# A guest that lives for one job never needs these: waiting for networks, timers, login prompts.
MASKED = (
    *("systemd-networkd-wait-online.service", "NetworkManager-wait-online.service"),
    *("systemd-firstboot.service", "getty@tty1.service", "serial-getty@ttyS0.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "fstrim.timer", "dpkg-db-backup.timer"),
    *("dnf-makecache.timer", "logrotate.timer", "man-db.timer", "unbound-anchor.timer"),
    *("e2scrub_all.timer", "e2scrub_reap.service", "systemd-tmpfiles-clean.timer"),
    *("systemd-random-seed.service", "systemd-pstore.service", "systemd-update-utmp.service"),
    *("systemd-update-utmp-runlevel.service", "systemd-binfmt.service", "modprobe@drm.service"),
    *("modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@loop.service"),
    *("modprobe@fuse.service", "sys-fs-fuse-connections.mount", "sys-kernel-debug.mount"),
    *("sys-kernel-tracing.mount", "systemd-network-generator.service"),
    *("systemd-journal-flush.service", "systemd-sysusers.service"),
)
# Generators run before the first unit, one after another; most are shell scripts. They serve
# features that images from recipes lack, or search the machine for a data source (cloud-init's).
GENERATORS = (
    *("systemd-cryptsetup-generator", "systemd-integritysetup-generator"),
    *("systemd-veritysetup-generator", "systemd-gpt-auto-generator"),
    *("systemd-hibernate-resume-generator", "systemd-getty-generator"),
)
CLOUD_INIT_GENERATOR = "cloud-init-generator"
CLOUD_INIT_TARGET = "cloud-init.target"
# The second stage starts another Python for work that the seed assigns to the first. From 24.3 on,
# one process runs all stages and waits for each; there the second has another name.
SECOND_STAGE = "cloud-init.service"
FIRST_STAGE = "cloud-init-local.service"
NETWORK_STAGE = "cloud-init-network.service"
# cloud-init starts one of these if the seed names time servers. Until then the host's clock is
# used.
DISABLED = ("systemd-timesyncd.service", "chronyd.service")
ENABLED = {
    "debian": (
        "systemd-networkd.service",
        "systemd-resolved.service",
        "ssh.service",
        "vtorque-agent.service",
        "vtorque-waits.service",
    ),
    "redhat": (
        "NetworkManager.service",
        "sshd.service",
        "vtorque-agent.service",
        "vtorque-waits.service",
    ),
}

_SEED = r"dev-disk-by\x2did-virtio\x2dvtseed.device"
_FILES = {
    "etc/fstab": "# The initramfs mounts the root disk.\n",
    "etc/hostname": "localhost\n",
    # Empty: systemd generates an id in each guest (machine-id(5)).
    "etc/machine-id": "",
    # Only the modules and the data source that the seed needs. No later stage may restart sshd (as
    # set-passwords does), because jobs with several guests use it.
    "etc/cloud/cloud.cfg.d/90-vtorque.cfg": (
        "datasource_list: [NoCloud, None]\n"
        "cloud_init_modules: [seed_random, write-files, set_hostname, update_hostname,"
        " users-groups, ssh]\n"
        "cloud_config_modules: [ntp, runcmd]\n"
        "cloud_final_modules: [scripts-user, final-message]\n"
        # If the seed contains no host key: generating an RSA key takes many seconds under
        # emulation.
        "ssh_genkeytypes: [ed25519]\n"
    ),
    "etc/ssh/sshd_config.d/10-vtorque.conf": "PermitRootLogin no\nPasswordAuthentication no\n",
    # READY does not depend on the rest of cloud-init, which takes seconds under emulation.
    "etc/systemd/system/cloud-config.service.d/10-vtorque.conf": (
        "[Unit]\nAfter=vtorque-agent.service\n"
    ),
    "etc/systemd/journald.conf.d/10-vtorque.conf": "[Journal]\nStorage=volatile\n",
    # A warm guest gets its seed only when its job starts, so there is no time limit.
    f"etc/systemd/system/{FIRST_STAGE}.d/10-vtorque.conf": (
        f"[Unit]\nRequires={_SEED}\nAfter={_SEED} vtorque-waits.service\n"
    ),
    f"etc/systemd/system/{_SEED}.d/10-vtorque.conf": "[Unit]\nJobRunningTimeoutSec=infinity\n",
}

_WAITS = {
    "vtorque-waits.service": "etc/systemd/system/vtorque-waits.service",
    "vtorque-waits": "usr/lib/vtorque/vtorque-waits",
}

# Leftovers of package scripts that a guest does not need or that differ between builds.
_EMPTIED = (
    *("tmp", "run", "proc", "sys", "dev", "var/tmp", "var/cache/apt"),
    *("var/cache/dnf", "var/cache/yum", "var/cache/ldconfig", "var/cache/debconf"),
    *("var/cache/man", "var/cache/fontconfig", "var/lib/apt/lists", "var/lib/dnf"),
    *("var/lib/systemd/timers", "var/lib/cloud", "var/spool/mail"),
)
_REMOVED = (
    *("etc/.pwd.lock", "etc/.updated", "var/.updated", "var/lib/dbus/machine-id"),
    *("var/lib/systemd/random-seed", "var/lib/systemd/credential.secret", "etc/.resolv.conf"),
    *("etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-"),
    *("var/lib/dpkg/status-old", "var/lib/dpkg/diversions-old", "var/lib/dpkg/statoverride-old"),
    *("var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend", "var/lib/dpkg/triggers/Lock"),
    *("var/lib/dpkg/available-old", "root/.bash_history", "root/.lesshst", "root/.cache"),
    *("var/lib/rpm/.rpm.lock", "usr/lib/sysimage/rpm/.rpm.lock"),
    # Index of SQLite's write-ahead log (sqlite.org/walformat.html), which is created again.
    *("var/lib/rpm/rpmdb.sqlite-shm", "usr/lib/sysimage/rpm/rpmdb.sqlite-shm"),
)


def finish(tree: FileTree, family: str, agent: bytes, started: int) -> None:
    """Configure a system and remove the leftovers of the build.

    ``agent`` is the agent binary. Files newer than ``started`` (seconds since 1970) get the time of
    the newest packaged file. Raises Refused if systemd or cloud-init is missing, because the image
    would not boot.
    """
    for path, what in (
        ("usr/lib/systemd/systemd", "systemd"),
        ("usr/bin/cloud-init", "cloud-init"),
    ):
        if not any(tree.find(p) for p in (path, path.removeprefix("usr/"))):
            raise Refused(f"the packages do not contain {what} ({path}): the image would not boot")
    _clean_tree(tree)
    for path, content in _FILES.items():
        tree.file(path, content.encode())
    tree.file(UNIT, agent_unit().encode())
    tree.file(START, start_script().encode(), 0o755)
    tree.file(AGENT, agent, 0o755)
    for name, path in _WAITS.items():
        tree.file(path, files("vtorque_linux_guest.guest").joinpath(name).read_bytes())
    for unit in ENABLED[family]:
        enable(tree, unit)
    for unit in DISABLED:
        disable(tree, unit)
    for unit in (*MASKED, SECOND_STAGE):
        tree.link(f"etc/systemd/system/{unit}", "/dev/null")
    for generator in GENERATORS:
        tree.link(f"{_GENERATORS}/{generator}", "/dev/null")
    _always_cloud_init(tree)
    _late_cloud_init(tree)
    tree.link("etc/systemd/system/default.target", "/usr/lib/systemd/system/multi-user.target")
    _name_servers(tree, family)
    _times(tree, started)


def _always_cloud_init(tree: FileTree) -> None:
    """Enable cloud-init, and mask its systemd generator.

    The generator is not needed: it only looks for a seed, and every guest has a seed.
    """
    found = _unit(tree, CLOUD_INIT_TARGET)
    if found is None:
        return
    wants = "etc/systemd/system/multi-user.target.wants"
    tree.link(f"{wants}/{CLOUD_INIT_TARGET}", f"/{found[0]}")
    tree.link(f"{_GENERATORS}/{CLOUD_INIT_GENERATOR}", "/dev/null")


def _late_cloud_init(tree: FileTree) -> None:
    """Let only the network, and the units that depend on it, wait for cloud-init.

    In Debian, the whole system waits for cloud-init (Before=sysinit.target).
    """
    for unit in (FIRST_STAGE, NETWORK_STAGE):
        found = _unit(tree, unit)
        if found is not None:
            text = found[1].read(1 << 20).replace(b"Before=sysinit.target\n", b"")
            tree.file(f"etc/systemd/system/{unit}", text)


def enable(tree: FileTree, unit: str) -> None:
    """Enable a unit by its [Install] section, as systemctl(1) does, if the unit exists."""
    found = _unit(tree, unit)
    if found is None:
        return
    path, node = found
    base, target = "etc/systemd/system", f"/{path}"
    text = node.read(1 << 20).decode("utf-8", "replace")
    _, _, section = text.partition("[Install]")
    for key, value in re.findall(r"^(\w+)=(.*)$", section.split("\n[")[0], re.MULTILINE):
        for word in value.split():
            if key in ("WantedBy", "RequiredBy"):
                kind = "wants" if key == "WantedBy" else "requires"
                tree.link(f"{base}/{word}.{kind}/{unit}", target)
            elif key == "Alias":
                tree.link(f"{base}/{word}", target)
            elif key == "Also" and word not in MASKED:
                enable(tree, word)


def disable(tree: FileTree, unit: str) -> None:
    """Disable a unit, as systemctl(1) does."""
    top = tree.find("etc/systemd/system")
    for name, node in [] if top is None else list(top.children.items()):
        if node.is_directory and name.endswith((".wants", ".requires")):
            node.children.pop(unit, None)
        elif node.is_link and node.read(4096).endswith(f"/{unit}".encode()):
            del top.children[name]  # type: ignore[union-attr]


def _unit(tree: FileTree, unit: str) -> tuple[str, TreeNode] | None:
    for directory in _UNITS:
        path = f"{directory}/{unit}"
        node = tree.find(path, follow=False)
        if node is not None and node.is_file:
            return path, node
    return None


def _clean_tree(tree: FileTree) -> None:
    for path in _EMPTIED:
        tree.clear(path)
    for path in _REMOVED:
        tree.remove(path)
    for path, node in list(tree.walk()):  # services have their directory there, such as munge
        if path.startswith("var/log/") and not node.is_directory:
            tree.remove(path)
    ssh = tree.find("etc/ssh")
    for name in [] if ssh is None else [n for n in ssh.children if n.startswith("ssh_host_")]:
        del ssh.children[name]  # type: ignore[union-attr]
    # Third field: the day of the last change of a password that nobody has (shadow(5)).
    shadow = tree.find("etc/shadow", follow=False)
    if shadow is not None and shadow.is_file:
        lines = shadow.read(1 << 20).split(b"\n")
        parts = [line.split(b":") for line in lines]
        shadow.content = b"\n".join(
            b":".join([*p[:2], b"", *p[3:]]) if len(p) > 3 else b":".join(p) for p in parts
        )


def _name_servers(tree: FileTree, family: str) -> None:
    if family == DEBIAN and _unit(tree, "systemd-resolved.service") is not None:
        tree.link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf")
    else:
        tree.file("etc/resolv.conf", b"")


def _times(tree: FileTree, started: int) -> None:
    """Set the times of files that the build created to the time of the newest packaged file.

    Packaged files keep their times, because a compiled Python file contains its source's time.
    """
    nodes = [node for _, node in tree.walk()]
    packaged = [n.mtime for n in nodes if n.mtime < started and stat.S_ISREG(n.mode)]
    newest = max(packaged, default=0)
    for node in nodes:
        if node.mtime >= started or node.mtime == 0:
            node.mtime = newest
