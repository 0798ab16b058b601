"""Invalid input and faults at the start: one clear line, the exit code, in time, no leftovers."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

import hooks_by_hand
from forged_request import forged
from mounts import unmount
from vtorque_core.api.submission import to_token
from vtorque_core.base.errors import EXIT_GUEST_DIED, EXIT_HOST_FAULT, EXIT_REFUSED, EXIT_USAGE
from vtorque_core.config.request import Request
from vtorque_core.images import store
from vtorque_core.images.pool import describe
from vtorque_images import change

pytestmark = pytest.mark.e2e

SCRIPT = "#!/bin/sh\necho ran\n"


@pytest.fixture
def image(node):
    """Return a function that adds a variant of the micro image to the pool for one test."""
    pool = node.state / "images"
    made = []

    def variant(name, cmdline):
        micro = describe(pool, "micro")
        with store.staging(pool) as staging:
            for file in micro.files:
                shutil.copy(pool / "micro" / micro.version / file, staging / file)
            built = replace(micro.built, cmdline=f"{micro.built.cmdline} {cmdline}".strip())
            made.append(name)
            return change.commit(pool, name, staging, built, "test")

    yield variant
    for name in made:
        shutil.rmtree(pool / name)


# -- Faults ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_deadline")
def test_kernel_panic_at_boot_fails_the_start(clean, image):
    image("panics", "rdinit=/nonexistent")
    result = clean.job(SCRIPT, "-vm", "img=panics")
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    lines = result.err.decode().splitlines()
    assert "the guest died" in lines[0]
    assert any("Kernel panic" in line for line in lines[1:]), lines
    assert all(line.startswith("vtorque: ") and line.isprintable() for line in lines)
    assert len(lines) <= 22


def test_guest_that_never_gets_ready_fails_the_start(clean, image, config):
    image("sleeps", "rdinit=/bin/sleep -- 1000")
    config("node", 'start_timeout = "20s"')
    result = clean.job(SCRIPT, "-vm", "img=sleeps")
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert "was not ready in time" in result.err.decode().splitlines()[0]
    assert "start_timeout" in result.err.decode().splitlines()[0]


@pytest.mark.usefixtures("no_deadline")
def test_death_of_one_guest_ends_the_start_of_all(clean, image):
    """The start does not wait for the other guest, which never becomes ready."""
    image("sleeps", "rdinit=/bin/sleep -- 1000")
    job = hooks_by_hand.Hooks(clean, "two.faults", pairs=(("img", "sleeps"), ("vms_per_node", "2")))
    process = job.start("prologue")
    first = job.qemu()
    journal = clean.state / "journal/two.faults.0.jsonl"
    clean.wait_for(lambda: '"name": "ready"' in journal.read_text(), what="two guests that boot")
    job.killed_qemu(first, process)
    code, _, err = job.wrapper()
    assert code == EXIT_HOST_FAULT
    assert "the guest died" in err
    job.release("epilogue")


@pytest.mark.full
@pytest.mark.usefixtures("no_deadline")
def test_job_without_libvirtd_fails_with_one_clear_line(clean):
    hooks_by_hand.kill_libvirtd()
    try:
        result = clean.job(SCRIPT)
    finally:
        hooks_by_hand.start_libvirtd(clean)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert result.err.count(b"\n") == 1
    assert b"libvirtd does not answer" in result.err


@pytest.fixture
def full(node):
    """Return a function that mounts a small disk over one of the node's directories."""
    mounted = []

    def over(directory, kib, *, filled=False):
        mode = f"{directory.stat().st_mode & 0o777:o}"
        options = f"size={kib}k,mode={mode}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "t", directory], check=True)
        mounted.append(directory)
        if filled:
            subprocess.run(["fallocate", "-l", f"{kib}K", directory / "filler"], check=True)

    yield over
    for directory in mounted:
        left = [p.name for p in directory.rglob("*") if p.name != "filler"]
        unmount(directory)
        assert left == []


@pytest.mark.usefixtures("no_deadline")
@pytest.mark.parametrize(("kib", "filled"), [(4, True), (16, False)])
def test_full_disk_for_guest_files_fails_the_start(clean, full, kib, filled):
    full(clean.state / "jobs", kib, filled=filled)
    result = clean.job(SCRIPT)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert result.err.count(b"\n") == 1
    assert b"pre-boot" in result.err or b"seed" in result.err
    assert b"No space left on device" in result.err


@pytest.mark.usefixtures("no_deadline")
@pytest.mark.parametrize("filled", [True, False])
def test_full_disk_for_the_journal_fails_the_start(clean, full, filled):
    """The disk fills before the first record, or later: two guests' records take 8 KiB."""
    full(clean.state / "journal", 4, filled=filled)
    result = clean.job(SCRIPT, "-vm", "vms_per_node=2")
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert b"journal" in result.err
    assert b"No space left on device" in result.err


@pytest.mark.full
@pytest.mark.usefixtures("no_deadline")
def test_script_that_crashes_its_guest_kernel_fails_the_job(clean, config, scratch):
    """The guest's own root has made the panic trigger writable for all users."""
    scripts = clean.config.parent / "guest-prologue"
    scripts.mkdir()
    (scripts / "10-button").write_text("#!/bin/sh\nchmod 666 /proc/sysrq-trigger\n")
    (scripts / "10-button").chmod(0o755)
    config("plugin.linux-guest", f'prologue = "{scripts}"')
    try:
        text = "#!/bin/sh\necho before\nsleep 1\necho c > /proc/sysrq-trigger\nsleep 60\n"
        result = clean.job(text)
    finally:
        shutil.rmtree(scripts)
    assert (result.code, result.out) == (EXIT_GUEST_DIED, b"before\n")
    assert b"died while the job ran" in result.err
    assert re.search(rb"=>> vtorque: \S+: the end of the console of vt-\S+:\n", result.err)
    assert re.search(rb"=>> vtorque: \S+: \| .*Kernel panic - not syncing: sysrq", result.err)
    assert not re.search(rb"[^\n -~]", result.err)
    assert len(result.err.splitlines()) < 55


@pytest.mark.full
def test_failing_guest_prologue_of_the_site_fails_the_start(clean, config):
    scripts = clean.config.parent / "guest-prologue"
    scripts.mkdir()
    (scripts / "10-fails").write_text("#!/bin/sh\necho no licence server >&2\nexit 9\n")
    (scripts / "10-fails").chmod(0o755)
    config("plugin.linux-guest", f'prologue = "{scripts}"')
    try:
        result = clean.job(SCRIPT)
    finally:
        shutil.rmtree(scripts)
    assert (result.code, result.out) == (EXIT_HOST_FAULT, b"")
    assert b"10-fails" in result.err
    assert b"no licence server" in result.err
    job = result.done.stdout.decode().split()[0]
    said = clean.as_user("vmgr", "logs", "--cloud-init", job, check=False)
    assert said.returncode == EXIT_USAGE
    assert b"no cloud-init log" in said.stderr, "the missing log of cloud-init is not reported"


# -- Invalid images --------------------------------------------------------------------------------


def spoil_content(directory, version):
    file = next((directory / version).iterdir())
    with file.open("ab") as out:
        out.write(b"x")


def spoil_sidecar(directory, version):
    sidecar = directory / "image.json"
    data = json.loads(sidecar.read_text())
    file = next(iter(data["files"].values()))
    file["sha256"] = "0" * 64
    sidecar.write_text(json.dumps(data))


def empty_sidecar(directory, version):
    (directory / "image.json").write_text("")


def open_sidecar(directory, version):
    (directory / "image.json").chmod(0o666)


def open_file(directory, version):
    next((directory / version).iterdir()).chmod(0o646)


def open_directory(directory, version):
    (directory / version).chmod(0o777)


def open_pool(directory, version):
    directory.parent.chmod(0o777)


OTHER_SPOILERS = [
    pytest.param(spoil, marks=pytest.mark.full)
    for spoil in (spoil_sidecar, empty_sidecar, open_sidecar, open_file, open_directory)
]


@pytest.mark.parametrize(
    "spoil", [spoil_content, open_pool, *OTHER_SPOILERS], ids=lambda f: f.__name__
)
def test_untrusted_image_is_refused(clean, image, spoil):
    """Refused by vsub, and by the node if vsub was bypassed."""
    pool = clean.state / "images"
    made = image("spoilt", "")
    mode = pool.stat().st_mode & 0o7777
    spoil(pool / "spoilt", made.kernel.parent.name)
    try:
        refused(clean, "-vm", "img=spoilt", "job.sh")
        job = hooks_by_hand.Hooks(clean, "spoilt.faults", pairs=(("img", "spoilt"),))
        assert job.run("prologue")[0] == 0
        code, out, err = job.wrapper()
        assert job.run("epilogue")[0] == 0
    finally:
        pool.chmod(mode)
    assert (code, out) == (EXIT_REFUSED, "")
    assert err.count("\n") == 1
    assert err.startswith("vtorque: ")


# -- Invalid input ---------------------------------------------------------------------------------


# vsub for each of many command lines (JSON on standard input), each in a fork of a process that has
# imported its modules: an interpreter for each would take most of the time.
_VSUBS = """
import json, os, sys, tempfile
from pathlib import Path
from vtorque_core.cli.vsub import main
from vtorque_core.config.load import load
rows, found = json.load(sys.stdin), []
load(Path(rows[0][1]), node=False)
for argv in rows:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["vsub", *argv]
            main()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [os.pread(each.fileno(), 1 << 20, 0).decode() for each in (out, err)]
        found.append((code, *said))
print(json.dumps(found))
"""


def vsubs(node, rows):
    """Run vsub with each row's arguments as the user; return exit codes, outputs and errors."""
    argv = [["--config", str(node.config), *row] for row in rows]
    python = (str(node.prefix / "bin/python3"), "-I", "-c", _VSUBS)
    return json.loads(node.as_user(*python, stdin=json.dumps(argv).encode()).stdout)


def all_refused(node, rows):
    """Submit with the arguments of each row; check that each is refused in one line that names it.

    A row has the arguments and a word of the message. No submission may create anything.
    """
    for old in ("out", "err"):
        (node.home / old).unlink(missing_ok=True)
    node.script(SCRIPT)
    before = {p for p in (node.state / "local").rglob("*") if p.is_file()}
    mine = {p.name for p in node.home.iterdir()}
    found = vsubs(node, [("-o", "out", "-e", "err", *args) for args, _ in rows])
    for (args, word), (code, out, message) in zip(rows, found, strict=True):
        assert (code, out) == (EXIT_USAGE, ""), (args, message)
        assert message.startswith("vsub: "), args
        assert message.count("\n") == 1, (args, message)
        assert message[:-1].isprintable(), (args, message)
        assert word in message, (args, message)
    assert {p.name for p in node.home.iterdir()} == mine
    assert {p for p in (node.state / "local").rglob("*") if p.is_file()} == before
    assert json.loads(node.as_user("vmgr", "ps", "--json").stdout) == []


def refused(node, *args, word=""):
    """Submit, and check that the refusal is one line that contains the word."""
    all_refused(node, [(args, word)])


HOSTILE = ["../micro", "/etc/passwd", "..", ".", "mi'cro", 'mi"cro', "mi\ncro", "<mi>&cro;",
           "$(id)", "`id`", "mi;cro", "mi cro", "mi\x1b[31mcro", "x" * 5000,
           "mic\u202ero"]  # fmt: skip


def test_hostile_image_names_are_refused(clean):
    all_refused(clean, [(("-vm", f"img={name}", "job.sh"), "") for name in HOSTILE])


BAD_ARGUMENTS = [
    (["-vm", "imgg=micro"], "img"),
    (["-vm", "ram=256M,ram=512M"], "twice"),
    (["-vm", "ram=256M", "-vm", "ram=512M"], "twice"),
    (["-vm", "img=nosuch"], "nosuch"),
    (["-vm", "ram=8G"], "options.ram"),
    (["-vm", "ram=-1"], "ram"),
    (["-vm", "ram="], "ram"),
    (["-vm", "ram"], "ram"),
    (["-vm", "=1"], ""),
    (["-vm", ""], ""),
    (["-vm"], "-vm"),
    (["-vm", "vcpus=0"], "vcpus"),
    (["-vm", "vcpus=\uff11"], "vcpus"),
    (["-vm", "keep=1"], "keep"),
    (["-vm", "none,ram=1G"], "none"),
    (["-vm", "distro=nosuch"], "nosuch"),
    (["-vm", "vm_prologue=missing.sh"], "missing.sh"),
    (["-vm", "vm_prologue=/root/.profile"], "ermission"),
    (["-vm", "vm_prologue=."], "directory"),
    (["-N", "a b"], "-N"),
    (["-N", "a\nb"], "-N"),
    (["-N", "a/b"], "-N"),
    (["-l", "nodes=2"], "nodes"),
    (["-Z"], "-Z"),
    (["-S", "sh"], "-S"),
]


def test_bad_arguments_are_refused(clean, config):
    config("options.ram", 'max = "1G"')
    # An option without its value takes the script as the value, which is then invalid.
    all_refused(clean, [((*args, "job.sh"), word) for args, word in BAD_ARGUMENTS])


def test_bad_directive_in_the_script_is_refused(clean):
    path = clean.home / "directive.sh"
    path.write_text("#!/bin/sh\n#VSUB -vm nosuch=1\n")
    path.chmod(0o755)
    refused(clean, "directive.sh", word="nosuch")
    path.unlink()


def test_unreadable_scripts_are_refused(clean):
    bad = [clean.home / f"bad-{kind}.sh" for kind in ("missing", "directory", "unreadable", "fifo")]
    _, directory, unreadable, fifo = bad
    directory.mkdir()
    unreadable.write_text(SCRIPT)
    unreadable.chmod(0o000)
    subprocess.run(["mkfifo", "-m", "666", fifo], check=True)
    all_refused(clean, [((path.name,), path.name) for path in bad])
    directory.rmdir()
    unreadable.unlink()
    fifo.unlink()


# -- Forged requests -------------------------------------------------------------------------------


def raw(document):
    return to_token(json.dumps(document).encode())


FORGED = {
    "unknown key": (to_token(Request((("nosuch", "1"),)).encode()), "nosuch"),
    "value above the limit": (to_token(Request((("ram", "8G"),)).encode()), "options.ram"),
    "path out of the image pool": (to_token(Request((("img", "../micro"),)).encode()), "img"),
    "XML": (to_token(Request((("img", "<a/>&\x01\n"),)).encode()), "img"),
    "duplicate key": (
        raw({"v": 1, "vm": [["ram", "1G"], ["ram", "1G"]], "files": {}, "shell": None}), "twice"
    ),
    "not JSON": (to_token(b"{"), "request"),
    "not base64": ("vt1:A", "token"),
    "no type": ("vt1:BBBB", "token"),
    "not zlib": ("vt1:AQEB", "token"),
    "empty": (to_token(b""), "request"),
}  # fmt: skip


ALWAYS = ("value above the limit", "path out of the image pool", "XML", "not zlib")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ALWAYS, id="some"),
        pytest.param([*FORGED.keys() - set(ALWAYS)], id="others", marks=pytest.mark.full),
    ],
)
def test_forged_requests_are_refused(clean, config, names):
    config("options.ram", 'max = "1G"')
    before = clean.footprint()
    for what in names:
        token, word = FORGED[what]
        answer, out, err = forged(clean, token)
        assert answer.get("code") == EXIT_REFUSED, (what, answer, err)
        assert out == "", what
        assert err.count("\n") == 1, (what, err)
        assert err.startswith("vtorque: "), (what, err)
        assert err[:-1].isprintable(), (what, err)
        assert word in err, (what, err)
        assert not clean.left(before), what


@pytest.mark.full
def test_valid_request_sent_like_a_forged_one_runs(clean):
    """The control of the tests above: a valid request, sent in the same way, runs."""
    answer, out, err = forged(clean, to_token(Request(()).encode()))
    assert (answer["code"], out, err) == (0, "ran\n", "")
