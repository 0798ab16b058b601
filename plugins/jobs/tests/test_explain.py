"""``vtorque config explain``: one screen with the limits for a job."""

import json
import re

import pytest
from click.testing import CliRunner

from vtorque_jobs.explain import explain


@pytest.fixture
def file(tmp_path):
    """A config that root would trust, too."""
    tmp_path.chmod(0o755)
    return tmp_path / "vtorque.toml"


def run(*args):
    return CliRunner().invoke(explain, [str(a) for a in args])


LIMITS = """\
[batch]
system = "slurm"
[[limits]]
partition = "gpu"
[limits.options.vcpus]
max = 16
[limits.options.img]
allow = ["cuda-*", "micro"]
[[limits]]
user = "root"
qos = ["low", "idle"]
[limits.plugins]
scam = false
"""


def test_explain_fits_on_one_screen(file):
    file.write_text(LIMITS)
    root = ("--file", file, "--as", "root")
    lines = run(*root, "--qos", "idle", "--partition", "gpu").stdout.splitlines()
    assert re.fullmatch(rf"{file}: a job of user root, group .*, partition gpu, qos idle", lines[0])
    assert lines[1].split("  ")[0] == '[[limits]] 1 (partition = "gpu")'
    assert [line.rsplit("  ", maxsplit=1)[1] for line in lines[1:3]] == ["counts", "counts"]
    assert lines[3:6] == [
        "img    default none; allow cuda-* micro (line 8)",
        "vcpus  default job; max 16 (line 6)",
        "plugin scam: off (line 13)",
    ]
    assert lines[6].startswith("without limits, by default: arch=none ")
    assert " ram=job " in lines[6]
    assert len(lines) == 7

    text = run(*root).stdout
    assert "line 3  may count: add --partition\n" in text
    assert "line 9  may count: add --qos\n" in text
    assert "max 16" not in text

    found = json.loads(run(*root, "--qos", "low", "--json").stdout)
    assert found["job"]["qos"] == ["low"]
    assert found["off"] == {"scam": 13}
    assert [entry["counts"] for entry in found["entries"]] == [None, True]
    assert found["options"]["vcpus"] == {"default": {"value": "job", "line": None}}


def test_explain_of_an_unknown_user_is_refused(file):
    file.touch()
    done = run("--file", file, "--as", "nobody-of-this-name")
    assert "nobody-of-this-name: there is no such user" in str(done.exception)
