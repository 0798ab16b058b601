"""An experiment on a double of a batch system; as a program it runs one, to be killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import batch_double
from vtorque_experiment import create, definition
from vtorque_experiment.batch import BatchCommands
from vtorque_experiment.book import Book
from vtorque_experiment.end_collector import Collector
from vtorque_experiment.place import validate_place
from vtorque_experiment.runner import Runner

SCRIPT = '#!/bin/sh\necho "$EXPERIMENT_POINT" >>"$EXPERIMENT_ROOT/ran"\necho "rate ${SIZE:-1}"\n'


def write(top, text, script=SCRIPT):
    """Write an experiment's file and its script; return the file."""
    top.mkdir(exist_ok=True)
    (top / "batch").mkdir(exist_ok=True)
    (top / "job.sh").write_text(script)
    (top / "e.toml").write_text(text)
    return top / "e.toml"


def made(top, text, script=SCRIPT):
    """Make an experiment's results below ``top``."""
    place = validate_place(top / "results")
    create.create(write(top, text, script), place, dict)
    return place


def double(top, interval=0.3):
    vsub = (sys.executable, "-I", "-S", batch_double.__file__, str(top / "batch"))
    return BatchCommands(vsub, lambda: batch_double.jobs(top / "batch"), interval)


def run(top, *, stop=None, told=lambda line: None, batch=None, hours=None):
    """Run it to its end in this process."""
    place = validate_place(top / "results")
    found = definition.read(place.definition)
    book = Book(place.database)
    try:
        runner = Runner(
            place, found, book, batch or double(top), Collector(found, lambda job, point: "no"),
            told=told, stop=stop or threading.Event(), hours=hours,
        )  # fmt: skip
        runner.retake_numbers()
        return runner.run()
    finally:
        book.close()


def process(top):
    """Start a run in a separate process, to be killed."""
    support = str(Path(__file__).parent)
    environ = {**os.environ, "PYTHONPATH": support}
    return subprocess.Popen([sys.executable, __file__, str(top)], env=environ)


def rows(top):
    book = Book(validate_place(top / "results").database)
    try:
        return book.rows()
    finally:
        book.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
