"""An X server and an X client, for tests of displays."""

import secrets
import shutil
import subprocess

PROGRAMS = ("Xvfb", "xauth", "xdpyinfo")
# In a guest, whose image has no client: from the directory x of the user's home.
CLIENT = b"LD_LIBRARY_PATH=$HOME/x $HOME/x/xdpyinfo 2>&1"


def install():
    """Install Debian's packages of X clients, if one is missing."""
    apt = ["apt-get", "-qq"]
    if not all(map(shutil.which, PROGRAMS)):
        subprocess.run([*apt, "update"], check=True, timeout=300)
        more = ["-y", "--no-install-recommends", "install", "xvfb", "xauth", "x11-utils"]
        subprocess.run([*apt, *more], check=True, timeout=300)


def put(place, owner):
    """Make a directory with a client, its libraries and a server's new cookie; return that."""
    cookie = secrets.token_hex(16)
    place.mkdir()
    add = ["xauth", "-q", "-f", place / "cookies", "add", ":0", "MIT-MAGIC-COOKIE-1", cookie]
    subprocess.run(add, check=True)
    client = "/usr/bin/xdpyinfo"
    needs = subprocess.run(["ldd", client], capture_output=True, check=True).stdout.decode()
    libraries = {line.split()[2] for line in needs.splitlines() if "=>" in line}
    for path in (client, *(path for path in libraries if "/libc.so" not in path)):
        shutil.copy(path, place)
    for path in (place, place / "cookies"):
        shutil.chown(path, owner, owner)
    return cookie
