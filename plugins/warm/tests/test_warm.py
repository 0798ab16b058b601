"""Number of warm guests, and decisions of the service; guests are doubles."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import LONG
from vtorque_admin.steps import systemd_unit
from vtorque_core.api import HostFault, Paths
from vtorque_core.api.setup_steps import Installation
from vtorque_core.live.spares import WarmGuest
from vtorque_testing.planned import PlannedNode, load_with_core
from vtorque_warm import node, plugin, policy, process, service
from vtorque_warm import setup as setup_steps
from vtorque_warm.service import NOTE, Keeper
from vtorque_warm.settings import Settings, WarmShape, parse_shape

SMALL = WarmShape("micro", 1, 256)
NOW = 1_800_000_000.0
OVERHEAD = 100
SHAPE = "img=micro vcpus=1 ram=256M"


# -- Settings --------------------------------------------------------------------------------------


def test_shape_is_parsed():
    assert parse_shape(SHAPE) == SMALL
    assert parse_shape("ram=2G img=debian vcpus=4 min=0 max=3 max_age=12h") == WarmShape(
        "debian", 4, 2048, 0, 3, 43200.0
    )
    assert parse_shape(f"{SHAPE} min=3").most == 3
    assert str(parse_shape("ram=2048M vcpus=4 img=x")) == "img=x vcpus=4 ram=2G"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("img=micro vcpus=1", "the key ram is missing"),
        (f"{SHAPE} cores=2", "the key cores is unknown"),
        (f"{SHAPE} img=micro", "write each key once, as key=value"),
        (f"{SHAPE} least", "as key=value"),
        (f"{SHAPE} min=3 max=2", "min at most max"),
        (
            f"{SHAPE} max=65",
            "vcpus must be at least 1, min at most max, max at most 64, and max_age at least",
        ),
        (f"{SHAPE} max_age=1s", "at least 60 s"),
        ("img=micro vcpus=0 ram=256M", "at least 1"),
        ("img=micro vcpus=1 ram=much", "is not a size"),
    ],
)
def test_invalid_shape_is_refused(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        Settings(shapes=(text,))


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"max_memory": "lots"}, "max_memory='lots' is invalid:"),
        ({"hotplug_ports": 1}, "must be 2 to 24"),
        ({"failure_backoff": 0.0}, "more than 0"),
        ({"eviction_backoff": 601.0}, "0 to 600 s"),
    ],
)
def test_invalid_settings_are_refused(given, wrong):
    with pytest.raises(ValueError, match=wrong):
        Settings(**given)


# -- Policy ----------------------------------------------------------------------------------------


def job(vcpus=1, ram=256, image="micro", ago=60.0, guests=1):
    given = [{"vcpus": vcpus, "ram_mib": ram}] * guests
    return {"image": image, "started": NOW - ago, "guests": given}


def test_nothing_is_kept_by_default():
    assert policy.wanted_guests(Settings(), [job()] * 9, NOW) == []


def test_number_of_a_shape_follows_recent_starts_per_hour():
    settings = Settings(shapes=(f"{SHAPE} min=1 max=3",))
    many = [job(ago=ago) for ago in (60, 61, 62, 63)]

    def number(history):
        ((_, found),) = policy.wanted_guests(settings, history, NOW)
        return found

    assert number([]) == 1
    assert number([job(guests=2)]) == 2
    assert number(many) == 3
    assert number([job(ago=40 * 86400, guests=9)]) == 1
    assert number([job(ram=512, guests=9)]) == 1
    assert number([{}, {"guests": 3}, {"image": "micro", "started": "x", "guests": []}]) == 1


def test_most_requested_shapes_are_kept_within_max_memory():
    history = [job(ram=1024), job(ram=1024), job(ram=512), job(ram=8192), job(ram=8192, ago=60)]
    found = policy.wanted_guests(Settings(max_memory="2G"), history, NOW)
    assert {str(shape): number for shape, number in found} == {
        "img=micro vcpus=1 ram=1G": 1,
        "img=micro vcpus=1 ram=512M": 1,
    }


# -- The service -----------------------------------------------------------------------------------


class WarmSite(dict):
    """The settings that the service reads from a site's config."""

    node = SimpleNamespace(qemu_overhead=OVERHEAD)


@pytest.fixture
def made_keeper(tmp_path, monkeypatch):
    """Return a keeper whose guests are entries of a list."""
    there, ended, clock = [], [], [NOW]
    state = SimpleNamespace(
        there=there, ended=ended, clock=clock, version="1", fail="", settings=Settings(), jobs=[]
    )

    def boot(config, keeper, ports, wanted):
        if state.fail:
            raise HostFault(state.fail)
        key = f"spare-{len(there) + len(ended)}.0"
        directory = tmp_path / key
        directory.mkdir()
        held = int(wanted["ram"][:-1]) + OVERHEAD
        there.append(WarmGuest(key, "vt-x", True, clock[0], held, "", "u", "q", directory))
        return key

    def end(_paths, key):
        (gone,) = (each for each in there if each.key == key)
        there.remove(gone)
        ended.append(key)
        return True

    def load(_config, _group):
        return WarmSite({Settings: state.settings}), SimpleNamespace(
            function=lambda name: state.policy
        )

    monkeypatch.setattr(service.extensions, "load", load)
    monkeypatch.setattr(service.spares, "warm_guests", lambda _: list(there))
    monkeypatch.setattr(service, "version", lambda _, image: f"{image} {state.version}")
    monkeypatch.setattr(service, "RunningJobs", lambda _: SimpleNamespace(jobs=lambda: state.jobs))
    paths = Paths(tmp_path / "state", tmp_path / "run")
    paths.run.mkdir()
    state.dead = set()
    state.keeper = Keeper(
        paths, Path("/c"), boot, end, lambda spare: spare.key in state.dead, lambda: clock[0]
    )
    state.settings = Settings(shapes=(f"{SHAPE} min=2 max=2 max_age=1h",))
    return state


def test_service_boots_guests_one_by_one_and_then_pauses(made_keeper):
    for expected in (1, 2, 2):
        assert made_keeper.keeper.poll()
        assert len(made_keeper.there) == expected
    noted = json.loads((made_keeper.there[0].directory / NOTE).read_text())
    assert noted["shape"] == SHAPE
    assert process.read_status(made_keeper.keeper.paths)["wanted"] == {SHAPE: 2}


def test_no_guest_is_booted_during_the_start_of_a_job(made_keeper):
    made_keeper.jobs = [SimpleNamespace(phases=(("plan", 1.0), ("boot", service.time.time())))]
    made_keeper.keeper.poll()
    assert made_keeper.there == []
    made_keeper.jobs = [
        SimpleNamespace(phases=(("run", 1.0),)),
        SimpleNamespace(phases=(("boot", 1.0),)),  # killed long ago
    ]
    made_keeper.keeper.poll()
    assert len(made_keeper.there) == 1


def test_memory_reclaimed_by_jobs_is_left_to_them_for_growing_times(made_keeper):
    def starts(*, takes=False):
        made_keeper.keeper.poll(), made_keeper.keeper.poll(), made_keeper.keeper.poll()
        assert len([each for each in made_keeper.there if each.waits]) == 2
        mine = made_keeper.there.pop()
        made_keeper.ended.append(mine.key)
        if takes:
            made_keeper.there.append(WarmGuest(**{**vars_of(mine), "job": "7", "waits": False}))
        made_keeper.jobs = [SimpleNamespace(phases=(("pre-boot", service.time.time()),))]
        made_keeper.keeper.poll()
        made_keeper.jobs = []
        made_keeper.keeper.poll()
        return made_keeper.keeper.rests - made_keeper.clock[0]

    for rest in (60.0, 120.0, 240.0):
        assert starts() == rest
        assert len(made_keeper.there) == 1
        made_keeper.clock[0] += rest
    assert starts(takes=True) <= 0
    made_keeper.there[:] = [each for each in made_keeper.there if each.waits]
    made_keeper.ended.append("7")
    assert starts() == 60.0


def test_guest_lost_without_a_starting_job_is_replaced(made_keeper):
    made_keeper.keeper.poll(), made_keeper.keeper.poll()
    made_keeper.ended.append(made_keeper.there.pop().key)
    made_keeper.keeper.poll()
    assert len(made_keeper.there) == 2


def test_old_dead_outdated_or_unknown_guest_is_replaced(made_keeper):
    for change in (
        lambda: made_keeper.clock.__setitem__(0, made_keeper.clock[0] + 3601),
        lambda: made_keeper.dead.update(each.key for each in made_keeper.there),
        lambda: setattr(made_keeper, "version", "2"),
        lambda: [(each.directory / NOTE).unlink() for each in made_keeper.there],
    ):
        made_keeper.keeper.poll(), made_keeper.keeper.poll()
        before = {each.key for each in made_keeper.there}
        assert len(before) == 2
        change()
        made_keeper.keeper.poll()
        assert not before & {each.key for each in made_keeper.there}
        made_keeper.clock[0] += 1


@pytest.mark.parametrize("name", ["qemu-system-x86_64", "qemu.conf"])
def test_version_changes_with_qemu_and_its_libvirt_config(tmp_path, monkeypatch, name):
    site = SimpleNamespace(images=SimpleNamespace(pool=tmp_path))
    found = site, SimpleNamespace(distributions={"core": "vtorque-core 1"})
    monkeypatch.setattr(service.images, "root_site", lambda _: found)
    below = tuple(f"{tmp_path}/{end}".lstrip("/") for end in ("qemu-system-*", "qemu.conf"))
    monkeypatch.setattr(service, "_HOST", below, raising=False)
    config = tmp_path / "c"
    config.touch()
    (tmp_path / "micro").mkdir()
    (tmp_path / "micro" / service.images.SIDECAR).touch()
    said = []
    for text in ("", "one", "another"):
        if text:
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(tmp_path / name)
        said += [service.version(config, "micro")] * 2
    assert said[::2] == said[1::2]
    assert len(set(said)) == 3


def test_claimed_guest_is_kept(made_keeper):
    made_keeper.keeper.poll()
    mine = made_keeper.there[0]
    made_keeper.there[0] = WarmGuest(**{**vars_of(mine), "job": "7", "waits": False})
    made_keeper.keeper.poll(), made_keeper.keeper.poll(), made_keeper.keeper.poll()
    assert made_keeper.ended == []
    assert len(made_keeper.there) == 3


def vars_of(spare):
    names = ("key", "name", "waits", "since", "mib", "job", "uuid", "uri", "directory")
    return {name: getattr(spare, name) for name in names}


@pytest.mark.parametrize(("memory", "number"), [("300M", 0), ("711M", 1), ("712M", 2)])
def test_max_memory_includes_the_qemu_overhead(made_keeper, memory, number):
    made_keeper.settings = Settings(shapes=(f"{SHAPE} min=5 max=5",), max_memory=memory)
    for _ in range(4):
        made_keeper.keeper.poll()
    assert len(made_keeper.there) == number
    assert sum(each.mib for each in made_keeper.there) <= made_keeper.settings.budget


def test_failed_boot_is_retried_with_growing_pauses_and_reported_by_doctor(made_keeper):
    made_keeper.fail = "no image"
    pauses = []
    for _ in range(3):
        made_keeper.keeper.poll()
        failure = made_keeper.keeper.failures[SHAPE]
        pauses.append(failure.again - made_keeper.clock[0])
        made_keeper.keeper.poll()  # too early
        assert made_keeper.keeper.failures[SHAPE].times == failure.times
        made_keeper.clock[0] = failure.again
    assert pauses == [10.0, 20.0, 40.0]
    times, _, why = process.read_status(made_keeper.keeper.paths)["failures"][SHAPE]
    assert (times, why) == (3, "no image")
    made_keeper.fail = ""
    made_keeper.keeper.poll()
    assert not made_keeper.keeper.failures and len(made_keeper.there) == 1


def test_missing_image_is_retried_with_growing_pauses(made_keeper, monkeypatch):
    def gone(_config, _image):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(service, "version", gone)
    for times in (1, 2, 3):
        for _ in range(3):
            assert made_keeper.keeper.poll()  # and waits for its return
        failure = made_keeper.keeper.failures[SHAPE]
        assert (failure.times, failure.why) == (times, "image micro: No such file or directory")
        made_keeper.clock[0] = failure.again


@pytest.mark.parametrize("left", [(), ("img=micro vcpus=2 ram=1G",), (f"{SHAPE} min=0",)])
def test_failure_of_an_unwanted_shape_is_forgotten(made_keeper, left):
    made_keeper.fail = "no image"
    made_keeper.keeper.poll()
    assert SHAPE in process.read_status(made_keeper.keeper.paths)["failures"]
    made_keeper.settings, made_keeper.fail = Settings(shapes=left), ""
    made_keeper.keeper.poll()
    assert process.read_status(made_keeper.keeper.paths)["failures"] == {}


def pause_of(made):
    made.keeper.poll()
    return made.keeper.failures[SHAPE].again - made.clock[0]


@pytest.mark.parametrize(("why", "left"), [("in use by other jobs: ram=256M", 10.0), ("no", 80.0)])
def test_end_of_a_job_that_used_the_memory_shortens_the_pause(made_keeper, why, left):
    made_keeper.fail = why
    made_keeper.jobs = [running("7.0"), running("8.0")]
    for _ in range(4):
        made_keeper.keeper.poll()
        made_keeper.clock[0] = made_keeper.keeper.failures[SHAPE].again
    made_keeper.clock[0] = made_keeper.keeper.failures[SHAPE].at
    made_keeper.jobs += [running("9.0")]
    assert pause_of(made_keeper) == 80.0
    made_keeper.jobs = [running("8.0")]
    assert pause_of(made_keeper) == left


def test_changed_config_or_image_ends_the_pause(made_keeper):
    made_keeper.fail = "no"
    for _ in range(4):
        made_keeper.keeper.poll()
        made_keeper.clock[0] = made_keeper.keeper.failures[SHAPE].again
    made_keeper.clock[0] = made_keeper.keeper.failures[SHAPE].at + 60.0
    assert pause_of(made_keeper) == 20.0
    made_keeper.fail, made_keeper.version = "", "2"
    made_keeper.keeper.poll()
    assert len(made_keeper.there) == 1 and not made_keeper.keeper.failures


def running(key):
    return SimpleNamespace(job=SimpleNamespace(key=key), phases=())


def test_service_ends_without_wanted_and_running_guests(made_keeper):
    made_keeper.keeper.poll()
    made_keeper.settings = Settings()
    assert made_keeper.keeper.poll() is False
    assert made_keeper.there == []


def test_policy_of_a_plugin_selects_the_shapes(made_keeper):
    made_keeper.settings = Settings(max_memory="1G", policy="mine")
    made_keeper.policy = lambda settings, history, now: [(WarmShape("micro", 3, 512), 1)]
    made_keeper.keeper.poll()
    assert process.read_status(made_keeper.keeper.paths)["wanted"] == {
        "img=micro vcpus=3 ram=512M": 1
    }


# -- On the node -----------------------------------------------------------------------------------


def site_of(text):
    return PlannedNode.make(load_with_core("warm", plugin, node), text).site


def test_site_without_warm_guests_starts_no_service():
    job = SimpleNamespace(site=site_of(""))
    node.vtorque_post_boot(job)
    (result,) = node.check(job.site)
    assert (result.status, result.message) == ("ok", "warm guests are disabled")


def test_start_of_a_job_starts_the_service_and_doctor_reports_a_missing_one(tmp_path, monkeypatch):
    places = f'[paths]\nstate = "{tmp_path}/s"\nrun = "{tmp_path}/r"\n'
    site = site_of(f'{places}[plugin.warm]\nshapes = ["{SHAPE}"]\n')
    (result,) = node.check(site)
    assert (result.status, result.message) == (
        "warning",
        "the service of warm guests is not running",
    )
    started, warned = [], []
    monkeypatch.setattr(node, "ensure", lambda *words: started.append(words))
    job = SimpleNamespace(site=site, warn=warned.append)
    node.vtorque_post_boot(job)
    assert started == [(site.paths, site.path)] and not warned

    def fails(*_):
        raise HostFault("/run is full")

    monkeypatch.setattr(node, "ensure", fails)
    node.vtorque_post_boot(job)
    assert warned == ["no warm guests are kept on this node: /run is full"]


def steps_of(site, tmp_path):
    place = Installation(Path(sys.executable), tmp_path / "vtorque.toml", tmp_path / "jobshell")
    return list(node.vtorque_setup_steps(site, place))


def test_setup_starts_the_service_and_uninstall_ends_it_with_its_guests(tmp_path, monkeypatch):
    places = f'[paths]\nstate = "{tmp_path}/s"\nrun = "{tmp_path}/r"\n'
    assert steps_of(site_of(places), tmp_path) == []
    site = site_of(f'{places}[plugin.warm]\nmax_memory = "1G"\n')
    (step,) = steps_of(site, tmp_path)
    assert not step.is_applied()
    said = []
    monkeypatch.setattr(setup_steps, "ensure", lambda *words: said.append(words))
    monkeypatch.setattr(setup_steps, "end_all", said.append)
    step.apply()
    step.undo()
    assert said == [(site.paths, site.path), site.paths]


def test_systemd_accepts_the_unit(tmp_path):
    place = Installation(Path(sys.executable), tmp_path / "50% $.toml", tmp_path / "jobshell")
    (step,) = systemd_unit(
        "vtorque-warm.service", setup_steps.unit(place), units=tmp_path, booted=tmp_path
    )
    step.apply()
    said = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(step.path)),
        capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    assert f"warm --config '{tmp_path}/50%% $$.toml' start\n" in step.path.read_text()
