"""Migration of guests: journals and files of two nodes, and real processes that are killed.

libvirt, the batch system and the connection between the nodes are doubles. With real guests on
Debian 13: tests/e2e/slurm/test_slurm_move.py.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
import sparing
from holding import holding
from patience import eventually
from vtorque_core.api import HostFault, Refused, UsageError, take_lock
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import run_in_child
from vtorque_core.api.guest_plan import ROOT_DISK
from vtorque_core.base import hypervisor
from vtorque_core.live import libvirt, suspend
from vtorque_core.live.jobs import RunningJobs
from vtorque_core.live.locked_job import locked_job
from vtorque_core.records.reading import ARRIVES, read
from vtorque_core.resources.lease import Lease
from vtorque_survive import (
    arrival,
    domains,
    guest_migration,
    health,
    migrate_disk,
    migration,
    migration_record,
    migration_watch,
    node,
    reach,
    restore,
    saving,
    tools,
)
from vtorque_survive.migration import ThisNode
from vtorque_survive.migration_record import Move
from vtorque_survive.settings import Settings

pytestmark = pytest.mark.e2e  # starts many processes

JOB, KEY = "42", "42.0"
NOTHING = (io.BytesIO(), io.BytesIO())  # no data after a question, and none before its answer
STEPS = [
    "before record", "after record", "after mark", "ready", "before send", "in send", "sent",
    "after send", "resolved", "asked", "before release", "after release", "after leave",
]  # fmt: skip


class NodeDouble:
    """A double of a node: its files and the state of its domains."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.paths = running_journal.paths_below(world.top / name)
        site = SimpleNamespace(paths=self.paths, path=Path("/etc/x"))
        site = type("Site", (), {"__getitem__": lambda *_: world.settings, **vars(site)})()
        self.uri = f"test:///{name}"
        self.here = ThisNode(
            Path("/etc/x"),
            site,
            ReservingBatch(world),
            guest_migration.MigrationNode(self.uri, 30.0),
        )

    @property
    def domain(self):
        return self.domain_of(self.world.uuid)

    def domain_of(self, uuid):
        return self.world.top / f"{self.name}.{uuid}.domain"

    def state(self, uuid=""):
        domain = self.domain_of(uuid or self.world.uuid)
        return domain.read_text() if domain.exists() else ""

    def disk(self, uuid):
        return self.world.top / self.name / f"disk-{uuid}" / ROOT_DISK

    def states(self):
        return [self.state(uuid) for uuid in self.world.job.uuids]

    def journal(self):
        path = self.paths.journal / f"{KEY}.jsonl"
        return read(path) if path.exists() else None

    def phase(self):
        state = self.journal()
        return [mark.name for mark in state.phases if mark.guest is None][-1] if state else ""


class ReservingBatch:
    """A double of a batch system that can reserve a node."""

    def __init__(self, world):
        self.world = world

    def reserve_node(self, *_):
        raise AssertionError

    def release_node(self, job_id, node):
        self.world.note(f"release {job_id} {node}")

    def is_reserved(self, job_id, node):
        return not (self.world.top / "unreserved").exists()

    def remove_node(self, job_id, node):
        self.world.note(f"remove {job_id} {node}")

    def has_ended(self, job_id, attempt):
        return (self.world.top / "over").exists()


class MigrationWorld:
    """Nodes n1 to n3 and a job on n1 and n2, with one guest on n2 by default.

    Attributes:
        ends: outcome of libvirt's migration, for all guests or for each guest: "succeeds";
            "fails": the guest still runs on the source; "fails paused": it is paused there;
            "unreported": the guest has arrived, but the source's libvirtd has died;
            "not removed": libvirt reports success and keeps the guest on the source;
            "ended": the guest has ended; "canceled": it fails because the job has ended.
        dies: step at which the migrating process is killed.
        starts: whether the start of the guests on the destination runs until its end.
        lost: unreachable nodes.
    """

    def __init__(self, top, guests=1, *, disks=False):
        self.top, self.guests, self.disks = top, guests, disks
        self.settings = Settings(remote_command="reach {node}")
        self.ends, self.dies, self.lost, self.starts = "succeeds", "", set(), True
        self.ways = []
        self.nodes = {name: NodeDouble(self, name) for name in ("n1", "n2", "n3")}
        self.n2, self.n3 = self.nodes["n2"], self.nodes["n3"]
        self.job = start_job(self.n2, guests=guests)
        self.uuid = self.job.uuids[0]
        for number, uuid in enumerate(self.job.uuids if disks else ()):
            writes(self.n2.disk(uuid), bytes([1 + number]) * 3_000_000, 5 << 20)
        for uuid in self.job.uuids:
            self.n2.domain_of(uuid).write_text("runs")

    def note(self, line):
        with (self.top / "did").open("a") as file:
            file.write(f"{line}\n")

    def did(self):
        return (self.top / "did").read_text().splitlines() if (self.top / "did").exists() else []

    def life(self):
        return JobState.GONE if (self.top / "over").exists() else JobState.ALIVE

    def step(self, step):
        if step == self.dies and f"died {step}" not in self.did():
            self.note(f"died {step}")
            os.kill(os.getpid(), signal.SIGKILL)

    def is_lost(self, node):
        return node in self.lost or (self.top / f"lost-{node}").exists()

    def at(self, uri):
        return self.nodes[uri.removeprefix("test:///")]

    def migrate(self, uri, uuid, _to, _xml, _timeout, *, paused=False):
        nodes = self.at(uri), self.n3 if self.at(uri) is self.n2 else self.n2
        source, target = (node.domain_of(uuid) for node in nodes)
        ends = self.ends if isinstance(self.ends, str) else self.ends[self.job.uuids.index(uuid)]
        self.step("in send")
        if ends in ("fails", "fails paused", "ended"):
            eventually(lambda: all(map(self.n3.state, self.arriving())))
            if "canceled" in self.ends:
                eventually((self.top / "over").exists)
        assert paused == self.disks
        if self.disks:
            assert source.read_text() == "still"
            assert self.n3.disk(uuid).read_bytes() == self.n2.disk(uuid).read_bytes()
        arrived = "still" if self.disks else "runs"
        if ends == "succeeds":
            target.write_text(arrived)
            source.unlink()
        elif ends == "unreported":  # its libvirtd has died after the transfer
            target.write_text(arrived)
            source.write_text("still")
        elif ends == "not removed":
            target.write_text(arrived)
        elif ends == "ended":
            source.unlink()
        elif ends == "fails paused":
            source.write_text("still")
        elif ends == "canceled":
            (self.top / "over").touch()
            eventually((self.top / "aborted").exists)
        self.step("sent")
        if ends not in ("succeeds", "not removed"):
            raise HostFault("migrate domain: the connection is broken")

    def suspend(self, uri, uuid, *_):
        self.at(uri).domain_of(uuid).write_text("still")
        writes(self.n2.disk(uuid), b"later", 2 << 20)
        self.step("still")

    def resume(self, uri, uuid, *_):
        other = {self.n2: self.n3, self.n3: self.n2}[self.at(uri)]
        assert not self.disks or other.state(uuid) != "runs"
        self.at(uri).domain_of(uuid).write_text("runs")

    def arriving(self):
        """Return the guests that arrive, if ``ends`` has an outcome for each guest.

        The migrations of other guests fail only after these guests have arrived.
        """
        ends = () if isinstance(self.ends, str) else self.ends
        each = zip(self.job.uuids, ends, strict=False)
        return [uuid for uuid, end in each if end in ("succeeds", "unreported")]

    @contextlib.contextmanager
    def receiver(self, here, to, told, _over):
        """Replace the receiver on the destination, which waits for the domains."""
        target = self.nodes[to]
        arrives(target, told)
        self.step("ready")
        yield dict.fromkeys(self.job.uuids, "<domain/>")
        if set(target.states()) != {"runs"}:
            raise HostFault(f"{to} has ended")
        if not self.starts:
            raise HostFault(f"{to} has ended")
        complete_arrival(target, self.job.uuids)

    def ask(self, _config, _settings, node, what):
        if self.is_lost(node):
            raise HostFault(f"{node} did not answer the request: no route to host")
        question = json.dumps(what).encode()
        return json.loads(arrival.answer(self.nodes[node].here, question, *NOTHING))["answer"]

    def release(self, here, job_id):
        """Release a job as an epilogue does."""
        node = next(each for each in self.nodes.values() if each.here is here)
        self.note(f"release {node.name}")
        for uuid in self.job.uuids:
            node.domain_of(uuid).unlink(missing_ok=True)
        for path in node.paths.journal.glob(f"{job_id}.*"):
            path.unlink()


def writes(disk, data, at):
    with disk.open("r+b") as file:
        file.seek(at)
        file.write(data)


class Way:
    """A double of ``remote_command``: a child process answers as the other node."""

    def __init__(self, world, argv):
        (there, self.stdin), (self.stdout, says) = pipes(), pipes()
        world.ways.append(self)
        self.pid = os.fork()
        os.setpgid(self.pid, self.pid)  # by both parent and child, because either may run first
        if not self.pid:
            with contextlib.suppress(BaseException):
                first, second = sorted((there.fileno(), says.fileno()))
                os.closerange(3, first)  # close descriptors (locks), as exec would
                os.closerange(first + 1, second)
                os.closerange(second + 1, 1 << 10)
                here = world.nodes[argv[1]].here
                if not world.is_lost(argv[1]):
                    says.write(arrival.answer(here, there.readline(), there, says))
                    says.flush()
            os._exit(0)
        there.close()
        says.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        os.waitpid(self.pid, 0)


def pipes():
    ends = os.pipe()
    return os.fdopen(ends[0], "rb"), os.fdopen(ends[1], "wb")


def start_job(node, nodes=("n1", "n2"), guests=1, **facts):
    job = running_journal.JournalledJob(node.paths, JOB, guests=guests, ranks=1)
    known = {
        "node": node.name,
        "nodes": nodes,
        "immovable": [],
        "unsaveable": [],
        "booted_for": [JOB, 0],
    }
    job.kept.add_facts(**known | facts)
    leases = [(Lease("address", f"10.0.0.{9 - index}"), index) for index in range(guests)]
    job.journal._record(leases, "core", "plan", ())
    if node.world.disks:
        disks = [
            (restore.RestoredDisk(str(node.disk(uuid)), -1), at)
            for at, uuid in enumerate(job.uuids)
        ]
        job.journal._record(disks, "survive", "plan", ())
        for made, _ in disks:
            shutil.rmtree(Path(made.path).parent, ignore_errors=True)
            Path(made.path).parent.mkdir(parents=True)
            made.create()
    for path in node.paths.journal.glob("*.jsonl"):
        path.write_text(path.read_text().replace("qemu:///system", node.uri))
    return job


def arrives(node, told):
    """Start a job on a node up to the phase in which it waits for its guests."""
    start_job(node, told["nodes"], guests=node.world.guests)
    path = node.paths.journal / f"{KEY}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line["op"] != "created" and line.get("name") != "run"]
    mark = {"op": "phase", "name": ARRIVES, "guest": None, "t": 1.0}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, mark]))


def complete_arrival(node, uuids):
    with locked_job(node.paths, KEY) as locked:
        guest_migration.complete_arrival(locked, uuids)


@pytest.fixture
def world(tmp_path, monkeypatch):
    return patched_world(MigrationWorld(tmp_path), monkeypatch)


@pytest.fixture
def two_guests(tmp_path, monkeypatch):
    """Return a world whose job has two guests on n2."""
    return patched_world(MigrationWorld(tmp_path, guests=2), monkeypatch)


@pytest.fixture
def guest_with_disk(tmp_path, monkeypatch):
    """Return a world in which the guest has its own disk."""
    return patched_world(MigrationWorld(tmp_path, disks=True), monkeypatch)


def patched_world(made, monkeypatch):
    monkeypatch.setattr(domains, "domain_state", lambda uri, uuid: made.at(uri).state(uuid))
    ended = lambda uri, uuid, *_: made.at(uri).domain_of(uuid).unlink(missing_ok=True)  # noqa: E731
    for module in (hypervisor, libvirt):
        monkeypatch.setattr(module, "destroy_domain", ended)
    monkeypatch.setattr(domains, "abort_operation", lambda *_: None)
    monkeypatch.setattr(domains, "is_busy", lambda *_: False)
    monkeypatch.setattr(domains, "migrate_domain", made.migrate)
    monkeypatch.setattr(domains, "migratable_xml", lambda *_: "<domain/>")
    monkeypatch.setattr(libvirt, "versions", lambda _: {"QEMU": "10.0.13"})
    monkeypatch.setattr(libvirt, "resume_domain", made.resume)
    monkeypatch.setattr(libvirt, "suspend_domain", made.suspend)
    monkeypatch.setattr(migrate_disk, "_start_receiver", lambda argv, _: Way(made, argv))
    monkeypatch.setattr(ThisNode, "job_states", lambda _, ids: dict.fromkeys(ids, made.life()))
    monkeypatch.setattr(migration, "on_step", made.step)
    monkeypatch.setattr(migration, "_receiver", made.receiver)
    monkeypatch.setattr(migration, "_bridge", lambda *_: contextlib.nullcontext("test:///bridge"))
    monkeypatch.setattr(migration, "_COMES", 0.0)
    monkeypatch.setattr(reach, "ask", made.ask)
    monkeypatch.setattr(ThisNode, "release", lambda here, of: made.release(here, job_id=of))
    clocks = SimpleNamespace(wait=lambda: None)
    for module in (arrival, migration):
        monkeypatch.setattr(module, "set_clocks", lambda *_: clocks)
    monkeypatch.setattr(ThisNode, "from_config", classmethod(lambda *_: made.n2.here))
    resolve = lambda _, found: migration.resolve_all(ThisNode.from_config(Path()), found.job)  # noqa: E731
    monkeypatch.setattr(migration_watch, "run_resolve", resolve)
    return made


def migrate(world, to="n3"):
    """Migrate the guests in a child process; return the error."""
    return run_in_child(lambda: migration.migrate(world.n2.here, JOB, to), 60.0)


def watch(world, at="n2"):
    """Run the watcher of a node once; return the error."""
    node_ = world.nodes[at]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThisNode, "from_config", classmethod(lambda *_: node_.here))
        moves = migration_watch.MigrationWatcher(Path("/etc/x"), every=0.0)
        moves.poll(node_.paths, RunningJobs(node_.paths).jobs())
        return "; ".join(filter(None, [child.wait() for child in moves._work.values()]))


def end_job(world):
    """Let the job end, and the source's epilogue run."""
    world.release(world.n2.here, JOB)
    (world.top / "over").touch()


def assert_on_target(world):
    """Check that the guest runs only on n3, and that n2 has only reserved its address."""
    record = Move.read(world.n2.paths, KEY)
    assert (world.n2.state(), world.n2.journal()) == ("", None)
    assert (world.n3.state(), world.n3.phase()) == ("runs", "run")
    assert len(RunningJobs(world.n3.paths).jobs()[0].guests) == 1
    assert record.phase == migration_record.AWAY
    (claim,) = migration_record.migrated_addresses([], world.n2.paths)
    assert (claim.pool, claim.items) == ("address", ("10.0.0.9",))
    did = world.did()[world.did().index("release n2") :]
    assert f"remove {JOB} n2" in did and f"release {JOB} n3" not in did
    return True


def assert_on_source(world):
    """Check that the guest runs only on n2, and that n3 has released everything."""
    assert (world.n2.state(), world.n2.phase()) == ("runs", "run")
    assert (world.n3.state(), world.n3.journal()) == ("", None)
    assert Move.read(world.n2.paths, KEY) is None
    return True


@pytest.mark.parametrize(
    ("method", "error"),
    [("remove_node", HostFault("scontrol: exit 1: the DB index is being set")),
     ("has_ended", Refused("the job's name has line ends"))],
)  # fmt: skip
def test_failed_release_of_the_source_node_does_not_undo_the_migration(
    world, monkeypatch, method, error
):
    def fails(*_):
        raise error

    monkeypatch.setattr(ReservingBatch, method, fails)
    assert migrate(world) == ""
    assert world.n3.state() == "runs" and world.n2.journal() is None


def test_resources_left_on_the_source_are_reported_and_released_later(world, monkeypatch):
    def fails(*_):
        raise HostFault("some resources of job 42 are not released")

    with monkeypatch.context() as patch:
        patch.setattr(ThisNode, "release", fails)
        assert migrate(world).startswith("the job's guests run on n3, but some resources")
        found = [result.message for result in health.check_suspended(world.n2.here.site)]
        assert "the migration of job 42 to n3 is unfinished" in found
    watch(world)
    assert assert_on_target(world)
    found = [result.message for result in health.check_suspended(world.n2.here.site)]
    assert found == ["0 jobs are suspended: none"]


def test_guest_is_migrated(world):
    assert migrate(world) == ""
    assert assert_on_target(world)
    assert world.did() == ["release n2", f"release {JOB} n2", f"remove {JOB} n2"]


@pytest.mark.parametrize("ends", ["fails", "fails paused"])
def test_guest_that_does_not_arrive_resumes_on_the_source(world, ends):
    world.ends = ends
    assert migrate(world) == "the guests are still on n2: migrate domain: the connection is broken"
    assert assert_on_source(world)


def test_job_that_ends_during_the_transfer_cancels_it(world, monkeypatch):
    """The job's epilogue cancels the transfer to get the job's lock."""
    monkeypatch.setattr(migration, "_ENDS", 0.01)
    monkeypatch.setattr(domains, "abort_operation", lambda *_: (world.top / "aborted").touch())
    world.ends = "canceled"
    assert migrate(world).startswith("the guests are still on n2")
    assert assert_on_source(world)


def test_job_that_ends_during_the_preparation_cancels_it(world, monkeypatch):
    """Otherwise the migration would wait minutes for guests on the destination to start."""
    monkeypatch.setattr(migration, "_ENDS", 0.01)
    answers, says = os.pipe()

    @contextlib.contextmanager
    def receiver(_here, to, _told, over):
        with os.fdopen(answers, "rb", 0) as file:
            yield migration._answer(file, bytearray(), over, 60.0, to, file)

    monkeypatch.setattr(migration, "_receiver", receiver)
    (world.top / "over").touch()
    assert migrate(world) == "the guests are still on n2: the job is ending"
    os.close(says)


def test_daemons_of_a_guest_survive_a_canceled_transfer(world, monkeypatch):
    """The time limit expires while libvirt cancels the transfer."""
    (job,) = RunningJobs(world.n2.paths).jobs()
    job.guests[0].run_dir.mkdir(parents=True, exist_ok=True)
    lock = job.guests[0].run_dir / "fs-home.lock"
    lock.touch()

    def late(*_, **_how):
        time.sleep(0.5)  # until the transfer is canceled
        raise HostFault("no answer within 0.1 s")

    monkeypatch.setattr(domains, "migrate_domain", late)
    monkeypatch.setattr(migration, "_TIME", 0.1)
    with holding(lock) as daemon:
        held = saving.hold(world.n2.paths, job, suspend.RUNS)
        with held as (_, guests), pytest.raises(HostFault, match="no answer"):
            xml = {world.uuid: "<domain/>"}
            migration._send_all(world.n2.here, job, guests, "n3", "", xml, os.pipe()[0])
        assert daemon.poll() is None


def test_canceled_placeholder_job_is_reported(world):
    assert migrate(world) == ""
    checks = lambda: [each.message for each in health.check_suspended(world.n3.here.site)]  # noqa: E731
    assert watch(world, "n3") == "" and not any("placeholder" in each for each in checks())
    (world.top / "unreserved").touch()
    for _ in range(2):
        assert watch(world, "n3") == ""
    assert any("its placeholder job was canceled" in each for each in checks())
    said = RunningJobs(world.n3.paths).jobs()[0].kept.read("log.jsonl").decode()
    assert said.count("its placeholder job was canceled") == 1
    (world.top / "unreserved").unlink()
    watch(world, "n3")
    assert not any("placeholder" in each for each in checks())


def test_guest_that_runs_on_the_destination_is_ended_on_the_source(world):
    world.ends = "unreported"
    assert migrate(world) == ""
    assert assert_on_target(world)


def test_start_killed_after_the_arrival_is_completed(world):
    world.starts = False
    assert migrate(world) == ""
    assert assert_on_target(world)
    said = RunningJobs(world.n3.paths).jobs()[0].kept.read("log.jsonl").decode()
    assert (
        "the start on this node was interrupted: the plugins' post-boot hooks are skipped" in said
    )


@pytest.mark.parametrize(
    "ends",
    [
        "succeeds",
        "fails paused",
        pytest.param("unreported", marks=pytest.mark.full),
        pytest.param("fails", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("step", sparing.each(3, STEPS))
def test_kill_at_each_step_leaves_the_guest_on_exactly_one_node(world, step, ends):
    """Check which node has the guest after the next run of the watcher."""
    world.dies, world.ends = step, ends
    migrate(world)
    assert "runs" in (world.n2.state(), world.n3.state()) or ends == "fails paused"
    watch(world)
    arrived = world.n3.state() == "runs"
    assert assert_on_target(world) if arrived else assert_on_source(world)
    early = STEPS.index("in send") >= STEPS.index(step)
    assert arrived == (ends in ("succeeds", "unreported") and not early)


@pytest.mark.parametrize("ends", ["succeeds", "unreported"])
@pytest.mark.parametrize("step", sparing.each(3, [*STEPS[:5], "still", *STEPS[5:]]))
def test_kill_at_each_step_runs_a_guest_only_where_its_disk_is_complete(
    guest_with_disk, step, ends
):
    """The guest is paused on both nodes if libvirtd ends before it reports the arrival."""
    guest_with_disk.dies, guest_with_disk.ends = step, ends
    migrate(guest_with_disk)
    watch(guest_with_disk)
    late = step not in {*STEPS[:6], "still"}
    assert (
        assert_on_target(guest_with_disk)
        if late and ends == "succeeds"
        else assert_on_source(guest_with_disk)
    )


@pytest.mark.parametrize("ends", ["fails", "unreported", "fails paused"])
def test_guest_with_a_disk_resumes_on_the_source_if_the_destination_is_lost(
    guest_with_disk, monkeypatch, ends
):
    """The destination resumes the guest only after the source reports that it has none.

    The source sets the guest's clock.
    """
    migrates = guest_with_disk.migrate
    lost = guest_with_disk.top / "lost-n3"
    guest_with_disk.ends = ends
    set_clocks = migration.set_clocks
    monkeypatch.setattr(
        migration, "set_clocks", lambda *args: guest_with_disk.note("clocks") or set_clocks(*args)
    )

    def loses(*args, **how):
        lost.touch()
        migrates(*args, **how)

    monkeypatch.setattr(domains, "migrate_domain", loses)
    assert "n3 did not answer" in migrate(guest_with_disk)
    assert guest_with_disk.n2.state() == "runs" and guest_with_disk.n3.state() != "runs"
    assert guest_with_disk.did() == ["clocks"]
    lost.unlink()
    assert watch(guest_with_disk).startswith("the guests are still on n2")
    assert assert_on_source(guest_with_disk)


def test_guest_with_a_disk_that_libvirt_kept_paused_is_resumed_on_the_source(guest_with_disk):
    """libvirt only logs a warning ("Guest probably left in 'paused' state on source")."""
    guest_with_disk.ends = "not removed"
    assert (
        migrate(guest_with_disk)
        == "the guests are still on n2: libvirt has not removed the migrated guest from this node"
    )
    assert assert_on_source(guest_with_disk)


def test_arrived_guest_of_an_ended_job_is_not_resumed(guest_with_disk):
    guest_with_disk.dies = "sent"
    migrate(guest_with_disk)
    assert (guest_with_disk.n2.state(), guest_with_disk.n3.state()) == ("", "still")
    end_job(guest_with_disk)
    assert watch(guest_with_disk) == "job 42 has ended"
    assert guest_with_disk.n3.state() == ""


def test_unfinished_arrival_is_awaited(guest_with_disk, monkeypatch):
    """The destination raises an error, because only the source has statistics of a migration."""
    guest_with_disk.dies = "sent"
    migrate(guest_with_disk)

    def is_busy(uri, *_):
        if uri == guest_with_disk.n3.uri:
            raise HostFault("migration statistics are available only on the source host")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(domains, "is_busy", is_busy)
        assert "n3 does not know yet whether the guests have arrived" in watch(guest_with_disk)
    assert guest_with_disk.n3.state() == "still"
    assert watch(guest_with_disk) == ""
    assert assert_on_target(guest_with_disk)


def test_paused_arrival_is_resumed_once_the_destination_answers(guest_with_disk, monkeypatch):
    """The connection between the nodes is lost after libvirt has finished."""
    migrates, lost = guest_with_disk.migrate, guest_with_disk.top / "lost-n3"

    def loses(*args, **how):
        migrates(*args, **how)
        lost.touch()
        os.killpg(guest_with_disk.ways[0].pid, signal.SIGKILL)

    monkeypatch.setattr(domains, "migrate_domain", loses)
    for said in (migrate(guest_with_disk), watch(guest_with_disk)):
        assert "no route to host: the guests stay as they are until n3 answers" in said
    assert (guest_with_disk.n2.state(), guest_with_disk.n3.state()) == ("", "still")
    lost.unlink()
    assert watch(guest_with_disk) == ""
    assert assert_on_target(guest_with_disk)


@pytest.mark.parametrize("ends", ["fails", "fails paused"])
def test_failed_migration_of_a_guest_with_a_disk_resumes_the_guest(guest_with_disk, ends):
    guest_with_disk.ends = ends
    assert (
        migrate(guest_with_disk)
        == "the guests are still on n2: migrate domain: the connection is broken"
    )
    assert assert_on_source(guest_with_disk)


def test_all_guests_of_a_node_migrate_together(two_guests):
    assert migrate(two_guests) == ""
    assert two_guests.n2.states() == ["", ""] and two_guests.n2.journal() is None
    assert two_guests.n3.states() == ["runs", "runs"] and two_guests.n3.phase() == "run"
    assert len(RunningJobs(two_guests.n3.paths).jobs()[0].guests) == 2
    claims = [claim.items for claim in migration_record.migrated_addresses([], two_guests.n2.paths)]
    assert claims == [("10.0.0.9",), ("10.0.0.8",)]


def assert_split(two):
    """Check that each node has one of the guests, and that both nodes belong to the job."""
    record = Move.read(two.n2.paths, KEY)
    assert (two.n2.states(), two.n2.phase()) == (["", "runs"], "run")
    assert (two.n3.states(), two.n3.phase()) == (["runs", ""], "run")
    for has, uuid in zip((two.n3, two.n2), two.job.uuids, strict=True):
        assert [guest.uuid for guest in RunningJobs(has.paths).jobs()[0].guests] == [uuid]
    assert (record.phase, record.part) == (migration_record.AWAY, True)
    (claim,) = migration_record.migrated_addresses([], two.n2.paths)
    assert claim.items == ("10.0.0.9",)
    assert not [line for line in two.did() if not line.startswith("died")], (
        "a node of a split job was released"
    )
    return True


@pytest.mark.parametrize("other", ["fails", "fails paused"])
@pytest.mark.parametrize("first", ["succeeds", "unreported"])
def test_guest_whose_migration_fails_keeps_running_if_another_migrated(two_guests, first, other):
    two_guests.ends = (first, other)
    said = "only 1 of the guests have migrated to n3: migrate domain: the connection is broken"
    assert migrate(two_guests) == said
    assert assert_split(two_guests)
    part = "some of the job's guests have migrated before: the rest cannot migrate"
    assert migrate(two_guests) == part
    with pytest.raises(Refused, match=part):
        migration.migrate(two_guests.n3.here, JOB, "n4")
    with pytest.raises(Refused, match="some of the job's guests have migrated"):
        tools.require_saveable(RunningJobs(two_guests.n2.paths).jobs()[0], ends=True)
    end_job(two_guests)
    watch(two_guests)
    watch(two_guests, "n3")
    assert two_guests.n3.journal() is None and Move.read(two_guests.n2.paths, KEY) is None


@pytest.mark.parametrize("step", ["resolved", "asked", "after part"])
def test_watcher_killed_while_two_guests_are_split_continues(two_guests, step):
    two_guests.dies, two_guests.ends = step, ("succeeds", "fails paused")
    migrate(two_guests)
    watch(two_guests)
    assert f"died {step}" in two_guests.did() and assert_split(two_guests)


def test_two_guests_resume_if_neither_migrates(two_guests):
    two_guests.ends = ("fails", "fails paused")
    assert migrate(two_guests).startswith("the guests are still on n2")
    assert (two_guests.n2.states(), two_guests.n2.phase()) == (["runs", "runs"], "run")
    assert two_guests.n3.journal() is None and Move.read(two_guests.n2.paths, KEY) is None


def test_paused_arrival_of_a_failed_migration_is_destroyed(two_guests):
    two_guests.ends = ("succeeds", "fails")
    two_guests.n3.domain_of(two_guests.job.uuids[1]).write_text("still")
    migrate(two_guests)
    assert assert_split(two_guests)


def test_ended_second_guest_leaves_nothing(two_guests):
    two_guests.ends = ("succeeds", "ended")
    assert migrate(two_guests) == ""
    assert f"remove {JOB} n2" in two_guests.did() and two_guests.n2.journal() is None
    assert not Move.read(two_guests.n2.paths, KEY).part


def test_original_error_is_reported_instead_of_its_consequence(two_guests, monkeypatch):
    aborted = two_guests.top / "aborted"
    monkeypatch.setattr(domains, "abort_operation", lambda *_: aborted.touch())

    def migrates(_uri, uuid, *_, **_how):
        if uuid == two_guests.uuid:
            eventually(aborted.exists)
            raise HostFault("canceled by client")
        raise HostFault("a file that is open was deleted")

    monkeypatch.setattr(domains, "migrate_domain", migrates)
    assert migrate(two_guests) == "the guests are still on n2: a file that is open was deleted"


def test_queued_guest_is_not_sent_after_a_failure(two_guests, monkeypatch):
    """Starts of other users occupy all workers of libvirt except one."""
    worker = threading.Lock()

    def migrates(_uri, uuid, *_, **_how):
        two_guests.note(f"sent {uuid}")
        raise HostFault("a file that is open was deleted")

    monkeypatch.setattr(suspend, "libvirt_worker", lambda *_: worker)
    monkeypatch.setattr(domains, "migrate_domain", migrates)
    assert migrate(two_guests) == "the guests are still on n2: a file that is open was deleted"
    assert len([line for line in two_guests.did() if line.startswith("sent")]) == 1


def test_failure_of_one_guest_cancels_the_transfer_of_the_other(two_guests, monkeypatch):
    aborted = two_guests.top / "aborted"
    monkeypatch.setattr(domains, "abort_operation", lambda *_: aborted.touch())
    two_guests.ends = ("fails", "canceled")
    assert migrate(two_guests).startswith("the guests are still on n2")
    assert aborted.exists()


@pytest.mark.parametrize(("ends", "step"), [("succeeds", "sent"), ("fails paused", "after mark")])
def test_repeated_command_continues_a_killed_migration(world, ends, step):
    world.dies, world.ends = step, ends
    migrate(world)
    world.ends = "succeeds"
    assert migrate(world) == ""
    assert assert_on_target(world)


def test_guest_that_returned_and_cannot_migrate_again_is_kept(world):
    address = (("address", "10.0.0.9"),)
    uuid, uri = world.uuid, world.n2.uri
    guests = {uuid: address}
    record = Move(JOB, 0, KEY, "n2", "n3", uri, ("n1", "n3"), guests, phase="away")
    record.write(world.n2.paths)
    path = world.n2.paths.journal / f"{KEY}.jsonl"
    record = '{"op": "acquire", "seq": 9, "plugin": "core", "kind": "spare", "scope": "job", '
    record += '"guest": 0, "needs": [], "phase": "plan", "args": {"key": "x"}, "t": 1}'
    path.write_text(f"{path.read_text()}{record}\n")
    assert "a job with warm guests cannot be checkpointed or migrated yet" in migrate(world)
    assert (world.n2.state(), world.n2.phase()) == ("runs", "run")


def test_guest_stays_paused_while_the_destination_does_not_answer(world):
    world.ends, world.dies = "fails paused", "sent"
    migrate(world)
    world.lost.add("n3")
    assert "n3 did not answer" in watch(world) and "PAUSED" in watch(world)
    assert (world.n2.state(), world.n2.phase()) == ("still", "moves")
    (job,) = RunningJobs(world.n2.paths).jobs()
    assert suspend.phase(job) == "", "the job was resumed although n3 did not answer"
    world.lost.clear()
    watch(world)
    assert assert_on_source(world)


def test_guest_in_transfer_is_awaited(world):
    world.ends, world.dies = "fails paused", "sent"
    migrate(world)
    world.n3.domain.write_text("still")
    assert "does not know yet" in watch(world)
    assert (world.n2.state(), world.n3.state()) == ("still", "still")
    world.n3.domain.unlink()
    watch(world)
    assert assert_on_source(world)


def test_paused_arrival_is_destroyed_while_the_guest_runs_on_the_source(world):
    """The source's libvirtd was killed after the destination defined the domain (libvirt 11.3)."""
    world.ends, world.dies = "fails", "sent"
    migrate(world)
    world.n3.domain.write_text("still")
    watch(world)
    assert assert_on_source(world)


def test_guest_that_ran_and_ended_on_the_destination_is_not_resumed(world):
    world.ends, world.dies = "unreported", "sent"
    migrate(world)
    complete_arrival(world.n3, [world.uuid])
    world.n3.domain.unlink()
    watch(world)
    assert (world.n2.state(), world.n2.journal()) == ("", None)


def test_guest_running_on_both_nodes_is_reported_and_kept(world):
    world.ends, world.dies = "succeeds", "sent"
    migrate(world)
    world.n2.domain.write_text("runs")
    assert "destroy one with virsh" in watch(world)
    assert (world.n2.state(), world.n3.state()) == ("runs", "runs")


def test_unfinished_release_does_not_end_a_returned_guest(world):
    world.dies = "after release"
    migrate(world)
    assert Move.read(world.n2.paths, KEY).phase == migration_record.GONE
    arrives(world.n2, {"nodes": ["n1", "n2"]})
    world.n3.domain.rename(world.n2.domain)
    did = world.did()
    assert watch(world) == ""
    assert (world.n2.state(), world.n2.phase()) == ("runs", ARRIVES)
    assert world.did() == did, "the node of the returned guest was released"


def test_returning_guest_waits_for_the_lock_of_its_last_migration(world):
    world.dies = "after release"
    migrate(world)
    lock = take_lock(world.n2.paths.state / f"moves/{KEY}.lock", 0.0)
    with pytest.raises(HostFault, match="is held by another process"):
        migration_record.keep_for_return(world.n2.paths, KEY)
    os.close(lock)
    migration_record.keep_for_return(world.n2.paths, KEY)
    assert Move.read(world.n2.paths, KEY).phase == migration_record.AWAY
    (claim,) = migration_record.migrated_addresses([], world.n2.paths)
    assert claim.items == ("10.0.0.9",), "the address is free before the guest has returned"


def test_job_that_ends_before_the_transfer_leaves_nothing_on_the_destination(world):
    world.dies = "ready"
    migrate(world)
    end_job(world)
    assert watch(world) == "job 42 has ended"
    assert world.n3.journal() is None and f"release {JOB} n3" in world.did()
    assert Move.read(world.n2.paths, KEY) is None


def test_job_that_ends_during_the_transfer_leaves_nothing(world):
    world.dies, world.starts = "sent", False
    migrate(world)
    end_job(world)
    assert watch(world) == ""
    assert watch(world, "n3") == ""
    assert (world.n3.state(), world.n3.journal()) == ("", None)
    watch(world)
    assert Move.read(world.n2.paths, KEY) is None


def test_prepared_arrival_is_released_when_its_job_has_ended(world):
    """The source has lost power before it sent the guest."""
    world.dies = "ready"
    migrate(world)
    assert watch(world, "n3") == "" and world.n3.journal() is not None
    (world.top / "over").touch()
    assert watch(world, "n3") == "" and world.n3.journal() is None


def test_migration_record_is_kept_while_the_destination_does_not_answer(world):
    world.dies = "ready"
    migrate(world)
    end_job(world)
    world.lost.add("n3")
    assert "n3 did not answer" in watch(world)
    assert Move.read(world.n2.paths, KEY).phase == migration_record.EITHER


def test_requeued_job_can_use_the_reserved_address(world):
    assert migrate(world) == ""
    again, other = (SimpleNamespace(job=SimpleNamespace(id=of)) for of in (JOB, "43"))
    assert [*migration_record.migrated_addresses([again], world.n2.paths)] == []
    assert len([*migration_record.migrated_addresses([other], world.n2.paths)]) == 1


@pytest.mark.parametrize("life", JobState)
def test_start_removes_records_of_migrated_guests_of_ended_jobs(world, monkeypatch, life):
    """The release of the last job has ended the watcher that would have removed them."""
    assert migrate(world) == ""
    adapter = SimpleNamespace(job_states=lambda ids: dict.fromkeys(ids, life))
    batch = SimpleNamespace(node=lambda _: adapter)
    monkeypatch.setattr(migration_record.service, "batch_system", lambda _: (None, batch))
    found = [*node.vtorque_reserved_items(guests=[], site=world.n2.here.site)]
    assert len(found) == (life is not JobState.GONE)


def resolved(world, uuid, key=KEY):
    return arrival.resolve_guests(world.n3.here, JOB, key, "n3", {uuid: ""})[uuid]


def test_arrived_sister_guest_is_not_mistaken_for_another_guest(world):
    """Two nodes of a job drain at once, to one spare node: the second asks for its own guest."""
    arrives(world.n3, {"nodes": ["n1", "n3", "n4"]})
    assert resolved(world, "of n4's guest") == "none"
    assert world.n3.journal() is not None and world.did() == []
    world.n2.domain.rename(world.n3.domain)
    complete_arrival(world.n3, [world.uuid])
    states = {world.uuid: "runs"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domains, "domain_state", lambda _, uuid: states.get(uuid, ""))
        assert resolved(world, "of n4's guest") == "none"
        assert resolved(world, world.uuid) == "here"
    assert world.n3.phase() == "run" and world.did() == []


def test_destination_reports_none_only_after_its_start_has_ended(world):
    """The start may have reserved the node before a journal records the reservation."""
    lock = take_lock(world.n3.paths.job_lock(JOB), 0.0)
    try:
        assert resolved(world, world.uuid) == "comes"
        assert world.did() == []
    finally:
        os.close(lock)
    assert resolved(world, world.uuid) == "none"
    assert world.did() == [f"release {JOB} n3"]


def test_arrived_guest_is_released_when_its_job_has_ended(world):
    assert migrate(world) == ""
    assert watch(world, "n3") == ""
    assert world.n3.phase() == "run"
    (world.top / "over").touch()
    assert watch(world, "n3") == ""
    assert world.n3.journal() is None
    assert watch(world) == ""
    assert [*migration_record.migrated_addresses([], world.n2.paths)] == []


def test_expected_guest_is_released_when_its_job_has_ended(world):
    """No node reports the cancellation, because the source is lost or was never asked."""
    world.ends, world.dies = "fails paused", "sent"
    migrate(world)
    assert watch(world, "n3") == "" and world.n3.journal() is not None
    (world.top / "over").touch()
    assert watch(world, "n3") == "" and world.n3.journal() is None


def test_batch_system_is_queried_once_and_a_failing_job_does_not_stop_others(world, monkeypatch):
    """The end of a job's attempt is queried rarely, because it needs one query per job."""
    assert migrate(world) == ""
    asked = []
    lives = lambda _, ids: asked.append(ids) or {"41": JobState.ALIVE, "42": JobState.GONE}  # noqa: E731
    monkeypatch.setattr(ThisNode, "job_states", lives)

    def over(_, job_id, _attempt):
        raise Refused(f"the name of job {job_id} has line ends")

    monkeypatch.setattr(ReservingBatch, "has_ended", over)
    monkeypatch.setattr(ThisNode, "from_config", classmethod(lambda *_: world.n3.here))
    keys = {"41.0": ("41", 0), KEY: (JOB, 0)}
    migration_watch.release_ended(Path("/etc/x"), {"41.0": ("41", 0)}, seldom=False)
    with pytest.raises(HostFault, match=r"41\.0: the name of job 41 has line ends"):
        migration_watch.release_ended(Path("/etc/x"), keys, seldom=True)
    assert asked == [["41"], ["41", "42"]]
    assert world.n3.journal() is None


def test_finished_attempt_is_released_although_its_job_was_requeued(world, monkeypatch):
    assert migrate(world) == ""
    monkeypatch.setattr(ReservingBatch, "has_ended", lambda *_: True)
    assert watch(world, "n3") == ""
    assert world.n3.journal() is None


def test_watcher_starts_a_pending_step_once(world):
    world.dies = "after send"
    migrate(world)
    moves = migration_watch.MigrationWatcher(Path("/etc/x"), every=0.0)
    moves.poll(world.n2.paths, RunningJobs(world.n2.paths).jobs())
    (child,) = moves._work.values()
    moves.poll(world.n2.paths, RunningJobs(world.n2.paths).jobs())
    assert list(moves._work.values()) == [child]
    assert child.wait() == ""
    assert assert_on_target(world)


def test_watcher_starts_nothing_while_the_migration_is_locked(world):
    world.dies = "after send"
    migrate(world)
    moves = migration_watch.MigrationWatcher(Path("/etc/x"), every=0.0)
    with migration_record.lock_migration(world.n2.paths, KEY):
        moves.poll(world.n2.paths, RunningJobs(world.n2.paths).jobs())
    assert not moves._work


def test_lock_that_cannot_be_created_does_not_stop_the_watcher(world):
    """The migrating process reports the error."""
    world.dies = "after send"
    migrate(world)
    lock = world.n2.paths.state / "moves" / f"{KEY}.lock"
    lock.unlink()
    lock.mkdir()
    assert "Is a directory" in watch(world)


def test_other_nodes_of_the_job_are_notified_of_the_new_node(world):
    first = start_job(world.nodes["n1"])
    assert migrate(world) == ""
    assert first.kept.facts()["nodes"] == ["n1", "n3"]


def test_first_node_records_guests_on_nodes_outside_the_allocation(world, monkeypatch):
    """The first node removes the record when the guest has migrated again."""
    first = start_job(world.nodes["n1"])
    assert migrate(world) == ""
    guest = {"rank": 1, "hostname": "vn1-0"}
    running = {"n3": {"phase": "run", "guests": [guest]}}
    assert first.kept.facts()["elsewhere"] == running
    suspended = {"phase": "suspended", "guests": [guest]}
    arrival.record_state(world.nodes["n1"].here, KEY, "n3", suspended)
    arrival.record_departure(world.nodes["n1"].here, KEY, "n2", "n3", [guest])
    assert first.kept.facts()["elsewhere"] == {"n3": suspended}, "n1 has dropped the state of n3"
    first.kept.add_facts(elsewhere={})
    assert watch(world, "n3") == ""
    assert first.kept.facts()["elsewhere"] == running, "n3 has not reported its guests again"
    reports = []
    monkeypatch.setattr(reach, "ask", lambda *words: reports.append(words))
    migration_watch._check_job(world.n3.here, KEY, JOB, seldom=False)
    assert not reports, "n3 has reported an unchanged state again"
    arrival.record_state(world.nodes["n1"].here, KEY, "n4", running["n3"])
    assert first.kept.facts()["elsewhere"] == {"n4": running["n3"]}
    arrival.record_departure(world.nodes["n1"].here, KEY, "n4", "n2", [])
    assert first.kept.facts()["elsewhere"] == {}
    arrival.record_departure(world.nodes["n1"].here, KEY, "", "n3", [guest])
    assert first.kept.facts()["elsewhere"] == running


def test_guest_that_may_still_arrive_is_not_recorded(world):
    first = start_job(world.nodes["n1"])
    arrives(world.n3, {"nodes": ["n1", "n3"]})
    assert watch(world, "n3") == ""
    assert "elsewhere" not in first.kept.facts()


def test_guest_on_another_node_follows_requests_of_the_owner(world, monkeypatch):
    first = start_job(world.nodes["n1"], elsewhere={"n3": {}, "n4": {}})
    world.lost.add("n4")
    arrives(world.n3, {"nodes": ["n1", "n3"]})
    asked = []
    monkeypatch.setattr(arrival.request, "ask", lambda path, _, word, __: asked.append(word) or "")
    monkeypatch.setattr(ThisNode, "from_config", classmethod(lambda *_: world.nodes["n1"].here))
    job = RunningJobs(first.paths).jobs()[0]
    with pytest.raises(HostFault, match=r"^n4: n4 did not answer the request: no route to host$"):
        migration_watch._forward(Path(), job, ["n3", "n4"], "suspend")
    assert asked == ["suspend"]
    assert "the job has no guest" in run_in_child(
        lambda: arrival.suspend_or_resume(world.n2.here, "9.0", "resume"), 60
    )


@pytest.mark.parametrize(
    ("facts", "to", "why"),
    [
        ({"nodes": ["n2"]}, "n3", "n2 runs the job shell: guests on n2 cannot migrate"),
        ({"nodes": ["n2", "n1"]}, "n3", "vsub -vm resume=ID"),
        ({}, "n1", "n1 already runs a guest of the job"),
        ({}, "-oProxyCommand=x", "is not a valid node name"),
        ({"immovable": ["Unclot"]}, "n3", "use resources that cannot be migrated: Unclot"),
        ({"immovable": None}, "n3", "a version of vTorque that cannot migrate"),
    ],
)
def test_migration_that_is_not_supported_is_refused(world, facts, to, why):
    world.job.kept.add_facts(**facts)
    with pytest.raises(Refused, match=why):
        migration.migrate(world.n2.here, JOB, to)
    assert assert_on_source(world)


def test_refused_migration_leaves_no_file(world, monkeypatch):
    def refuses(*_):
        raise Refused("its guest has a disk")

    monkeypatch.setattr(migration.saving, "hold", refuses)
    assert migrate(world) == "its guest has a disk"
    assert not list((world.n2.paths.state / "moves").iterdir())


def test_migration_needs_remote_command(world):
    world.settings = Settings()
    with pytest.raises(
        Refused, match=r"migration .* is disabled .*\(\[plugin.survive\] remote_command is empty\)"
    ):
        migration.migrate(world.n2.here, JOB, "n3")


def test_remote_command_without_the_node_placeholder_is_refused():
    with pytest.raises(ValueError, match="it must contain "):
        Settings(remote_command="ssh n1")


def test_suspended_job_is_refused(world):
    world.job.journal.phase("paused")
    with pytest.raises(Refused, match="the job is suspended"):
        migration.migrate(world.n2.here, JOB, "n3")


def test_command_on_another_node_names_the_right_nodes(world, monkeypatch):
    known = SimpleNamespace(jobs=lambda: [SimpleNamespace(id=JOB, nodes=("n1", "n2"))])
    batch = SimpleNamespace(submitter=lambda _: known)
    monkeypatch.setattr(migration.service, "batch_system", lambda _: (None, batch))
    with pytest.raises(
        Refused, match=r"no guest on this node: run the command on .* one of n1, n2"
    ):
        migration.migrate(world.n3.here, JOB, "n1")


@pytest.mark.parametrize(
    "question", [b"", b"[]", b'{"ask": "x", "job": "4", "key": "4.0"}', b'{"ask": "resolve"}',
                 b'{"ask": "gone", "job": "4", "key": "../4", "node": "n2", "to": "n3"}',
                 b'{"ask": "gone", "job": "4", "key": "42.0", "node": "n2", "to": "n3"}']
)  # fmt: skip
def test_invalid_question_is_refused(world, question):
    with pytest.raises(UsageError):
        arrival.answer(world.n3.here, question, *NOTHING)


def test_word_with_shell_characters_is_not_sent():
    with pytest.raises(Refused, match="not safe for a shell"):
        reach.argv(Settings(remote_command="ssh {node}"), "n3", ("a;b",))
    assert reach.argv(Settings(remote_command="ssh -x {node}"), "n3", ("a",)) == [
        "ssh",
        "-x",
        "n3",
        "a",
    ]
