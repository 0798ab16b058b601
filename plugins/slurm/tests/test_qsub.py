"""``vsub`` in front of Slurm's own qsub, with a double that calls sbatch in the same way."""

import pytest

from vtorque_core.api import Paths, UsageError
from vtorque_core.api.batch_system import Needs
from vtorque_slurm import qsub as qsub_submitter
from vtorque_slurm.qsub import INNER, QsubSubmitter
from vtorque_slurm.settings import Settings
from vtorque_slurm.submitter import SlurmSubmitter, create_submitter
from vtorque_testing.harness import PluginSite

QSUB = """#!/bin/sh
case $1 in -I) shift; exec "$(dirname "$0")/salloc" -N1 "$@" ;; esac
shift 2
"$(dirname "$0")/sbatch" -J n -o n.o%A "$@"; echo code $?; exit 7
"""
VSUB = '#!/bin/sh\necho "<$VTORQUE_SLURM_SBATCH>" "$@"\nexit 3\n'


@pytest.fixture
def qsub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(INNER, raising=False)
    for name, text in {"qsub": QSUB, "vsub": VSUB, "srun": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(qsub_submitter, "_vsub_path", lambda: str(tmp_path / "vsub"))
    (tmp_path / "job.sh").write_text("#!/bin/sh\n#PBS -vm note=x\n")
    site = PluginSite(Paths(), (Settings(command="qsub", bindir=str(tmp_path)),))
    found = create_submitter(site)
    assert isinstance(found, QsubSubmitter)
    monkeypatch.setenv(INNER, "1")
    assert isinstance(create_submitter(site), SlurmSubmitter), "qsub would call itself endlessly"
    monkeypatch.delenv(INNER)
    return found


def test_vm_is_removed_only_before_the_script(qsub):
    args = qsub.split(["-N", "n", "-vm", "ram=1G", "-l", "nodes=2", "job.sh", "-vm", "x"])
    assert args.vm == ("ram=1G",)
    assert args.rest == ("-N", "n", "-l", "nodes=2", "job.sh", "-vm", "x")
    assert (args.script, args.directives, args.interactive) == ("job.sh", ("note=x",), False)
    args = qsub.split(["-I", "-pe", "shm", "4", "-j", "oe", "-j", "-W", "block=true", "-N=x"])
    assert args.rest == ("-I", "-pe", "shm", "4", "-j", "oe", "-j", "-W", "block=true", "-N=x")
    assert args.interactive
    args = qsub.split(["-b", "y", "no-such-command", "-vm"])
    assert (args.script, args.rest[2:]) == (None, ("no-such-command", "-vm"))
    for argv in (["-vm"], ["-N"], ["-x"], ["-pe", "shm"]):
        with pytest.raises(UsageError):
            qsub.split(argv)


@pytest.mark.parametrize(
    ("vm", "blob", "expected"),
    [
        (["-vm", "ram=1G"], b"x", "<1> -vm ram=1G -J n -o n.o%A job.sh a"),
        ([], b"x", "<1> -J n -o n.o%A job.sh a"),
        (["-vm", "none"], None, "<1> -vm none -J n -o n.o%A job.sh a"),
        ([], None, "<1> -vm none -J n -o n.o%A job.sh a"),
    ],
)
def test_wrapper_calls_vsub_in_place_of_sbatch(qsub, capfd, vm, blob, expected):
    args = qsub.split(["-N", "n", *vm, "job.sh", "a"])
    assert qsub.submit(args, blob, Needs(1, 1) if blob else None) == 7
    assert capfd.readouterr().out.splitlines() == [expected, "code 3"]


def test_interactive_job_is_submitted_with_its_arguments(qsub, capfd):
    assert qsub.submit(qsub.split(["-I", "-vm", "ram=1 'G"]), b"x", Needs(1, 1)) == 3
    assert capfd.readouterr().out == "<1> -vm ram=1 'G -I -N1\n"


def test_temporary_directory_is_private_and_removed(qsub, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "vsub").write_text('#!/bin/sh\nstat -c %a "$PWD"/vsub-*\n')
    before = set(tmp_path.iterdir())
    qsub.submit(qsub.split(["-N", "n", "job.sh"]), b"x", Needs(1, 1))
    assert set(tmp_path.iterdir()) == before
    assert capfd.readouterr().out.startswith("700\n")
