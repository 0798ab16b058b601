"""Build a few fake RPMs that resemble a distribution of the Red Hat family.

They are named fake-* and suffice for dnf and for the checks of the builder, but cannot boot.
"""

import shutil
import subprocess
import time

PACKAGES = {
    "fake-shell": ((), "mkdir -p usr/bin etc; cp @BUSYBOX@ usr/bin/busybox\n"
                   "for a in sh cat mkdir id; do ln -s busybox usr/bin/$a; done\n"
                   "ln -s usr/bin bin\n"
                   "echo 'ID=\"fakehat\"' > etc/os-release\n"
                   "echo root:x:0:0:root:/root:/bin/sh > etc/passwd\n"
                   "echo 'root:*:19000:0:99999:7:::' > etc/shadow", ""),
    "fake-systemd": (("fake-shell",), "mkdir -p usr/lib/systemd/system usr/share/doc/x\n"
                     "echo not systemd > usr/lib/systemd/systemd; echo unread > usr/share/doc/x/y\n"
                     "printf '[Install]\\nWantedBy=multi-user.target\\nAlias=dbus-nm.service\\n'"
                     " > usr/lib/systemd/system/NetworkManager.service", ""),
    "fake-cloud-init": (("fake-systemd",), "mkdir -p usr/bin; echo fake > usr/bin/cloud-init",
                        "mkdir -p /var/lib/fake; id -u > /var/lib/fake/post"),
    "fake-kernel": (("fake-systemd",), "mkdir -p boot\n"
                    "for r in 5.9-1 5.10-1; do echo kernel $r > boot/vmlinuz-$r\n"
                    "echo initrd $r > boot/initramfs-$r.img; done", ""),
    "fake-tool": (("fake-shell",), "mkdir -p usr/bin; printf '#!/bin/sh\\necho tool\\n'"
                  " > usr/bin/fake-tool; chmod 755 usr/bin/fake-tool", ""),
}  # fmt: skip

_SPEC = """
Name: {name}
Version: 1
Release: 1
Summary: Not a real package
License: none
AutoReqProv: no
{requires}
%description
Not a real package.
%install
mkdir -p %{{buildroot}}; cd %{{buildroot}}
{install}
{post}
%files
/*
"""


def repository(path):
    """Build the packages and the repository's metadata below a new directory."""
    (path / "specs").mkdir(parents=True)
    busybox = shutil.which("busybox")
    for name, (requires, install, post) in PACKAGES.items():
        lines = "".join(f"Requires: {each}\n" for each in requires) or "Provides: /bin/sh"
        script = f"%post\n{post}" if post else ""
        text = _SPEC.format(
            name=name, requires=lines, install=install.replace("@BUSYBOX@", busybox), post=script
        )
        spec = path / "specs" / f"{name}.spec"
        spec.write_text(text)
        defines = (f"_topdir {path}/build", f"_rpmdir {path}/repo", "__os_install_post %{nil}")
        argv = [word for define in defines for word in ("--define", define)]
        done = subprocess.run(
            ["rpmbuild", "-bb", "--quiet", *argv, str(spec)],
            capture_output=True, check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
    subprocess.run(["createrepo_c", "-q", str(path / "repo")], check=True, capture_output=True)
    time.sleep(2)  # a file as new as the build is mistaken for one that the build made
    return path / "repo"
