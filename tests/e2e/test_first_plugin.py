"""doc/first-plugin.md, word for word: an ordinary user runs its commands and gets its output."""

import pwd
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from users import remove_user, run

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).resolve().parents[2] / "doc/first-plugin.md").read_text()
USER = "vte2ef"
PROGRAMS = ("mypy", "pip", "pytest", "vsub", "vtorque")
BLOCK = re.compile(r"^(?:`([\w/.]+)`:\n\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
END = "-- end of block"
# The page is about a machine without a site. If this one is a node, the node's directories are not
# visible in the mount namespace: an overlay's character device 0:0 stands for a missing file.
WITHOUT_SITE = r"""
mount -t tmpfs tmpfs /mnt
for place in /etc /var/lib; do
  [ -e $place/vtorque ] || continue
  top=/mnt$place
  mkdir -p $top/upper $top/work
  chmod 755 $top/upper
  mknod $top/upper/vtorque c 0 0
  mount -t overlay -o lowerdir=$place,upperdir=$top/upper,workdir=$top/work overlay $place
  test ! -e $place/vtorque
done
exec setpriv --reuid="$1" --regid="$2" --clear-groups bash -c "$3"
"""


@pytest.fixture
def author(request):
    """Return a user with the page's environment, made from packages of this test's.

    With the parameter "all" it also has all other distributions of this checkout.
    """
    remove_user(USER)
    run("useradd", "-m", "-s", "/bin/bash", USER)
    who = pwd.getpwnam(USER)
    home = Path(who.pw_dir)
    venv = home / "vtorque-dev"
    # Debian's Python: this test's may be in root's home.
    run(f"/usr/bin/python3.{sys.version_info.minor}", "-m", "venv", "--without-pip", venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    (pip,) = re.findall(r"^pip install .*$", PAGE, re.MULTILINE)[:1]
    wanted = {"core", *re.findall(r"\./(?:plugins/)?([\w-]+)", pip)}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        ours = re.match(r"(?:_editable_impl_)?vtorque_(.+?)[.-]", path.name)
        has_all = getattr(request, "param", "") == "all"
        if has_all or ours is None or ours[1].replace("_", "-") in wanted:
            (packages / path.name).symlink_to(path)
    for name in PROGRAMS:
        text = Path(sysconfig.get_path("scripts"), name).read_text()
        first, rest = text.split("\n", 1)
        if first != "#!/bin/sh":  # vTorque's launchers find the Python beside them
            first = f"#!{venv}/bin/python"
        (venv / "bin" / name).write_text(f"{first}\n{rest}")
        (venv / "bin" / name).chmod(0o755)
    run("chown", "-hR", USER, home)
    yield who
    run("rm", "-rf", *(str(place) for place in Path("/tmp").glob(f"vtorque-{who.pw_uid}-*")))
    remove_user(USER)


def script(page):
    """Return a page's steps as a script, and the expected output of each command."""
    lines, shown = ["set -eu"], []
    for name, language, text in BLOCK.findall(page):
        if name:
            lines.append(f"cat > {name} <<'END OF FILE'\n{text}END OF FILE")
        elif language == "diff":
            lines.append(f"patch -s -p0 <<'END OF FILE'\n{text}END OF FILE")
        elif language == "sh":
            lines.append(f"{text}echo '{END}'")
            shown.append("")
        else:
            shown[-1] = text
    return "\n".join(lines), shown


def run_as(author, steps):
    """Run a script as the author, on a machine without a site; return the result."""
    home = author.pw_dir
    environ = {
        "HOME": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{home}/vtorque-dev/bin:{sysconfig.get_path('scripts')}:/usr/bin:/bin",
        "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1",
    }  # fmt: skip
    ids = (str(author.pw_uid), str(author.pw_gid))
    return subprocess.run(
        ["unshare", "-m", "sh", "-euc", WITHOUT_SITE, "sh", *ids, steps], cwd=home, env=environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o022,
        timeout=1800, check=False,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("author", ["all"], indirect=True)
def test_generated_plugins_pass_their_tests_with_all_distributions_installed(author):
    steps = """set -eu
for kind in device guest; do
  vtorque plugins new acme-$kind --$kind
  pip install -q --no-deps -e vtorque-acme-$kind
  (cd vtorque-acme-$kind && python -m pytest -q -p no:cacheprovider -m 'not full')
  pip uninstall -q -y vtorque-acme-$kind
done
"""
    done = run_as(author, steps)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == 2, done.stdout


@pytest.mark.full
def test_commands_of_the_page_print_the_shown_output(author):
    steps, shown = script(PAGE.partition("\n## 1. ")[2])
    done = run_as(author, steps)
    run_as(author, "vtorque local stop")
    assert done.returncode == 0, done.stdout
    printed = done.stdout.split(f"{END}\n")
    assert len(printed) == len(shown) + 1
    for text, output in zip(shown, printed, strict=False):
        lines = [" ".join(line.split()) for line in output.splitlines()]
        for line in text.splitlines():
            wanted = re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*")
            assert [each for each in lines if re.fullmatch(wanted, each)], (line, output)
