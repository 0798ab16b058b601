"""The Snap task of a job: its manifest, start and deletion."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import syslog
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vtorque_core.api import HostFault, name_errors
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_snap.access import Access, is_local, value_at

_SETTLE = 0.2  # seconds: snapteld may still process the request of a killed start


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders such as ``[jobid]`` by values. Unknown placeholders stay unchanged."""
    return re.sub(r"\[(\w+)\]", lambda found: values.get(found[1], found[0]), text)


def manifest(template: bytes, name: str, values: Mapping[str, str], guests: Sequence[str]) -> bytes:
    """Return the body of the request that creates a task (Snap's docs/TASKS.md).

    Args:
        template: a task manifest. ``[jobid]``, ``[username]`` and ``[node]`` are replaced in its
            strings. A key with ``[guest]``, such as a metric, is repeated for each guest.
        name: the task's name.
        values: values of the placeholders, which are also the tags of all metrics.
        guests: names of the domains.

    Raises:
        HostFault: the template is not a valid manifest.
    """
    with name_errors("template: is not valid JSON", ValueError, RecursionError):
        task = _fill_templates(json.loads(template), values, guests)
    metrics, tags = (value_at(task, f"workflow.collect.{key}") for key in ("metrics", "tags"))
    if not isinstance(metrics, dict) or not all(len(each) > 1 for each in metrics or [""]):
        raise HostFault("template: workflow.collect.metrics is missing (Snap's docs/TASKS.md)")
    tags = {} if tags is None else tags
    if not isinstance(tags, dict) or not all(isinstance(each, dict) for each in tags.values()):
        raise HostFault("template: workflow.collect.tags is invalid (Snap's docs/TASKS.md)")
    for metric in metrics:  # the first character separates: /intel/psutil, |intel|psutil
        root = metric[0] + metric[1:].split(metric[0])[0]
        tags[root] = {**tags.get(root, {}), **values}
    task["workflow"]["collect"]["tags"] = tags
    task |= {"name": name, "start": False}
    # snapteld replaces $NAME in what it gets by its own environment (core/task.go, UnmarshalBody).
    return json.dumps(task).replace("$", "\\u0024").encode("ascii")


def _fill_templates(value: Any, values: Mapping[str, str], guests: Sequence[str]) -> Any:
    if isinstance(value, str):
        return fill(value, values)
    if isinstance(value, list):
        return [_fill_templates(item, values, guests) for item in value]
    if not isinstance(value, dict):
        return value
    pairs = []
    for key, item in value.items():
        for guest in guests if "[guest]" in key else [""]:
            known = {**values, "guest": guest} if guest else values
            pairs.append((fill(key, known), _fill_templates(item, known, guests)))
    return dict(pairs)


@dataclass(frozen=True)
class SnapTask(Resource):
    """A running task of snapteld, identified by its name.

    A release never fails, because a failure would keep the job's CPUs and memory leased. If
    snapteld did not delete a task, the task is noted in ``notes``. The release of a later job's
    task also deletes the noted tasks.

    Args:
        name: the task's name, unique in this snapteld.
        access: the fields of :class:`Access`.
        deadline: the time limit of ``create()`` and of ``release()``, in seconds.
        notes: a directory that root owns.
        body: the manifest, which may contain passwords.
    """

    kind: ClassVar[str] = "snap-task"
    scope: ClassVar[Literal["job", "node"]] = "job"
    volatile: ClassVar[bool] = False  # snapteld may be on another machine

    name: str
    access: tuple[str, ...]
    deadline: float
    notes: str
    body: bytes = unjournalled(b"")

    def create(self) -> None:
        """Create and start the task; replace any task of the same name. Raises HostFault."""
        from vtorque_snap.client import SnapClient, run_with_client  # noqa: PLC0415 (8 ms, only if needed)

        def work(client: SnapClient) -> None:
            client.remove({self.name})
            client.start(client.create(self.body))

        run_with_client(Access(*self.access), self.deadline, work)

    def release(self) -> None:
        """Stop and delete this task of snapteld, and tasks that earlier releases could not delete.

        Idempotent. If a task cannot be deleted, its name is recorded in ``notes``.
        """
        from vtorque_snap.client import NotRunning, SnapClient, run_with_client  # noqa: PLC0415 - as above

        url = self.access[0]
        left = dict(read_notes(self.notes, url))

        def work(client: SnapClient) -> None:
            if not client.remove({self.name, *left.values()}):
                time.sleep(_SETTLE)
                client.remove({self.name})

        try:
            run_with_client(Access(*self.access), self.deadline, work)
        except NotRunning as error:
            if not is_local(url):
                return self._note(str(error))
        except HostFault as error:
            return self._note(str(error))
        for path in left:
            path.unlink(missing_ok=True)
        return None

    def _note(self, why: str) -> None:
        said = f"task {self.name} stays in snapteld until the next job ends: {why}"
        sys.stderr.write(f"vtorque: warning: snap: {said}\n")
        syslog.syslog(syslog.LOG_WARNING, f"vtorque: snap: {said}")
        text = json.dumps({"url": self.access[0], "name": self.name})
        with contextlib.suppress(OSError):  # a full disk
            Path(self.notes).mkdir(mode=0o700, exist_ok=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:32]
            (Path(self.notes) / name).write_text(text, encoding="utf-8")


def read_notes(directory: str, url: str) -> Iterator[tuple[Path, str]]:
    """Yield path and task name of each note about a task of the snapteld at ``url``.

    A note is a file in ``directory``. :class:`SnapTask` writes a note if it cannot delete its task.

    Privileges: root.
    """
    try:
        paths = sorted(Path(directory).iterdir())
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(path.read_text(encoding="utf-8"))  # empty if its writer was killed
            if note["url"] == url:
                yield path, str(note["name"])
