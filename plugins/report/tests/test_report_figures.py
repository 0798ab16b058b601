"""Figures and hints of jobs that were calculated by hand."""

import dataclasses
import json

import pytest

import kept_data
from vtorque_report import hints as thresholds
from vtorque_report import load
from vtorque_report.figures import Figures, guest_figures
from vtorque_report.hints import hints
from vtorque_report.read import Attempt, Line, Phase, ReportGuest
from vtorque_report.units import byte_unit, clock, duration, percent, size

G = kept_data.G
GIB = 1 << 30
GUEST = ReportGuest("n1", 0, 0, "vn1", 4, 8192)
ATTEMPT = Attempt(
    "42.srv", "", 0, "ada", "n1", ("n1",), "slurm", "debian", "linux", 0.0, 220.0, 0, (GUEST,),
    (Phase("boot", None, 0.0, 20.0), Phase("run", None, 20.0, 220.0)),
)  # fmt: skip


def line(time, **values):
    return Line(time, {f"{G}{name}": float(value) for name, value in values.items()})


def measured(*lines, **more):
    return guest_figures(dataclasses.replace(GUEST, lines=lines, **more), ATTEMPT, 0.0)


def test_cpu_time_is_that_of_the_script_only():
    found = measured(
        line(5.0, cpu_seconds_total=1, cpu_steal_seconds_total=0),
        line(20.0, cpu_seconds_total=30, cpu_steal_seconds_total=10),
        line(120.0, cpu_seconds_total=130, cpu_steal_seconds_total=35),
        line(220.0, cpu_seconds_total=230, cpu_steal_seconds_total=60),
    )
    assert (found.cpu, found.core_seconds) == (200.0, 800.0)
    assert found.cpu_share == 0.25 and found.cores == 1.0
    assert found.steal_share == pytest.approx(50 / 250)


def test_overhead_is_all_qemu_time_except_vcpus():
    names = ("emulator", "iothread", "vhost")
    begin = {f"{n}_cpu_seconds_total": 1 for n in names}
    end = {f"{n}_cpu_seconds_total": 11 for n in names}
    found = measured(
        line(20.0, cpu_seconds_total=0, **begin), line(220.0, cpu_seconds_total=100, **end)
    )
    assert found.overhead == 30.0 and found.overhead_share == pytest.approx(0.3)


def test_devices_are_summed_from_the_boot():
    lines = [
        Line(t, {f'{G}disk_read_bytes_total{{device="vd{d}"}}': v for d, v in values.items()})
        for t, values in ((20.0, {"a": 5.0, "b": 7.0}), (220.0, {"a": 50.0, "b": 7.0}))
    ]
    found = measured(*lines)
    assert found.disk == (57.0, 0.0) and found.network is None and found.cpu is None


def test_memory_is_the_peak_of_qemu():
    found = measured(line(20.0, memory_rss_bytes=3 * GIB), line(30.0, memory_rss_bytes=2 * GIB))
    assert found.memory == 3 * GIB


def test_kept_totals_are_used_without_samples():
    found = measured(cpu_seconds=440.0, peak_mib=1024)
    assert (found.cpu, found.core_seconds, found.cpu_share) == (440.0, 880.0, 0.5)
    assert (found.memory, found.measured) == (GIB, False)
    assert (found.steal_share, found.disk, found.network) == (None, None, None)


def test_sample_without_a_libvirt_answer_is_skipped():
    found = measured(
        line(20.0, vcpus=4), line(22.0, cpu_seconds_total=10), line(122.0, cpu_seconds_total=110),
        line(220.0, vcpus=4),
    )  # fmt: skip
    assert (found.cpu, found.core_seconds) == (100.0, 400.0)


def figures(**values):
    base = {
        "vcpus": 4, "ram": 8 * GIB, "core_seconds": 800.0, "cpu": 700.0, "steal": 0.0,
        "overhead": 0.0, "memory": 6.0 * GIB, "measured": True,
    }  # fmt: skip
    return Figures(**base | values)


def hints_of(attempt=ATTEMPT, **values):
    one = figures(**values)
    return list(hints(attempt, [one], one))


def test_efficient_job_gets_no_hint():
    assert hints_of() == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memory": 0.6 * GIB}, "requested 8.0 GiB, used 614 MiB: request ram=768M"),
        ({"memory": 3.1 * GIB}, "requested 8.0 GiB, used 3.1 GiB: request ram=4G"),
        ({"cpu": 96.0}, "CPU 12 % busy: request vcpus=1 instead of 4"),
        ({"cpu": 300.0}, "CPU 38 % busy: request vcpus=2 instead of 4"),
        (
            {"vcpus": 1, "core_seconds": 200.0, "cpu": 20.0},
            "CPU 10 % busy: the script mostly waits for disk, network or other processes",
        ),
        ({"steal": 3.0, "cpu": 1.0, "core_seconds": 4.0}, "steal 75 %"),
        (
            {"steal": 300.0},
            "steal 30 %: the guests had to wait for CPUs, because the node is overcommitted",
        ),
        (
            {"overhead": 350.0},
            "QEMU's own CPU time for disk and network was 50 % of the guests'",
        ),
        ({"drops": 5000.0}, "5000 network packets were dropped"),
    ],
)
def test_each_kind_of_waste_gets_a_hint(values, said):
    (only,) = hints_of(**values)
    assert said in only


@pytest.mark.parametrize(
    "values",
    [
        {"memory": 4.0 * GIB},  # half
        {"ram": 512 << 20, "memory": 100.0 * (1 << 20)},  # no worthwhile part
        {"memory": 7.9 * GIB},  # QEMU's own memory is always that much
        {"cpu": 400.0},
        {"cpu": 9.0, "core_seconds": 39.0},  # too short for a decision
        {"steal": 60.0},
        {"steal": 0.9, "cpu": 1.0, "core_seconds": 4.0},
        {"overhead": 150.0},
        {"drops": 3.0},
        {"cpu": None, "steal": None, "overhead": None, "memory": None},
    ],
)
def test_figures_below_a_threshold_give_no_hint(values):
    assert hints_of(**values) == []


def test_long_start_gets_a_hint():
    slow = dataclasses.replace(
        ATTEMPT, phases=(Phase("boot", None, 0.0, 40.0), Phase("run", None, 40.0, 100.0))
    )
    assert (
        "starting the guests took 40 % of the job (40 s): combine several short steps in one job"
        in hints_of(slow)[0]
    )
    assert 0.2 < thresholds.BOOT < 0.4


def test_running_job_gets_no_hint_about_unused_resources():
    running = dataclasses.replace(ATTEMPT, status=None, ended=None)
    slow = dataclasses.replace(running, phases=(Phase("boot", None, 0.0, 40.0),))
    assert hints_of(slow, memory=0.1 * GIB, cpu=9.0) == []
    assert ["steal" in each for each in hints_of(running, memory=0.1 * GIB, steal=300.0)] == [True]


@pytest.mark.parametrize(
    ("code", "said"), [(123, "a guest died"), (122, "again"), (121, "rejected")]
)
def test_failed_job_gets_only_the_hint_about_its_failure(code, said):
    failed = dataclasses.replace(ATTEMPT, status=code)
    (only,) = hints_of(failed, memory=0.1 * GIB, cpu=1.0)
    assert said in only and "vmgr logs 42.srv" in only


def test_missing_data_is_reported(tmp_path):
    report = load.report([kept_data.make(tmp_path, seconds=40.0, telemetry=False)], 0.0)
    assert report.total.cpu_share is not None
    assert (
        "no samples" in report.missing_data[0]
        and "CPU time includes the boot" in report.missing_data[0]
    )


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"ended": None, "status": ""}, "running"),
        ({"status": ""}, "ended"),
        ({"status": "7"}, "ended, exit code 7"),
        ({"status": "123"}, "ended, exit code 123 (a guest died)"),
        ({"status": "", "phases": []}, "ended before its script was started"),
        ({"ended": None, "status": "0"}, "script ended, exit code 0"),
    ],
)
def test_state_is_described_in_words(tmp_path, facts, state):
    kept_data.make(tmp_path, telemetry=False, **facts)
    assert load.report([tmp_path], kept_data.START + 60).state == state


def test_report_data_is_valid_json(tmp_path):
    report = load.report([kept_data.make(tmp_path, seconds=100.0, guests=2)], 0.0)
    data = json.loads(json.dumps(report.data()))
    assert data["total"]["busy"] == pytest.approx(report.total.cpu_share)
    assert [g["rank"] for g in data["guests"]] == [0, 1]
    assert {p["name"] for p in data["phases"]} >= {"boot", "ready", "run"}
    assert data["times"] == pytest.approx({"start": kept_data.BOOT, "script": 100.0, "end": 0.4})


def test_running_job_has_no_end_time(tmp_path):
    kept_data.make(tmp_path, telemetry=False, ended=None)
    assert load.report([tmp_path], kept_data.START + 60).times == {}


def test_numbers_are_formatted_for_people():
    assert [size(n) for n in (0, 999, 1000, 614 << 20, 8 << 30)] == [
        "0 B", "999 B", "1.0 KiB", "614 MiB", "8.0 GiB",
    ]  # fmt: skip
    assert byte_unit(1e30)[1] == "PiB"
    times = [duration(t) for t in (0.034, 3.04, 59.4, 61, 3600, 86400 * 3)]
    assert times == ["0.03 s", "3.0 s", "59 s", "1 min 01 s", "1 h 00 min", "3 d 00 h"]
    assert [percent(p) for p in (0, 0.0123, 0.12, 1)] == ["0 %", "1.2 %", "12 %", "100 %"]
    assert clock(1e17) == "" and clock(0.0).startswith("19")


def test_suspended_time_does_not_count_as_idle():
    """Suspended by the batch system, or paused by the owner: no CPU could be used then."""
    stood = (
        Phase("boot", None, 0.0, 10.0),
        Phase("run", None, 10.0, 30.0),
        Phase("suspended", None, 30.0, 70.0),
        Phase("run", None, 70.0, 80.0),
        Phase("paused", None, 80.0, 90.0),
        Phase("run", None, 90.0, 110.0),
    )
    attempt = dataclasses.replace(ATTEMPT, phases=stood, ended=110.0)
    guest = dataclasses.replace(GUEST, lines=(), cpu_seconds=30.0)
    figures = guest_figures(guest, attempt, 110.0)
    assert figures.core_seconds == guest.vcpus * 60.0
