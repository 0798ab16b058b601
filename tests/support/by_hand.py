"""Migrate a guest like a job's without vTorque, with sbatch, virtiofsd and virsh.

It is the baseline for migration times. The guest has everything that a job's guest has, except a
running process.
"""

import re

import reaching

NAME, PLACE = "hand", "/run/hand"
DAEMON = (
    f"setsid /usr/lib/qemu/virtiofsd --socket-path {PLACE}/fs-home.sock --shared-dir /home "
    f"--sandbox chroot >/dev/null 2>&1 & until [ -S {PLACE}/fs-home.sock ]; do sleep 0.02; done"
)
# The old placeholder ends; vTorque shrinks a job instead.
MOVE = f"""set -e
old=$(squeue -h -n {NAME} -o %i)
new=$(sbatch --parsable -J {NAME} -w "$1" -n1 -c1 --mem=1M -t60 --chdir=/ -o /dev/null \
  --wrap 'exec sleep infinity')
until [ "$(squeue -h -j "$new" -o %T)" = RUNNING ]; do sleep 0.1; done
{reaching.PLACE}/to "$1" sh -c '{DAEMON}'
virsh migrate --live --p2p --tunnelled --auto-converge {NAME} \
  "qemu+ssh://$1/system?command={reaching.PLACE}/ssh&proxy=native"
[ -z "$old" ] || scancel "$old"
"""
# ssh(1)'s arguments: options, a host, and the command for its shell.
AS_SSH = f"""#!/bin/sh
while [ "$1" != n2 ] && [ "$1" != n3 ]; do shift; done
host=$1; shift
exec {reaching.PLACE}/to "$host" sh -c "$*"
"""
LABEL = "<seclabel type='static' model='dac' relabel='no'><label>+0:+0</label></seclabel>"


def begin(site, domain, state):
    """Start a guest like ``domain`` on n2, whose files are in ``state``."""
    xml = site.root("n2", "virsh", "dumpxml", domain).replace(domain, NAME)
    xml = re.sub(r"<uuid>.*</uuid>|<alias .*/>|<target dev='vt\w*'/>|<mac .*/>", "", xml)
    xml = re.sub(r"<(metadata|seclabel)(?s:.*)</\1>", "", xml)
    xml = re.sub(r"/(run|var/lib)/vtorque/jobs/[^/]*/g0", PLACE, xml)
    xml = xml.replace("</domain>", f"{LABEL}</domain>")
    ssh = f"cat >{reaching.PLACE}/ssh; chmod 755 {reaching.PLACE}/ssh"
    site.root("n2", "sh", "-c", ssh, stdin=AS_SSH.encode())
    seed = site.root("n2", "base64", f"{state}/seed.iso")
    for node in ("n2", "n3"):
        take = f"mkdir -p {PLACE}; base64 -d >{PLACE}/seed.iso"
        site.root(node, "sh", "-c", take, stdin=seed.encode())
    site.root("n2", "sh", "-c", DAEMON)
    site.root("n2", "sh", "-c", f"cat >{PLACE}/xml; virsh create {PLACE}/xml", stdin=xml.encode())


def move(site, source, to):
    """Move it, and reserve the other node for it."""
    site.root(source, "sh", "-c", MOVE, "sh", to, timeout=300)


def end(site, node):
    """End the guest and the reservation."""
    site.root(node, "virsh", "destroy", NAME)
    site.root("head", "scancel", "-n", NAME)
