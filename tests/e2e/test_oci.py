"""A container as a VM job: built by umoci, its own libraries, environment and entry point."""

import json
import os
import pwd
import shutil
import subprocess

import pytest

from oci_images import as_directory, as_sif, layer, layout_files

pytestmark = [pytest.mark.e2e, pytest.mark.full]

MUSL = "/lib/ld-musl-x86_64.so.1"
ARGS = ("-vm", "img=oci-test,ram=256M")

GREET = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/xattr.h>
const char *answer(void);
int main(int c, char **v) {
    char note[9] = "";
    if (c > 2 && getxattr("/opt/app/noted", "user.note", note, 8) > 0)
        puts(note);
    printf("%s says %s to %s\n", getenv("GREETING"), answer(), c > 1 ? v[1] : "nobody");
    return c > 2 ? atoi(v[2]) : 0;
}
"""


def tool(*argv, cwd=None):
    done = subprocess.run(argv, capture_output=True, cwd=cwd, timeout=120, check=False)
    assert done.returncode == 0, (argv, done.stderr)


def compile_app(root, scratch):
    """A program with its own library, both linked to the container's musl, not to glibc."""
    (scratch / "answer.c").write_text('const char *answer(void) { return "the library"; }\n')
    (scratch / "greet.c").write_text(GREET)
    lib, program = root / "opt/app/lib/libanswer.so", root / "opt/app/bin/greet"
    for path in (lib, program, root / MUSL[1:]):
        path.parent.mkdir(parents=True, exist_ok=True)
    tool("musl-gcc", "-shared", "-fPIC", "-o", str(lib), "answer.c", cwd=scratch)
    tool("musl-gcc", "-o", str(program), "greet.c", f"-L{lib.parent}", "-lanswer", cwd=scratch)
    shutil.copy(os.path.realpath(MUSL), root / MUSL[1:])


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """An OCI image layout with two layers, as umoci writes it."""
    scratch = tmp_path_factory.mktemp("oci")
    layout, bundle = scratch / "layout", scratch / "bundle"
    image = f"{layout}:test"
    tool("umoci", "init", "--layout", str(layout))
    tool("umoci", "new", "--image", image)
    tool("umoci", "unpack", "--image", image, str(bundle))
    root = bundle / "rootfs"
    (root / "bin").mkdir()
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    for applet in ("sh", "id", "cat", "ls", "env", "echo"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text("ID=strange\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/:/bin/sh\n")
    (root / "gone").write_text("a file of the first layer\n")
    tool("umoci", "repack", "--image", image, str(bundle))
    shutil.rmtree(bundle)
    tool("umoci", "unpack", "--image", image, str(bundle))
    (root / "gone").unlink()
    compile_app(root, scratch)
    (root / "opt/app/noted").touch()
    os.setxattr(root / "opt/app/noted", "user.note", b"kept")
    entry = root / "opt/app/bin/entry"
    entry.write_text('#!/bin/sh\necho "entry: $GREETING"\nexec "$@"\n')
    entry.chmod(0o755)
    tool("umoci", "repack", "--image", image, str(bundle))
    tool(
        "umoci", "config", "--image", image, "--config.entrypoint", "/opt/app/bin/entry",
        "--config.cmd", "/opt/app/bin/greet", "--config.user", "app",
        "--config.env", "GREETING=the image", "--config.env", "HOME=/root",
        "--config.env", "PATH=/opt/app/bin:/bin",
        "--config.env", "LD_LIBRARY_PATH=/opt/app/lib",
    )  # fmt: skip
    return layout


@pytest.fixture
def built(node, layout):
    """Build the image with the options given; it is removed afterwards."""

    def build(*options, path=layout):
        argv = [word for option in options for word in ("-o", option)]
        node.root("vmgr", "images", "build", "oci-test", "--oci", str(path), *argv, timeout=300)
        return json.loads(node.root("vmgr", "images", "show", "oci-test", "--json").stdout)

    yield build
    node.root("vmgr", "images", "remove", "oci-test", "--when-free", check=False)


ESCAPE = r"""
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) { /* what makes the kernel start a program as root */
    socket(AF_APPLETALK, SOCK_DGRAM, 0);
    long key = syscall(SYS_request_key, "user", "vtorque-test", "x", -2);
    printf("asked %d\n", key < 0);
    return 0;
}
"""


def make_hostile(root, scratch):
    """Attempts of a container's author to make the job's user, or the author, root in the guest."""
    root.mkdir()
    for name in ("sbin", "bin", "opt", "usr/lib", "lib/modules", "etc"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    for applet in ("sh", "id", "ls", "mv", "sleep", "touch", "chmod"):
        (root / "bin" / applet).symlink_to("busybox")
    mark = '#!/bin/sh\necho "$0 $(/bin/busybox id -u)" >>/opt/escaped\n'
    for name in ("modprobe", "request-key", "restorecon", "mount.virtiofs"):
        (root / "sbin" / name).write_text(mark)
        (root / "sbin" / name).chmod(0o755)
    (scratch / "escape.c").write_text(ESCAPE)
    tool("musl-gcc", "-static", "-o", str(root / "opt/escape"), "escape.c", cwd=scratch)
    for name in ("", "usr", "usr/lib", "lib", "lib/modules", "sbin", "etc"):
        (root / name).chmod(0o777)


SCRIPT = """#!/bin/sh
echo "$(id -un) $(id -u) $(pwd) $HOME"
cat /etc/os-release
ls /gone 2>&1
greet you 7
code=$?
/usr/lib/vtorque/entrypoint greet them
echo $PBS_JOBID
exit $code
"""


HOSTILE = """#!/bin/sh
/opt/escape
sleep 1
busybox cat /opt/escaped 2>/dev/null || echo no escape
moved=0
for path in /usr /usr/lib /usr/lib/vtorque /lib/modules /sbin /etc; do
    mv $path $path.old 2>/dev/null && moved=$((moved + 1)) && echo moved $path
    touch $path/new 2>/dev/null && moved=$((moved + 1)) && echo wrote $path
done
echo $moved moved
"""


def test_container_runs_the_job_with_its_files_and_environment(node, clean, built):
    shown = built()
    assert shown["labels"]["container"] == "/usr/lib/vtorque"
    result = clean.job(SCRIPT, *ARGS)
    assert result.code == 7, result.err
    who, release, gone, note, greeting, entry, again, job = result.out.decode().splitlines()
    entry_of_user = pwd.getpwnam(clean.user)
    assert who == f"{clean.user} {entry_of_user.pw_uid} {clean.home} {clean.home}"
    assert release == "ID=strange"
    assert "No such file" in gone
    assert note == "kept"
    assert greeting == "the image says the library to you"
    assert (entry, again) == ("entry: the image", "the image says the library to them")
    assert job


def test_entry_point_starts_the_script_if_configured(node, clean, built):
    built("entrypoint=run")
    result = clean.job("#!/bin/sh\necho script $GREETING\nexit 3\n", *ARGS)
    assert (result.code, result.out) == (3, b"entry: the image\nscript the image\n")
    result = clean.job("#!/bin/sh\necho $GREETING\n", *ARGS, "-v", "GREETING=the user")
    assert (result.code, result.out) == (0, b"entry: the user\nthe user\n")
    result = clean.job("#!/bin/bash\ntrue\n", *ARGS)
    assert result.code == 127
    assert b"not found" in result.err or b"does not exist" in result.err


def test_sif_runs_the_job_with_its_environment_and_runscript(node, clean, built, tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    env = root / ".singularity.d/env"
    env.mkdir(parents=True)
    (env / "90-environment.sh").write_text('export GREETING="the $(echo SIF)"\n')
    runscript = root / ".singularity.d/runscript"
    runscript.write_text('#!/bin/sh\necho "runscript: $GREETING"\nexec "$@"\n')
    runscript.chmod(0o755)
    sif = tmp_path / "app.sif"
    as_sif(root, tmp_path / "root.sif")  # for its squashfs; siftool is of Singularity's authors
    tool("siftool", "new", str(sif))
    tool(
        "siftool", "add", "--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", "2",
        str(sif), str(tmp_path / "root.squashfs"),
    )  # fmt: skip
    built(path=sif)
    script = "#!/bin/sh\necho script $GREETING $(/bin/busybox id -u)\nexit 4\n"
    result = clean.job(script, *ARGS)
    uid = pwd.getpwnam(clean.user).pw_uid
    assert (result.code, result.out) == (4, f"script the SIF {uid}\n".encode()), result.err
    built("entrypoint=run", path=sif)
    result = clean.job(script, *ARGS)
    assert result.out == f"runscript: the SIF\nscript the SIF {uid}\n".encode(), result.err


def test_hostile_container_has_no_root_in_the_guest(node, clean, built, tmp_path):
    """The guest's root and kernel run no file of it; no user can change the files that they run."""
    make_hostile(tmp_path / "root", tmp_path)
    archive = tmp_path / "layer.tar"
    tool("tar", "-C", str(tmp_path / "root"), "-cf", str(archive), ".")
    files = layout_files([archive.read_bytes()], Env=["PATH=/bin"])
    built(path=as_directory(files, tmp_path / "hostile"))
    result = clean.job(HOSTILE, *ARGS)
    lines = result.out.decode().splitlines()
    assert lines == ["asked 1", "no escape", "0 moved"], (lines, result.err)


def test_all_container_formats_give_the_same_image(node, clean, built, tmp_path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/sh")
    lower = tmp_path / "lower.tar"
    tool("tar", "-C", str(root), "-cf", str(lower), ".")
    layers = [
        lower.read_bytes(),
        layer(("data/old", b"old", "f"), ("data/sub/old", b"old", "f"), ("hidden", b"x", "f")),
        layer(("data/new", b"new", "f"), ("data/.wh..wh..opq", b"", "f"), (".wh.hidden", b"", "f")),
    ]
    source = as_directory(layout_files(layers), tmp_path / "layout")
    hashes = {built(path=source)["sha256"]}
    for form in ("oci-archive", "docker-archive"):
        to = f"{form}:{tmp_path / form}.tar:app:1"
        tool("skopeo", "--insecure-policy", "copy", "-q", f"oci:{source}:latest", to)
        hashes.add(built(path=tmp_path / f"{form}.tar")["sha256"])
    assert len(hashes) == 1
    result = clean.job("#!/bin/sh\ncd /; echo data/* hid*; exit 5\n", *ARGS)
    assert (result.code, result.out) == (5, b"data/new hid*\n"), result.err
