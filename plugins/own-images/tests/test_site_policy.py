"""Own images on a site with an administrator: the policy, as the node recomputes it."""

from __future__ import annotations

from typing import Any

import pytest

from vtorque_core.api import Refused
from vtorque_core.live.site_config import Plugins, for_job
from vtorque_testing import planned

FILE = f"/home/ada/.cache/vtorque/images/{'a' * 64}.squashfs"
DISK = "/home/ada/d.qcow2#196616:1700000000000000000:12"
ALLOW = "[plugin.own-images]\nallow = true\n"
ALLOW_ROOT = f"{ALLOW}allow_root = true\n"
PER_GROUP = """
[[limits]]
group = "*"
[limits.plugins]
own-images = false
[[limits]]
group = "chem"
[limits.plugins]
own-images = true
[limits.options.root]
allow = ["none"]
[[limits]]
user = "ada"
account = "trusted"
[limits.options.root]
allow = ["none", "script"]
"""


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """Return all installed plugins."""
    return Plugins.load(node=True)


def decide_on_node(plugins: Plugins, text: str, *pairs: tuple[str, str], **facts: str) -> Any:
    """Return what the node decides about these pairs, which a user may have forged."""
    told = {"user": "ada", "group": "ada", "account": "", "queue": "batch", **facts}
    node = planned.PlannedNode.make(plugins, text)
    site, allowed = for_job(node.site, node.plugins, {k: (v,) for k, v in told.items()})
    return planned.PlannedNode(allowed, site, node.host).request(*(f"{k}={v}" for k, v in pairs))


def refusal(plugins: Plugins, text: str, *pairs: tuple[str, str], **facts: str) -> str:
    """Return the refusal of these pairs, or an empty string."""
    try:
        decide_on_node(plugins, text, *pairs, **facts)
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [FILE, DISK, "docker://debian", "./x.raw"])
def test_own_image_is_refused_unless_the_site_allows_it(plugins: Plugins, value: str) -> None:
    pairs = ("img", value), ("work", "home")
    said = refusal(plugins, "", *pairs)
    assert "which this site does not accept (set by [plugin.own-images] allow)" in said
    if value == FILE:
        assert not refusal(plugins, ALLOW, *pairs)
    assert not refusal(plugins, ALLOW_ROOT, *pairs)


@pytest.mark.parametrize("root", ["script", "true"])
def test_root_inside_has_a_separate_switch(plugins: Plugins, root: str) -> None:
    pairs = ("img", FILE), ("work", "home"), ("root", root)
    assert f"root={root}: is not allowed on this site" in refusal(plugins, ALLOW, *pairs)
    assert not refusal(plugins, ALLOW_ROOT, *pairs)


def test_own_disk_needs_root_inside(plugins: Plugins) -> None:
    said = refusal(plugins, ALLOW, ("img", DISK), ("work", "home"))
    assert "run as root of the guest" in said and "allow_root" in said


def test_default_of_root_does_not_pass_the_switch(plugins: Plugins) -> None:
    text = f'{ALLOW}[options.root]\ndefault = "script"\n'
    assert "root=script: is not allowed" in refusal(plugins, text, ("img", FILE), ("work", "home"))


@pytest.mark.parametrize(
    ("facts", "root", "allowed"),
    [
        ({}, "none", False),
        ({"group": "chem"}, "none", True),
        ({"group": "chem"}, "script", False),
        ({"group": "chem", "account": "trusted"}, "script", True),
        ({"group": "chem", "account": "trusted", "user": "eve"}, "script", False),
        ({"account": "trusted"}, "script", False),
    ],
)
def test_limits_apply_by_group_user_and_account(
    plugins: Plugins, facts: dict[str, str], root: str, allowed: bool
) -> None:
    text = f'[batch]\nsystem = "slurm"\n{ALLOW_ROOT}{PER_GROUP}'
    pairs = ("img", FILE), ("work", "home"), ("root", root)
    assert (not refusal(plugins, text, *pairs, **facts)) == allowed


@pytest.mark.parametrize(
    ("facts", "allowed"),
    [({"group": "chem"}, False), ({"group": "chem", "account": "trusted"}, True)],
)
def test_limit_of_root_applies_to_disks_whose_programs_are_root(
    plugins: Plugins, facts: dict[str, str], allowed: bool
) -> None:
    text = f'[batch]\nsystem = "slurm"\n{ALLOW_ROOT}{PER_GROUP}'
    said = refusal(plugins, text, ("img", DISK), ("work", "home"), **facts)
    assert (not said) == allowed, said
    assert allowed or '[[limits]] 2 (group = "chem") [options.root] allow' in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pci", "gpu:1"), ("vrdma", "true"), ("unclot", "true"), ("osv_mode", "x"),
        ("cloud_config", "x"), ("checkpoint", "every:1h"), ("resume", "1.vm-1"), ("iocm", "true"),
    ],
)  # fmt: skip
def test_forged_option_is_refused_on_the_node(plugins: Plugins, key: str, value: str) -> None:
    text = f'{ALLOW_ROOT}[plugin.survive]\ncheckpoints = "/var/lib/c"\n'
    said = refusal(plugins, text, ("img", FILE), ("work", "home"), (key, value))
    assert key in said


@pytest.mark.parametrize(
    ("key", "default"), [("vrdma", "true"), ("unclot", "true"), ("checkpoint", '"every:1h"')]
)
def test_device_by_default_of_the_site_is_refused(plugins: Plugins, key: str, default: str) -> None:
    text = f'{ALLOW_ROOT}[plugin.survive]\ncheckpoints = "/c"\n[options.{key}]\ndefault = {default}'
    assert key in refusal(plugins, text, ("img", FILE), ("work", "home"))


def test_second_img_and_image_of_pool_with_root_are_refused(plugins: Plugins) -> None:
    twice = ("img", "micro"), ("img", FILE), ("work", "home")
    assert "is given twice" in refusal(plugins, ALLOW, *twice)
    assert "applies only to your own image" in refusal(
        plugins, ALLOW_ROOT, ("img", "micro"), ("root", "script")
    )
