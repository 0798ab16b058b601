"""Checkpoint options of a job: refused at submission if they cannot be fulfilled."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vtorque_core.api import ConfigError, Refused
from vtorque_core.live import service
from vtorque_iocm import plugin as iocm
from vtorque_passthrough import plugin as passthrough
from vtorque_survive import plugin
from vtorque_survive.resume_options import BEFORE_WALLTIME, CHECKPOINT, NEVER
from vtorque_testing import planned
from vtorque_unclot import plugin as unclot
from vtorque_vrdma import plugin as vrdma

PLACE = '[plugin.survive]\ncheckpoints = "/srv/checkpoints"\n'
GPU = '[[plugin.passthrough.classes]]\nname = "gpu"\nids = ["10de:20b0"]\n'
ASKED = ("resume=42.srv.0", "checkpoint=every:3600s", "checkpoint=before-walltime")


@pytest.fixture
def plugins():
    found = planned.load_with_core("survive", plugin)
    others = {"iocm": iocm, "passthrough": passthrough, "unclot": unclot, "vrdma": vrdma}
    for name, module in others.items():
        found.register(name, module, f"vtorque-{name} 1.0.0")
    return found


def refusal(plugins, *pairs, site=PLACE, nodes=None):
    """Return the refusal that vsub would print; empty: it submits the job."""
    node = planned.PlannedNode.make(plugins, site)
    try:
        wanted = node.request("ram=1G", *pairs)
        if nodes is not None:
            node.resolve(replace(wanted, nodes=nodes))
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("option", ["", "iocm=true", "unclot=false", "vms_per_node=2"])
def test_request_that_can_be_saved_is_accepted(plugins, asked, option):
    assert refusal(plugins, asked, *filter(None, [option])) == ""
    assert refusal(plugins, asked, nodes=1) == ""


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(
    ("other", "site"),
    [
        ("unclot=true", ""),
        ("vrdma=true", ""),
        ("pci=gpu:1", GPU),
        ("", "[options.unclot]\ndefault = true\n"),
    ],
)
def test_option_that_cannot_be_saved_is_refused_with_a_fix(plugins, asked, other, site):
    key = other.partition("=")[0] or "unclot"
    text = refusal(plugins, asked, *filter(None, [other]), site=PLACE + site)
    assert f"{asked}: a job with {key} cannot be saved" in text
    assert f"leave out {key}, or this" in text
    assert refusal(plugins, *filter(None, [other]), site=site) == "", (
        "the option is refused without a checkpoint option, too"
    )


@pytest.mark.parametrize("asked", ASKED)
def test_disk_file_option_is_accepted_if_the_job_ends_after_the_save(plugins, asked):
    text = refusal(plugins, asked, "disk=/home/ada/data.raw")
    if "every" in asked:
        assert f"{asked}: a job that uses disk and continues after a checkpoint" in text
        assert "use before-walltime, or leave out disk" in text
    else:
        assert text == ""


@pytest.mark.parametrize("asked", ASKED)
def test_site_without_checkpoints_and_several_nodes_are_refused(plugins, asked):
    text = refusal(plugins, asked, site="")
    assert (
        "checkpoints are disabled on this site" in text and "[plugin.survive] checkpoints" in text
    )
    text = refusal(plugins, asked, nodes=2)
    assert re.search(r"on several nodes \(this one: 2\).*checkpoints_shared.*one node", text)
    assert refusal(plugins, "checkpoint=never", site="", nodes=2) == refusal(plugins, site="") == ""


@pytest.mark.parametrize("asked", ASKED)
def test_several_nodes_need_a_shared_directory_and_slurm(plugins, asked, monkeypatch):
    batch = SimpleNamespace(knows_all_nodes=True)
    monkeypatch.setattr(service, "batch_system", lambda _: (None, batch))
    all_see = PLACE + "checkpoints_shared = true\n"
    assert refusal(plugins, asked, nodes=2, site=all_see) == ""
    batch.knows_all_nodes = False
    assert "and Slurm" in refusal(plugins, asked, nodes=2, site=all_see)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("checkpoint=hourly", "write every:TIME, as in every:1h, or before-walltime or never"),
        ("checkpoint=every:", "is not a duration"),
        ("checkpoint=every:0", "write at least 1 s"),
        ("checkpoint=every:90s", "checkpoints more often than every 600 s are not allowed"),
        ("checkpoint=every:99999999d", "less than the job's walltime"),
        ("resume=../43.srv.0", "is not a checkpoint's id: write the id that"),
        ("resume=a/b", "is not a checkpoint"),
    ],
)
def test_invalid_value_is_refused(plugins, value, why):
    assert why in refusal(plugins, value)


@pytest.mark.parametrize("text", ["every:60s", "every:86400s", "before-walltime", "never"])
def test_value_is_shown_as_users_write_it(text):
    assert CHECKPOINT.show(CHECKPOINT.parse(text)) == text
    assert CHECKPOINT.parse("Every:2M") == 120 < BEFORE_WALLTIME < NEVER


def test_site_limits_the_interval(plugins):
    site = PLACE + '[options.checkpoint]\nmin = "every:10m"\n'
    text = refusal(plugins, "checkpoint=every:5m", site=site)
    assert "is less than allowed (limit: every:600s, set by [options.checkpoint] min" in text
    for granted in ("every:10m", "before-walltime", "never"):
        assert refusal(plugins, f"checkpoint={granted}", site=site) == ""
    with pytest.raises(ConfigError, match="the default of checkpoint"):
        refusal(plugins, site=PLACE + '[options.checkpoint]\nmax = "every:1d"\n')
    denied = PLACE + '[options.checkpoint]\ndeny = ["before-walltime"]\n'
    assert "is not allowed" in refusal(plugins, "checkpoint=before-walltime", site=denied)


@pytest.mark.parametrize("asked", [*ASKED, ""])
@pytest.mark.parametrize("sites", ["", '[options.checkpoint]\ndefault = "every:1h"\n'])
def test_requests_for_checkpoints_set_the_need_save(plugins, asked, sites):
    node = planned.PlannedNode.make(plugins, sites + PLACE)
    wanted = node.request("ram=1G", *filter(None, [asked]))
    assert wanted.needs == ({"save"} if asked or sites else set())
