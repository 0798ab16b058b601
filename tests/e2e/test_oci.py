"""A container as a VM job: built by umoci, its own libraries, environment and entry point."""

import json
import os
import pwd
import shutil
import subprocess

import pytest

from oci_images import as_sif

pytestmark = [pytest.mark.e2e, pytest.mark.full]

MUSL = "/lib/ld-musl-x86_64.so.1"
ARGS = ("-vm", "img=oci-test,ram=256M")


def tool(*argv, cwd=None):
    done = subprocess.run(argv, capture_output=True, cwd=cwd, timeout=120, check=False)
    assert done.returncode == 0, (argv, done.stderr)


def compile_app(root, scratch):
    """A program with a library of its own, both linked to the container's musl, not to glibc."""
    (scratch / "answer.c").write_text('const char *answer(void) { return "the library"; }\n')
    (scratch / "greet.c").write_text(
        "#include <stdio.h>\n#include <stdlib.h>\nconst char *answer(void);\n"
        'int main(int c, char **v) { printf("%s says %s to %s\\n", getenv("GREETING"), answer(),'
        ' c > 1 ? v[1] : "nobody"); return c > 2 ? atoi(v[2]) : 0; }\n'
    )
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
        argv = [word for option in (f"source={path}", *options) for word in ("-o", option)]
        node.root("vmgr", "images", "build", "oci-test", "oci", *argv, timeout=300)
        return json.loads(node.root("vmgr", "images", "show", "oci-test", "--json").stdout)

    yield build
    node.root("vmgr", "images", "remove", "oci-test", "--when-free", check=False)


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


def test_a_container_runs_the_job_with_its_own_files_and_environment(node, clean, built):
    shown = built()
    assert shown["labels"]["container"] == "/usr/lib/vtorque"
    result = clean.job(SCRIPT, *ARGS)
    assert result.code == 7, result.err
    who, release, gone, greeting, entry, again, job = result.out.decode().splitlines()
    entry_of_user = pwd.getpwnam(clean.user)
    assert who == f"{clean.user} {entry_of_user.pw_uid} {clean.home} {clean.home}"
    assert release == "ID=strange"
    assert "No such file" in gone
    assert greeting == "the image says the library to you"
    assert (entry, again) == ("entry: the image", "the image says the library to them")
    assert job


def test_the_entry_point_starts_the_script_where_it_is_told_to(node, clean, built):
    built("entrypoint=run")
    result = clean.job("#!/bin/sh\necho script $GREETING\nexit 3\n", *ARGS)
    assert (result.code, result.out) == (3, b"entry: the image\nscript the image\n")
    result = clean.job("#!/bin/sh\necho $GREETING\n", *ARGS, "-v", "GREETING=the user")
    assert (result.code, result.out) == (0, b"entry: the user\nthe user\n")
    result = clean.job("#!/bin/bash\ntrue\n", *ARGS)
    assert result.code == 127
    assert b"not found" in result.err or b"does not exist" in result.err


def test_a_sif_runs_the_job_with_its_environment_and_runscript(node, clean, built, tmp_path):
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
    built(path=as_sif(root, tmp_path / "app.sif"))
    script = "#!/bin/sh\necho script $GREETING $(/bin/busybox id -u)\nexit 4\n"
    result = clean.job(script, *ARGS)
    uid = pwd.getpwnam(clean.user).pw_uid
    assert (result.code, result.out) == (4, f"script the SIF {uid}\n".encode()), result.err
    built("entrypoint=run", path=tmp_path / "app.sif")
    result = clean.job(script, *ARGS)
    assert result.out == f"runscript: the SIF\nscript the SIF {uid}\n".encode(), result.err
