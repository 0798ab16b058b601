"""Requests of a job's owner to root's watcher: two words, read without waiting."""

import os
import threading
from pathlib import Path

import pytest

import running_journal
from patience import LONG, eventually
from vtorque_core.api import HostFault
from vtorque_survive import request

TOKEN = "0123456789abcdef"


@pytest.fixture
def job(tmp_path):
    paths = running_journal.paths_below(tmp_path)
    job = running_journal.JournalledJob(paths)
    paths.job_run(job.key).mkdir(parents=True)
    return job


def opened(path):
    request.Fifo(str(path), os.getuid()).create()
    return request.listen(path)


@pytest.fixture
def listening_job(job):
    path = request.path_of(job.paths, job.key)
    descriptor = opened(path)
    yield path, descriptor
    os.close(descriptor)


def served(descriptor, job, text):
    """Answer the next word."""
    found = []
    eventually(lambda: found or found.extend(filter(None, [request.take_request(descriptor)])))
    ((word, token, pid),) = found
    assert pid == os.getpid()
    request.answer(job.kept, token, text)
    return word


@pytest.mark.parametrize("text", ["", "the job has ended"])
def test_request_is_answered(job, listening_job, text):
    path, descriptor = listening_job
    said = []
    thread = threading.Thread(target=lambda: said.append(served(descriptor, job, text)))
    thread.start()
    assert request.ask(path, job.kept, request.SUSPEND, 30.0) == text
    thread.join()
    assert said == ["suspend"]


def test_fifo_is_writable_by_the_owner_only_and_reused_by_another_watcher(listening_job):
    path, descriptor = listening_job
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.getuid()
    again = request.listen(path)
    assert os.path.samestat(os.fstat(again), os.fstat(descriptor))
    os.close(again)


@pytest.mark.parametrize(
    "said",
    [
        b"suspend\n",
        f"SUSPEND {TOKEN} 7\n".encode(),
        f"suspend {TOKEN} 7".encode(),
        f"suspend {TOKEN}0 7\n".encode(),
        f"resume {TOKEN}\n".encode(),
        f"resume {TOKEN} -1\n".encode(),
        f"resume  {TOKEN} 7\n".encode(),
        b"\0" * 60_000,
        b"\xff\n",
    ],
)
def test_invalid_input_is_discarded(listening_job, said):
    path, descriptor = listening_job
    user = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(user, said)
    for _ in range(20):
        assert request.take_request(descriptor) is None
    os.write(user, f"resume {TOKEN} 7\n".encode())
    assert request.take_request(descriptor) == ("resume", TOKEN, 7)
    os.close(user)


def test_last_of_many_requests_is_used(listening_job):
    path, descriptor = listening_job
    user = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(user, f"suspend {TOKEN} 6\nresume {TOKEN[::-1]} 7\n".encode())
    assert request.take_request(descriptor) == ("resume", TOKEN[::-1], 7)
    os.close(user)


def test_path_that_is_not_a_fifo_is_rejected(tmp_path):
    path = tmp_path / "suspend.fifo"
    path.write_text("")
    with pytest.raises(OSError, match="is not a FIFO"):
        request.listen(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        request.listen(path)


def test_missing_watcher_is_reported_with_a_fix(job):
    path = request.path_of(job.paths, job.key)
    for made in (False, True):
        if made:
            os.close(opened(path))
        with pytest.raises(HostFault, match="ask your administrator"):
            request.ask(path, job.kept, request.RESUME, 1.0, patience=0.1)


def test_starting_watcher_is_awaited(job):
    path = request.path_of(job.paths, job.key)
    said = []

    def late():
        descriptor = opened(path)
        said.append(served(descriptor, job, "done"))
        os.close(descriptor)

    thread = threading.Timer(0.2, late)
    thread.start()
    assert request.ask(path, job.kept, request.RESUME, 30.0, patience=30.0) == "done"
    thread.join()


def test_watcher_that_does_not_answer_is_reported(job, listening_job):
    path, _ = listening_job
    with pytest.raises(HostFault, match="did not answer in time"):
        request.ask(path, job.kept, request.RESUME, 0.1)


def test_fifo_is_released_twice_and_after_a_partial_create(tmp_path):
    fifo = request.Fifo(str(tmp_path / "suspend.fifo"), os.getuid())
    fifo.create()
    with pytest.raises(HostFault, match="File exists"):
        fifo.create()
    fifo.release()
    fifo.release()
    os.mkfifo(fifo.path)
    fifo.release()
    assert not Path(fifo.path).exists()


def test_job_that_ends_before_a_watcher_listens_is_reported(job):
    path = request.path_of(job.paths, job.key)
    threading.Timer(0.2, job.kept.add_facts, kwargs={"ended": 1.0}).start()
    with pytest.raises(HostFault, match="the job has ended"):
        request.ask(path, job.kept, request.RESUME, LONG, patience=LONG)


def test_request_without_permission_fails_immediately(job):
    path = request.path_of(job.paths, job.key)
    path.symlink_to("elsewhere")
    with pytest.raises(HostFault, match="symbolic link"):
        request.ask(path, job.kept, request.RESUME, LONG, patience=LONG)
