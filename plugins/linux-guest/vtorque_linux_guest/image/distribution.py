"""Install a distribution into a tar file: mmdebstrap for Debian, dnf for Red Hat.

Both programs run in :mod:`vtorque_linux_guest.image.sandbox`. The recipe's values are passed as
arguments and files, never as shell text. A shell runs only the recipe's commands, inside the image.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from vtorque_core.api import HostFault, run_tool
from vtorque_linux_guest.image import recipe_files, sandbox
from vtorque_linux_guest.image.kernel import KernelPackage, need_tools
from vtorque_linux_guest.image.recipe import DEBIAN, LinuxRecipe

BOOTSTRAP_TIMEOUT = 1800.0  # seconds
COMMANDS_TIMEOUT = 3600.0  # seconds: a recipe may compile

BASE = {
    "debian": (
        *("systemd-sysv", "udev", "kmod", "dbus", "cloud-init", "openssh-server", "iproute2"),
        *("systemd-resolved", "systemd-timesyncd", "ca-certificates", "procps", "less"),
    ),
    "redhat": (
        *("systemd", "systemd-udev", "dbus", "cloud-init", "openssh-server", "iproute", "kmod"),
        *("NetworkManager", "chrony", "procps-ng", "less", "dnf", "kernel", "dracut"),
        *("dracut-config-generic", "rootfiles"),
    ),
}
_SEE_FILES = "/usr/share/mmdebstrap/hooks/file-mirror-automount"  # a hook of mmdebstrap
_INSTALLED = 1577836800  # seconds: the first day of 2020, chosen arbitrarily
# A batch job does not need these files, which are a quarter of the size.
_UNREAD = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")


def install(
    recipe: LinuxRecipe, work: Path, kernel: KernelPackage | None, progress: Callable[[str], None]
) -> Path:
    """Install a recipe's packages and return the tar file of the root directory.

    The recipe's files are in ``work``/added.tar; only root may have access to the parent of
    ``work``. The modules of ``kernel`` are added. Raises Refused and HostFault.
    """
    need_tools("setpriv", "tar", "mmdebstrap" if recipe.family == DEBIAN else "dnf")
    commands = ""
    if recipe.commands:
        commands = f"{sandbox.PLACE}/commands"
        (work / "commands").write_text("\n".join(recipe.commands) + "\n", "utf-8")
    if kernel is not None:
        _pack_modules(kernel, work / "modules.tar")
    (work / "customise.sh").write_bytes(
        files("vtorque_linux_guest.guest").joinpath("customise.sh").read_bytes()
    )
    progress(f"installing {recipe.family} {recipe.suite}: a minute or more")
    (_debian if recipe.family == DEBIAN else _redhat)(recipe, work)
    progress("adding files, running commands" if commands else "packing")
    place = sandbox.PLACE
    sandbox.run(
        work,
        *("sh", f"{place}/customise.sh", f"{place}/root", f"{place}/added.tar", commands),
        *(f"{place}/root.tar", kernel.release if kernel is not None else ""),
        timeout=COMMANDS_TIMEOUT,
        stage="the recipe's commands",
    )
    shutil.rmtree(work / "root")
    return work / "root.tar"


def _pack_modules(kernel: KernelPackage, packed: Path) -> None:
    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(kernel.modules.rglob("*")):
            name = f"usr/lib/modules/{kernel.release}/{path.relative_to(kernel.modules)}"
            if path.is_file() and not path.is_symlink():
                archive.add(path, name, recursive=False)


def apt_sources(suite: str) -> list[str]:
    """Return the machine's apt sources of a Debian release and its updates, in one-line style.

    Returns [] if the machine has no such sources.
    """
    line = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    try:
        need_tools("apt-get")
    except HostFault:
        return []  # not a Debian machine: mmdebstrap has a default
    shown = run_tool("apt-get", "indextargets", "--format", line, "Created-By: Packages")
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    found = []
    for origin, codename, uri, release, component in (x.split("|") for x in shown.splitlines()):
        if origin == "Debian" and codename in wanted:
            found.append(f"deb {uri} {release} {component}")
    return sorted(set(found)) if any(f" {suite} " in f for f in found) else []


def _packages(recipe: LinuxRecipe) -> list[str]:
    base = BASE[recipe.family] if recipe.base_packages is None else recipe.base_packages
    return list(dict.fromkeys([*base, *recipe.packages]))


def _debian(recipe: LinuxRecipe, work: Path) -> None:
    keyrings = []
    for number, key in enumerate(recipe.keys):
        name = f"key{number}{'.asc' if key.endswith('.asc') else '.gpg'}"
        (work / name).write_bytes(recipe_files.read_below(recipe.directory, key))
        keyrings.append(f"--keyring={sandbox.PLACE}/{name}")
    sources = list(recipe.sources) or apt_sources(recipe.suite)
    if recipe.unsigned:
        keyrings.append("--aptopt=APT::Get::AllowUnauthenticated true")
        keyrings.append("--aptopt=Acquire::AllowInsecureRepositories true")
    # apt reads file:// packages on this machine; dpkg, in the new root, must find them there, too.
    seen = [f"--hook-dir={_SEE_FILES}"] if any(" file://" in each for each in sources) else []
    sandbox.run(
        work,
        *("mmdebstrap", "--quiet", "--mode=unshare", "--format=directory", "--variant=apt"),
        *(f"--include={','.join(_packages(recipe))}", "--components=main", *keyrings, *seen),
        *(f"--dpkgopt=path-exclude={path}" for path in _UNREAD),
        *("--", recipe.suite, f"{sandbox.PLACE}/root", *sources),
        timeout=BOOTSTRAP_TIMEOUT,
        stage="mmdebstrap",
    )


def _redhat(recipe: LinuxRecipe, work: Path) -> None:
    """Install the packages by dnf, without the machine's repositories and dnf plugins."""
    place = sandbox.PLACE
    urls = []
    for number, key in enumerate(recipe.keys):
        (work / f"key{number}").write_bytes(recipe_files.read_below(recipe.directory, key))
        urls.append(f"file://{place}/key{number}")
    lines = [
        "[main]",
        *("plugins=0", "keepcache=0", "install_weak_deps=0", "tsflags=nodocs", "best=1"),
        # Directories below the new root, which are emptied afterwards.
        *("cachedir=/var/cache/dnf", "logdir=/var/log", "persistdir=/var/lib/dnf"),
        *(f"reposdir={place}/repos", "obsoletes=1", "clean_requirements_on_remove=1"),
        f"gpgcheck={int(not recipe.unsigned)}",
    ]
    for number, source in enumerate(recipe.sources):
        lines += [f"[recipe{number}]", f"name=recipe{number}", f"baseurl={source}", "enabled=1"]
        lines += [f"gpgkey={' '.join(urls)}"] if urls else []
    (work / "dnf.conf").write_text("\n".join(lines) + "\n", "utf-8")
    # Debian's rpm has its database in the home directory; where the image's own rpm looks for it
    # depends on the release.
    major = re.match(r"\d+", recipe.suite)
    database = "/usr/lib/sysimage/rpm" if major and int(major[0]) >= 10 else "/var/lib/rpm"
    (work / ".rpmmacros").write_text(f"%_dbpath {database}\n", "utf-8")
    for name in ("root", "repos"):
        (work / name).mkdir()
        (work / name).chmod(0o755)
        shutil.chown(work / name, sandbox.BASE, sandbox.BASE)
    sandbox.run(
        work,
        # The package database records install times, which must be the same in each build.
        *("env", f"SOURCE_DATE_EPOCH={_INSTALLED}"),
        *("dnf", f"--config={place}/dnf.conf", f"--installroot={place}/root", "--assumeyes"),
        *(f"--releasever={recipe.suite}", "--quiet", "install", "--", *_packages(recipe)),
        timeout=BOOTSTRAP_TIMEOUT,
        stage="dnf",
    )
