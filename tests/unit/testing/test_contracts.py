"""The contracts of builders, exporters and sinks: a correct one passes, each defect is found."""

import contextlib
import logging
import threading

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_core.api.image_builder import Building, BuiltImage
from vtorque_testing import far_end
from vtorque_testing.builder import BuilderContract
from vtorque_testing.exporter import ExporterContract
from vtorque_testing.sink import SinkContract

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """A short timeout: some defects are events that do not happen, or do not end."""
    monkeypatch.setattr(far_end, "_WAIT", 5.0)


# -- builders ----------------------------------------------------------------------------------


class CorrectBuilder:
    """A builder without a defect."""

    def __init__(self):
        self.valid_arguments, self.invalid_arguments = {"text": "boot"}, ({"text": ""},)

    @property
    def builder(self):
        return self

    def build(self, arguments, staging, progress):
        self.check(arguments, progress)
        progress("write the disk")
        (staging / "disk.raw").write_text(arguments["text"])
        return BuiltImage("linux", "debian", "x86_64", 64, "disk.raw", "raw")

    def check(self, arguments, progress):
        if unknown := arguments.keys() - {"text"}:
            raise Refused(f"{unknown.pop()}: no such option")
        if not arguments["text"]:
            raise Refused("text: is empty")
        if len(arguments["text"]) > progress.max_disk:
            raise Refused("text: is too large")


class NamesWhatIsNotThere(CorrectBuilder):
    def build(self, arguments, staging, progress):
        super().build(arguments, staging, progress)
        return BuiltImage("linux", "debian", "x86_64", 64, "root.raw", "raw")


class NamesAPath(CorrectBuilder):
    def build(self, arguments, staging, progress):
        super().build(arguments, staging, progress)
        return BuiltImage("linux", "debian", "x86_64", 64, str(staging / "disk.raw"), "raw")


class SaysQcow2(CorrectBuilder):
    def build(self, arguments, staging, progress):
        super().build(arguments, staging, progress)
        return BuiltImage("linux", "debian", "x86_64", 64, "disk.raw")


class BuildsBesideIt(CorrectBuilder):
    def build(self, arguments, staging, progress):
        (staging.parents[1] / "cache").write_text("x")
        return super().build(arguments, staging, progress)


class TakesAnyOption(CorrectBuilder):
    def check(self, arguments, progress):
        super().check({"text": arguments["text"]}, progress)


class BlamesTheHost(CorrectBuilder):
    def check(self, arguments, progress):
        try:
            super().check(arguments, progress)
        except Refused as error:
            raise HostFault(str(error)) from None


class TellsNothing(CorrectBuilder):
    def build(self, arguments, staging, progress):
        return super().build(arguments, staging, Building(lambda _: None, progress.told))


class IgnoresTheLimit(CorrectBuilder):
    def check(self, arguments, progress):
        super().check(arguments, Building(progress.step, progress.told))


def run_builder(harness, tmp_path):
    """Run the tests of the contract, one by one, in separate directories."""
    contract = BuilderContract()
    for number, name in enumerate(n for n in dir(contract) if n.startswith("test_")):
        staging = tmp_path / str(number) / "pool" / "staging"
        staging.mkdir(parents=True)
        steps = []
        known = {
            "harness": harness, "staging": staging, "steps": steps,
            "progress": Building(steps.append, lambda *_: None),
        }  # fmt: skip
        call(getattr(contract, name), known)


def call(test, known):
    test(**{each: known[each] for each in test.__annotations__ if each in known})


def test_sound_builder_passes(tmp_path):
    run_builder(CorrectBuilder(), tmp_path)


@pytest.mark.parametrize("kind", CorrectBuilder.__subclasses__())
def test_defect_of_a_builder_is_found(kind, tmp_path):
    with pytest.raises((AssertionError, HostFault, OSError, pytest.fail.Exception)):
        run_builder(kind(), tmp_path)


# -- exporters ---------------------------------------------------------------------------------


class Exporter:
    """An exporter without a defect; its destination is a list."""

    def __init__(self):
        self.arrived, self.is_silent = [], False
        self.hang = threading.Event()

    def open(self):
        return self

    def received_samples(self):
        return list(self.arrived)

    @contextlib.contextmanager
    def silence(self):
        self.is_silent = True
        yield
        self.is_silent = False

    def write(self, samples, deadline):
        if self.is_silent:
            raise TimeoutError("no answer")
        self.arrived += [self.one(each) for each in samples]

    def one(self, sample):
        return sample.name, sample.value, dict(sample.labels)

    def end(self, jobs):
        pass

    def close(self):
        pass


class LosesLabels(Exporter):
    def one(self, sample):
        return sample.name, sample.value, {"job": sample.labels["job"]}


class SpoilsQuotes(Exporter):
    def one(self, sample):
        labels = {key: value.replace('"', "") for key, value in sample.labels.items()}
        return sample.name, sample.value, labels


class Rounds(Exporter):
    def one(self, sample):
        return sample.name, round(sample.value, 3), dict(sample.labels)


class HangingDriver(Exporter):
    def write(self, samples, deadline):
        if self.is_silent:
            self.hang.wait(60)
        super().write(samples, deadline)


class SwallowsItsErrors(Exporter):
    def write(self, samples, deadline):
        with contextlib.suppress(OSError):
            super().write(samples, deadline)


class NeedsSamples(Exporter):
    def write(self, samples, deadline):
        samples[0]
        super().write(samples, deadline)


class SendsAgain(Exporter):
    sent = ()

    def write(self, samples, deadline):
        super().write([*self.sent, *samples], deadline)
        self.sent = samples


class KnowsItsJobsOnly(Exporter):
    def end(self, jobs):
        for job in jobs:
            if job not in [labels["job"] for _, _, labels in self.arrived]:
                raise KeyError(job)


class ClosesOnce(Exporter):
    is_open = True

    def close(self):
        if not self.is_open:
            raise OSError("Bad file descriptor")
        self.is_open = False


def run_all(contract, harness):
    for name in dir(contract):
        if name.startswith("test_"):
            getattr(contract, name)(harness())


def test_sound_exporter_passes():
    run_all(ExporterContract(), Exporter)


@pytest.mark.parametrize("kind", Exporter.__subclasses__())
def test_defect_of_an_exporter_is_found(kind):
    with pytest.raises((AssertionError, IndexError, KeyError, OSError)):
        run_all(ExporterContract(), kind)


def _never(_seconds):
    raise RuntimeError("the contract waits")


class LosesAll(Exporter):
    def write(self, samples, deadline):
        pass


def test_missing_samples_fail_without_waiting(monkeypatch):
    monkeypatch.setattr(far_end.time, "sleep", _never)
    with pytest.raises(AssertionError, match=r"sent: .*received: \[\]; .* asynchronous = True"):
        ExporterContract().test_samples_arrive(LosesAll())


class ArrivesLater(Exporter):
    asynchronous = True
    under_way = ()

    def write(self, samples, deadline):
        super().write([], deadline)
        self.under_way = samples

    def received_samples(self):
        late, self.under_way = self.under_way, ()
        found = list(self.arrived)
        self.arrived += [self.one(each) for each in late]
        return found


def test_delayed_samples_of_an_asynchronous_receiver_are_accepted():
    run_all(ExporterContract(), ArrivesLater)


# -- sinks -------------------------------------------------------------------------------------


class Sink(logging.Handler):
    """A sink without a defect; its destination is a list."""

    def __init__(self):
        super().__init__()
        self.arrived, self.is_silent = [], False

    def open(self):
        return self

    def received_records(self):
        return list(self.arrived)

    @contextlib.contextmanager
    def silence(self):
        self.is_silent = True
        yield
        self.is_silent = False

    def emit(self, record):
        if self.is_silent:
            raise TimeoutError("no answer")
        self.send(record.job, record.getMessage())

    def send(self, job, message):
        self.arrived.append((job, message))


class Handles(Sink):
    """The behavior of logging's own handlers: the record is lost."""

    def emit(self, record):
        with contextlib.suppress(OSError):
            super().emit(record)


class CutsLines(Sink):
    def send(self, job, message):
        super().send(job, message[:1000])


class SplitsDetails(Sink):
    def emit(self, record):
        super().emit(record)
        for line in record.entry.get("detail") or ():
            self.send(record.job, line)


class KnowsOneJob(Sink):
    def send(self, job, message):
        super().send("42.srv", message)


class DefectDoubles(Sink):
    def send(self, job, message):
        super().send(job, message)
        super().send(job, message)


class Waits(Sink):
    def emit(self, record):
        if self.is_silent:
            threading.Event().wait(60)
        super().emit(record)


class LosesRecords(Sink):
    def send(self, job, message):
        pass


def test_missing_records_fail_without_waiting(monkeypatch):
    monkeypatch.setattr(far_end.time, "sleep", _never)
    with pytest.raises(AssertionError, match=r"sent: .*received: \[\]; .* asynchronous = True"):
        SinkContract().test_record_arrives_with_its_job(LosesRecords())


def test_sound_sink_passes():
    run_all(SinkContract(), Sink)


@pytest.mark.parametrize("kind", Sink.__subclasses__())
def test_defect_of_a_sink_is_found(kind):
    with pytest.raises(AssertionError):
        run_all(SinkContract(), kind)
