"""Sizes of guests that use the whole allocation of their job, and the limits of the site."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api.values import Extra, Image, hookimpl
from vtorque_core.api.vm_options import RAM, VCPUS, VMS_PER_NODE
from vtorque_core.base.errors import ConfigError, Refused
from vtorque_core.config.job_size import JobGrant, vcpus_on
from vtorque_core.config.policy import (
    check_options,
    check_share,
    for_job,
    needs,
    resolve,
)
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import build
from vtorque_core.config.site_file import parse_toml
from vtorque_testing.planned import load_with_core

FILE = Path("/etc/vtorque/vtorque.toml")
IMAGE = Image("tiny", "linux", "tiny", "x86_64", "0" * 64, min_ram_mib=512)


class DemandingPlugin:
    """A double of a plugin whose guests need additional CPUs and memory."""

    def __init__(self, cpus=0, mib=0, own=False):
        self.extra = Extra(cpus, mib, own)

    @hookimpl
    def vtorque_needs(self):
        return [self.extra]


def settled(granted, *pairs, site="", plugin=None, **more):
    """Return the request, its message, and the resources requested from the batch system for it."""
    plugins = load_with_core("needy", *([plugin] if plugin else []))
    made = build(parse_toml(site.encode(), FILE), plugins)
    wanted = check_options(Request(tuple(tuple(p.split("=")) for p in pairs)), made, plugins)
    job, notes = resolve(wanted, made, plugins, granted, **more)
    return job, notes, needs(job, made, plugins, more.get("disk", 0))


def size(granted, *pairs, **more):
    job, _, _ = settled(granted, *pairs, **more)
    return job[VCPUS], job[RAM]


def test_guests_are_as_large_as_the_allocation():
    assert size(JobGrant(8, 16384)) == (8, 16384 - 256)
    assert size(JobGrant(8, 16384), "vcpus=job", "ram=JOB") == (8, 16384 - 256)
    assert size(JobGrant(9, 16384), "vms_per_node=2") == (4, 8192 - 256)
    assert size(JobGrant(8, 16384), "vcpus=2", "ram=1G") == (2, 1024)
    assert size(JobGrant(8, 16384), "ram=1G") == (8, 1024)
    assert size(JobGrant(8, 16384), disk=1000) == (8, 16384 - 1256)
    assert size(JobGrant(1000000, 4096))[0] == 1024, "more vCPUs than QEMU supports"


def test_unlimited_allocation_uses_the_default_of_the_site_or_of_vtorque():
    assert size(JobGrant()) == (1, 1024)
    assert size(JobGrant(4)) == (4, 1024)
    assert size(JobGrant(None, 4096)) == (1, 4096 - 256)
    site = "[options.ram]\ndefault = '2G'\n[options.vcpus]\ndefault = 3\n"
    assert size(JobGrant(), site=site) == size(JobGrant(8, 16384), site=site) == (3, 2048)
    assert size(JobGrant(), "vcpus=job", "ram=job", site=site) == (3, 2048)
    assert size(JobGrant(8, 4096), "vcpus=job", "ram=job", site=site) == (8, 4096 - 256)


def test_needs_of_plugins_are_subtracted_from_guests():
    plugin = DemandingPlugin(cpus=1, mib=100)
    assert size(JobGrant(8, 4096), plugin=plugin) == (7, 4096 - 256 - 100)
    assert size(JobGrant(8, 4096), "vms_per_node=2", plugin=plugin) == (
        3,
        (4096 - 100) // 2 - 256,
    )
    assert size(JobGrant(8, 4096, reserved=2), plugin=plugin)[0] == 7
    assert size(JobGrant(8, 4096, reserved=2), plugin=DemandingPlugin(1, own=True))[0] == 5


def test_hooks_get_numbers_instead_of_job():
    seen = []

    class Looks:
        @hookimpl
        def vtorque_parse_args(self, request):
            seen.append((request[VCPUS], request[RAM]))
            return ()

        @hookimpl
        def vtorque_needs(self, request):
            assert request[VCPUS] and request[RAM]
            return [Extra(cpus=request[VCPUS] % 2)]

    assert size(JobGrant(9, 2048), plugin=Looks()) == (8, 1792)
    assert seen == [(8, 1792)]


@pytest.mark.parametrize(
    ("limits", "number", "note"),
    [
        ("max = 4", 4, "each guest gets vcpus=4 instead of 7, its share of the job (limit set by "
         "[options.vcpus] max in /etc/vtorque/vtorque.toml)"),
        ("min = 8", 8, "each guest gets vcpus=8 instead of 7"),
        ("max = 16", 7, ""),
        ("allow = [1, 2, 4, 8]", 4, "each guest gets vcpus=4 instead of 7"),
        ("allow = [8]", 8, "each guest gets vcpus=8 instead of 7"),
        ("deny = ['64']", 7, ""),
    ],
)  # fmt: skip
def test_site_limits_change_the_size_and_notify_the_user(limits, number, note):
    job, notes, _ = settled(JobGrant(7), site=f"[options.vcpus]\n{limits}\n")
    assert job[VCPUS] == number
    assert [said.startswith(note) for said in notes] == ([True] if note else [])


def test_size_that_the_site_denies_is_refused_with_the_reason():
    with pytest.raises(Refused, match=r"vcpus=7: is not allowed \(limit: not 7, set by \[options"):
        settled(JobGrant(7), site="[options.vcpus]\ndeny = [7]\n")
    with pytest.raises(Refused, match=r"vcpus=job: is not allowed"):
        settled(JobGrant(7), "vcpus=job", site="[options.vcpus]\ndefault = 1\ndeny = ['job']\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max = 'job'", "must be a number: only default can be 'job' (the job's allocation)"),
        ("min = 'job'", "must be a number"),
        ("deny = ['job']", "excludes job, the default of vcpus: set default here too"),
        ("deny = [1]", "excludes 1, the default of vcpus: set default here too"),
    ],
)
def test_contradicting_site_limits_are_a_config_error(text, why):
    with pytest.raises(ConfigError) as caught:
        settled(JobGrant(), site=f"[options.vcpus]\n{text}\n")
    assert why in str(caught.value)


def test_allocation_too_small_for_the_image_names_the_needed_memory():
    words = (
        r"ram=142M: image tiny needs more RAM \(limit: at least 512M.* ask the batch system for "
    )
    with pytest.raises(Refused, match=words + r"1636M of memory on each node"):
        settled(JobGrant(2, 896), "vms_per_node=2", plugin=DemandingPlugin(mib=100), image=IMAGE)
    with pytest.raises(Refused, match=r"ask for -vm ram=512M or more"):
        settled(JobGrant(2, 896), "ram=64M", image=IMAGE)
    assert size(JobGrant(2, 768), image=IMAGE) == (2, 512)
    with pytest.raises(Refused, match="image tiny needs more RAM"):
        size(JobGrant(2, 100), image=IMAGE)


def test_vsub_requests_the_default_size_without_user_values():
    site = "[node]\nhost_reserve_cores = 2\nhost_reserve_ram = 500\n"
    _, _, needed = settled(JobGrant(), site=site)
    assert (needed.cpus, needed.mib) == (1, 1024 + 256), (
        "the host's reserve is added to the default size"
    )
    _, _, needed = settled(JobGrant(), "vcpus=1", "ram=1G", site=site)
    assert (needed.cpus, needed.mib) == (1 + 2, 1024 + 256 + 500)
    _, _, needed = settled(JobGrant(), site=site, plugin=DemandingPlugin(own=True))
    assert needed.cpus == 1 + 2, "a dedicated CPU could be one of the host's"


SITES = st.sampled_from(["", "[node]\nhost_reserve_cores = 1\nhost_reserve_ram = 300\n"])


@given(
    cpus=st.integers(1, 200),
    mib=st.integers(1, 1 << 20),
    count=st.integers(1, 8),
    extra=st.builds(Extra, st.integers(0, 6), st.integers(0, 500), st.booleans()),
    disk=st.sampled_from([0, 700]),
    site=SITES,
)
def test_guests_fit_the_allocation_and_use_all_of_it(cpus, mib, count, extra, disk, site):
    """The guests' computed size is at most the given share, unless their minimum exceeds it."""
    plugin = DemandingPlugin(extra.cpus, extra.mib)
    job, _, needed = settled(
        JobGrant(cpus, mib), f"vms_per_node={count}", site=site, plugin=plugin, disk=disk
    )
    if cpus >= count + extra.cpus:
        check_share(needed, cpus, None)
        assert cpus - extra.cpus - count * job[VCPUS] < count
    if mib >= count * (2 + 256 + disk) + extra.mib:
        check_share(needed, None, mib)
        assert mib - needed.mib < 2 * count


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 300))
def test_size_of_guests_on_other_nodes_matches_their_own_result(here, count, there):
    plugins = load_with_core("needy", DemandingPlugin(cpus=1))
    site = build(parse_toml(b"[options.vcpus]\nmax = 64\n", FILE), plugins)
    wanted = check_options(Request((("vms_per_node", str(count)),)), site, plugins)
    job, _ = resolve(wanted, site, plugins, JobGrant(here, 4096))
    other, _ = resolve(wanted, site, plugins, JobGrant(there, 4096))
    assert vcpus_on(job, site, plugins, there) == other[VCPUS]
    assert job[VMS_PER_NODE] == count


def test_default_without_limits_is_checked_against_deny():
    entry = "[[limits]]\nuser = '*'\n[limits.options.ram]\n"
    plugins = load_with_core("needy")
    text = f"{entry}default = '8G'\n{entry}deny = ['8G']\n"
    made = build(parse_toml(text.encode(), FILE), plugins)
    made, plugins = for_job(made, plugins, {"user": ("ada",)})
    wanted = check_options(Request((("ram", "job"),)), made, plugins)
    with pytest.raises(Refused, match="ram=8G: is not allowed"):
        resolve(wanted, made, plugins)
