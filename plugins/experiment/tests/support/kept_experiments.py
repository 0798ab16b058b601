"""Artificial results of experiments: the same files, without jobs."""

import json

import experiments
from vtorque_experiment.book import Book


def make(top, text, values, *, failed=(), machine="Linux 6.1", script=experiments.SCRIPT):
    """Make one below ``top``; return its directory.

    ``values``: called with a cell and the repetition, returns the numbers; ``failed``: points.
    """
    place = experiments.made(top, text, script)
    book = Book(place.database)
    cells = book.cells()
    for row in book.rows():
        number = row.number
        book.begin(number)
        book.record_submission(number, f"{number}.double", 1e9 + number * 60 - 1)
        found = values(cells[row.cell], row.repetition)
        reason = "exit code 1: <broken>" if number in failed else ""
        book.record_end(
            number, {"code": 0.0, "wait": 1.0} | found, 1e9 + number * 60, machine, reason
        )
    book.close()
    host = {"name": "n1", "cpu": "A CPU", "kernel": "6.1 #1"}
    known = {"host": host, "batch_system": "double", "qemu": "QEMU 7.2", "libvirt": "9.0"}
    place.versions.write_text(json.dumps(known | {"vtorque": {"vtorque-core": "1.0"}}))
    return place.top


def sweep(top, repetitions, factor=1.0, **more):
    """Make one of bare metal and guests of two sizes, with equal values for SIZE=2 and SIZE=1."""
    text = (
        f'title = "A sweep"\nscript = "job.sh"\nrepetitions = {repetitions}\nseed = 1\n'
        "matrix.bare = [true, false]\nmatrix.vm.vcpus = [1, 2]\nmatrix.env.SIZE = [1, 2]\n"
        'take.rate = {pattern = "rate (.*)", unit = "MB/s"}\n'
    )

    def values(cell, repetition):
        noise = 1 + ((repetition * 7919) % 101 - 50) / 5000
        base = 10.0 * cell["env.SIZE"] * (1.0 if cell["bare"] else 1.1 / cell["vm.vcpus"])
        return {"wall": base * noise * factor, "rate": 1000 / base * noise}

    return make(top, text, values, **more)
