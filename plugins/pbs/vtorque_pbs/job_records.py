"""Parse jobs from qstat and nodes from pbsnodes. Values may be user text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import JobInfo
from vtorque_pbs.qsub_dialect import TORQUE, PbsDialect
from vtorque_pbs.resources import hosts, walltime_seconds

Attributes = Mapping[str, str]

_ENDED = ("C", "F", "X")  # completed jobs that the server keeps: qstat(1B), keep_completed
_ELEMENT = re.compile(r"<(/?)([A-Za-z_][A-Za-z0-9_.]*)>([^<]*)")


def parse_jobs(dialect: PbsDialect, text: str) -> list[Attributes]:
    """Return the attributes of each job in qstat's output."""
    return torque_jobs(text) if dialect is TORQUE else openpbs_jobs(text)


def torque_jobs(document: str) -> list[Attributes]:
    """Return the attributes of each job in ``qstat -x``, such as ``Resource_List.nodes``.

    Values never contain ``<`` (u_MXML.c replaces it), so user text cannot forge an element. The
    output is not well-formed XML, and XML parsers reject some of it.
    """
    found: list[Attributes] = []
    job: dict[str, str] = {}
    path: list[str] = []
    for match in _ELEMENT.finditer(document):
        closing, name, text = match.groups()
        if not closing:
            path.append(name)
            if name == "Job" and len(path) == 2:
                job = {}
                found.append(job)
            elif len(path) > 2:
                job.setdefault(".".join(path[2:]), _unescape(text))
        elif name in path:
            del path[len(path) - 1 - path[::-1].index(name) :]
    return found


def openpbs_jobs(text: str) -> list[Attributes]:
    r"""Return the attributes of each job in OpenPBS's ``qstat -fw``.

    Each attribute is one line. A newline in a value appears as ``\n`` (qstat.c,
    convert_feed_chars), so user text cannot forge another attribute or job.
    """
    found: list[Attributes] = []
    job: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("Job Id: "):
            job = {"Job_Id": line[8:].strip()}
            found.append(job)
        elif line.startswith("    "):
            name, _, value = line.strip().partition(" = ")
            job[name] = value
    return found


def parse_nodes(text: str) -> Mapping[str, Attributes]:
    """Return the attributes of each node in ``pbsnodes -a``."""
    found: dict[str, dict[str, str]] = {}
    node: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line[0].isspace():
            node = found[line.strip()] = {}
        elif " = " in line:
            name, _, value = line.strip().partition(" = ")
            node.setdefault(name, value)
    return found


def job_infos(dialect: PbsDialect, qstat: str) -> list[JobInfo]:
    """Run the command ``qstat`` as the user and return all jobs that it lists.

    Raises:
        UsageError: The command fails.
    """
    argv = [qstat, dialect.all_jobs]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise UsageError("qstat: the server did not answer within 60 s") from None
    if done.returncode:
        raise UsageError(f"qstat: {done.stderr.decode('utf-8', 'replace').strip()[:500]}")
    return list(_infos(parse_jobs(dialect, done.stdout.decode("utf-8", "replace"))))


def _infos(jobs: list[Attributes]) -> Iterator[JobInfo]:
    for job in jobs:
        nodes, _ = hosts(job.get("exec_host", ""))
        state = job.get("job_state", "")
        status = job.get("exit_status", job.get("Exit_status", ""))  # Torque's, OpenPBS's
        code = int(status) if re.fullmatch("-?[0-9]{1,9}", status, re.ASCII) else None
        yield JobInfo(
            id=job.get("Job_Id", ""),
            name=job.get("Job_Name", ""),
            owner=job.get("Job_Owner", "").partition("@")[0],
            state=state,
            node=nodes[0] if nodes else "",
            seconds=walltime_seconds(job.get("resources_used.walltime", "")) or 0.0,
            reason=_reason(job, nodes, code),
            nodes=nodes if state in ("R", "S") else (),  # an ended job still has its nodes
            ended=state in _ENDED,
            exit_code=code,
        )


def _reason(job: Attributes, nodes: tuple[str, ...], code: int | None) -> str:
    if code is not None:
        return f"exit code {code}"
    return "" if nodes else job.get("comment", "")


def _unescape(text: str) -> str:
    for name, char in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'")):
        text = text.replace(name, char)
    return text.replace("&amp;", "&")
