"""Submit jobs with qsub: the user's arguments, unchanged, plus a few additions.

Privileges: the user, in ``vsub`` and ``vmgr``. doc/batch-pbs.md lists the additions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import UsageError, deferred, printable
from vtorque_core.api.batch_system import JobInfo, Needs, SubmitArgs
from vtorque_core.api.directives import (
    rewrite_directives,
    script_directives,
    strip_pbs_vm,
    vm_directives,
)
from vtorque_core.api.submission import exec_command, to_token
from vtorque_core.api.vm_options import IMG, is_own_image
from vtorque_pbs import batch_commands, countable_resources, request_channel, resources
from vtorque_pbs import convention as pbs
from vtorque_pbs.job_records import job_infos
from vtorque_pbs.qsub_dialect import (
    OPENPBS,
    TORQUE,
    VARIABLE,
    Options,
    PbsDialect,
    QsubOptions,
    merge_options,
)
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

MAX_SCRIPT = 64 << 20  # bytes, as in the job shell
BARE = ("none",)
FILTER = "--filter"
_parse_filter = deferred("vtorque_pbs.torque.submit_filter:parse")
_add_directives = deferred("vtorque_pbs.torque.submit_filter:add_directives")
REQUEST = "--request"


@dataclass(frozen=True)
class PbsArgs(SubmitArgs):
    """A qsub command line, parsed by :class:`PbsSubmitter`.

    Attributes:
        counts: Options that qsub would use: those of the command line, and those of directives that
            the command line does not override.
        place: Index of the script's path in ``rest``, the arguments for qsub; or None.
        at: Index in ``rest`` at which options are added. It is before ``--`` and, on OpenPBS,
            before the script.
        unused: Indexes in ``rest`` of words that a VM job's qsub does not get.
        text: The script without ``#PBS -vm`` lines.
        stripped: ``text`` if qsub must get a copy of the script file, because the file has
            ``#PBS -vm`` lines; otherwise None.
        command: True for OpenPBS's ``-- command``; ``content`` is then a generated script.
        ncpus: True if Torque's ``-l ncpus=`` sets the number of CPUs. A VM job gets ``nodes=``
            instead.
        prefix: Directive prefix in ``text``.
        filtered: Options of qsub's command line if Torque's submit filter runs ``vsub``; None if
            the user runs ``vsub``.
    """

    counts: QsubOptions | None = None
    place: int | None = None
    at: int = 0
    unused: tuple[int, ...] = ()
    stripped: bytes | None = None
    command: bool = False
    ncpus: bool = False
    text: bytes = b""
    prefix: str = ""
    filtered: Options | None = None


class PbsSubmitter:
    """Implementation of :class:`vtorque_core.api.batch_system.Submitter` for PBS."""

    naming = "-N"

    def __init__(self, dialect: PbsDialect, settings: Settings, jobshell: Path) -> None:
        self._dialect, self._settings, self._jobshell = dialect, settings, jobshell

    def split(self, argv: Sequence[str]) -> PbsArgs:
        """Parse the command line and read the script. Errors that qsub reports are left to qsub."""
        if internal := self._internal(argv):
            return internal
        try:
            args = pbs.split_qsub(argv, self._dialect.getopt)
        except UsageError as error:
            return self._rejected_command(argv, isinstance(error, pbs.MissingValue))
        long = {option for option, _ in args.options if option.startswith("--")}
        if long <= self._dialect.long and long:
            return PbsArgs(vm=BARE, rest=args.rest, at=len(args.rest))
        command = args.command if self._dialect.command else None
        operands = args.operands if command is not None else args.operands + (args.command or ())
        interactive = ("I", "") in args.options
        if long or command == () or (command and operands):
            return self._rejected_command(argv)
        if len(operands) > 1 and not interactive:
            return self._rejected_command(argv)
        place = self._dialect.find_script(args.rest)
        if command:
            content: bytes | None = command_script(command)
        elif place is None:
            content = None if interactive else sys.stdin.buffer.read()
        else:
            content = None if ("x", "") in args.options else _read(args.rest[place])
        return self._describe_job(args, place, content, command)

    def _internal(self, argv: Sequence[str]) -> PbsArgs | None:
        """Parse the arguments of an internal call of ``vsub``; return None for a user's call.

        An internal call has one of these forms:

        - ``--filter`` and qsub's arguments: a call from Torque's submit filter.
        - ``--request`` and at most one ``-vm`` option: a call from ``vtorque setup`` on OpenPBS.
          ``vsub`` submits nothing and prints the job request, which setup writes into the
          ``queuejob`` hook.
        """
        if list(argv[:1]) == [REQUEST]:
            return PbsArgs(vm=tuple(argv[2:3]), rest=(REQUEST,))
        if list(argv[:1]) != [FILTER]:
            return None
        line = _parse_filter(argv[1:], self._dialect.getopt)
        found = self._describe_job(line, None, sys.stdin.buffer.read(), None)
        return replace(found, filtered=line.options)

    def _describe_job(
        self,
        args: pbs.QsubArgs,
        place: int | None,
        content: bytes | None,
        command: tuple[str, ...] | None,
    ) -> PbsArgs:
        script = None if place is None else args.rest[place]
        at = len(args.rest) - (0 if args.command is None else len(args.command) + 1)
        unused: tuple[int, ...] = ()
        if not self._dialect.permutes:
            at = min((at, *args.operand_indexes))
        elif place is None:  # Torque's qsub parses "-" as an option with the next word as value
            unused = args.operand_indexes
        prefix = dict(args.options).get("C", self._prefix())
        text = b"" if content is None or command else content
        if args.vm != BARE:
            pbs.check_script(text)
        stripped = strip_pbs_vm(text, prefix)
        counts = merge_options(list(self._directives(stripped, prefix)), args.options)
        given = self._parse_request(counts.resources)
        kept: bytes | None = None
        if stripped != text:
            kept, content = (stripped, content) if script else (None, stripped)
        return PbsArgs(
            vm=args.vm,
            rest=args.rest,
            script=script,
            content=None if script else content,
            shell=None if command else counts.shell,
            interactive=counts.interactive,
            vcpus_given=given.cpus,
            mib_given=given.mib,
            directives=vm_directives(text, prefix),
            facts=counts.facts,
            resources_given=self._count_resources(counts.resources),
            counts=counts,
            place=place,
            at=at,
            unused=unused,
            stripped=kept,
            command=command is not None,
            ncpus=self._dialect is TORQUE and resources.is_by_ncpus(counts.resources),
            text=stripped,
            prefix=prefix,
        )

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit a job with qsub, and return qsub's exit status.

        Two internal calls submit nothing (see :meth:`_internal`). For Torque's submit filter, print
        the script with the request. For the setup of OpenPBS's hook, print the request.

        Raises:
            UsageError: qsub is missing, or would use a word other than ``args.script`` as script.
            Refused: The request is too long.
        """
        assert isinstance(args, PbsArgs)  # noqa: S101 - from split
        if args.rest == (REQUEST,):
            if blob is not None and needs is not None:
                _show_request(blob, needs)
            return 0
        words, content, changed = list(args.rest), args.content, args.stripped
        place = args.place
        if blob is not None and needs is not None and args.counts is not None:
            pbs.check_script_args(args.counts.args)
            if args.ncpus:
                words = resources.nodes_for_ncpus(words)
                text = self._nodes_for_ncpus(args.text, args.prefix)
                content = None if content is None else text
                changed = text if text != args.text else changed
            del words[args.at if args.command else len(words) :]
            additions = self._additions(args.counts, blob, needs)
            if args.filtered is not None:
                text = args.text if content is None else content
                content = _add_directives(text, args.prefix, additions, args.filtered)
            words[args.at : args.at] = additions
            for unused in reversed(args.unused):
                del words[unused]
            place = self._check_script(words, args.script)
        elif args.command:
            content = None
        if args.filtered is not None:
            sys.stdout.buffer.write(args.text if content is None else content)
            return 0
        qsub = self._command("qsub")
        os.environ.pop(VARIABLE, None)  # in a job that submits another, -V would copy it
        if blob is not None:
            self._make_known()
            if args.interactive and not (args.counts and args.counts.display):
                os.environ["DISPLAY"] = ""  # the job shell must use -X's display, not -V's
        if changed is not None and place is not None:
            return _submit_copy(qsub, words, place, changed)
        return exec_command([qsub, *words], content)

    def jobs(self) -> Iterable[JobInfo]:
        """Return the user's jobs, or all jobs for root."""
        found = job_infos(self._dialect, self._command("qstat"))
        if os.geteuid() == 0:
            return found
        me = batch_commands.login_name()
        return [job for job in found if job.owner == me]

    def cancel(self, job_id: str) -> int:
        """Run qdel, which prints to the user's terminal."""
        return batch_commands.run_with_streams([self._command("qdel"), job_id], subprocess.DEVNULL)

    def _command(self, program: str) -> str:
        return batch_commands.user_command(self._settings, program, self._dialect.programs)

    def _make_known(self) -> None:
        """Add the setting ``bindir`` to PATH, which qsub copies to PBS_O_PATH for the job shell."""
        place, path = self._settings.bindir, os.environ.get("PATH", "")
        if place and place not in path.split(":"):
            os.environ["PATH"] = f"{path}:{place}" if path else place

    def _check_script(self, words: Sequence[str], script: str | None) -> int | None:
        """Return the script's index. Raise UsageError if qsub would run another word as script."""
        place = self._dialect.find_script(words)
        if (None if place is None else words[place]) != script:
            raise UsageError(
                f"qsub would use {printable(words[place or 0])} as the job script: write each "
                "option and its value as two words, or name a script file"
            )
        return place

    # -- arguments for qsub --------------------------------------------------------------------

    def _additions(self, counts: QsubOptions, blob: bytes, needs: Needs) -> list[str]:
        token, feature = to_token(blob), self._settings.property
        if self._dialect is TORQUE:
            more = resources.torque_additions(counts.resources, needs, feature)
            other, in_variable = request_channel.add_other_token(
                {**counts.resources, **more}, token
            )
            more["other"] = other
        else:
            more, in_variable = resources.openpbs_additions(counts.resources, needs, feature), True
        more |= resources.exclusive_place(self._settings.exclusive, {**counts.resources, **more})
        words = [word for key, value in more.items() for word in ("-l", f"{key}={value}")]
        if in_variable:
            words += ["-v", request_channel.add_variable_token(counts.variables, token)]
        return ["-S", str(self._jobshell), *words]

    def _nodes_for_ncpus(self, script: bytes, prefix: str) -> bytes:
        def changed(_: int, line: bytes, words: str) -> bytes:
            try:
                given = pbs.directive_words(words)
                wanted = resources.nodes_for_ncpus(given)
            except UsageError:  # qsub reports or ignores it
                return line
            return line if wanted == given else os.fsencode(f"{prefix} {shlex.join(wanted)}\n")

        return rewrite_directives(script, prefix, changed)

    def _parse_request(self, asked: Mapping[str, str]) -> resources.PbsRequest:
        if self._dialect is TORQUE:
            return resources.torque_given(asked, self._settings.property)
        return resources.openpbs_given(asked, self._settings.property)

    def _count_resources(self, asked: Mapping[str, str]) -> dict[str, int]:
        return (
            countable_resources.torque_counts
            if self._dialect is TORQUE
            else countable_resources.openpbs_counts
        )(asked)

    def _prefix(self) -> str:
        name = self._dialect.prefix_variable
        return os.environ.get(name, "#PBS") if name else "#PBS"

    def _directives(self, content: bytes, prefix: str) -> Iterable[Options]:
        for line in script_directives(content, prefix):
            with contextlib.suppress(UsageError):  # qsub reports or ignores it
                yield pbs.split_qsub(pbs.directive_words(line), self._dialect.getopt).options

    def _rejected_command(self, argv: Sequence[str], lacks_value: bool = False) -> PbsArgs:
        """Return the arguments of an invalid command line, so that qsub reports the error.

        ``-S`` with the job shell is added in case qsub accepts the arguments. With ``lacks_value``,
        the last option has no value, so nothing is added after it. Raises UsageError for
        ``-- command``, which qsub would run without any shell.
        """
        words = list(argv)
        while "-vm" in words:
            at = words.index("-vm")
            if words[at:] == ["-vm"]:
                raise UsageError("-vm needs a value")
            del words[at : at + 2]
        if self._dialect.command and "--" in words:
            pbs.split_qsub(argv, self._dialect.getopt)
            raise UsageError("the command after -- is missing, or a script precedes the --")
        shell = str(self._jobshell)
        # qsub uses the last -S. As one word, -S and its value cannot be taken for the script.
        last = () if lacks_value else (f"-S{shell}",)
        return PbsArgs(vm=BARE, rest=("-S", shell, *words, *last))


def _show_request(blob: bytes, needs: Needs) -> None:
    if needs.resources or needs.licenses:
        raise UsageError(
            "the -vm options of the queue request devices or licenses, which qsub cannot request: "
            "submit with vsub"
        )
    if is_own_image(dict(json.loads(blob).get("vm", ())).get(IMG.key, "")):
        raise UsageError(
            f"{IMG.key}= of the queue names a user's own image, which vsub prepares for each job: "
            "name an image of the pool (vmgr images list)"
        )
    values = {"cpus": needs.cpus, "mib": needs.mib or 0, "seconds": needs.seconds}
    sys.stdout.write(json.dumps({"request": blob.decode(), **values}))


def command_script(command: Sequence[str]) -> bytes:
    """Return a script that runs ``command`` in the guest.

    Without a script, OpenPBS would run the command on the host.
    """
    return b"#!/bin/sh\nexec " + os.fsencode(shlex.join(command)) + b"\n"


def _submit_copy(qsub: str, words: list[str], place: int, content: bytes) -> int:
    with tempfile.TemporaryDirectory(prefix="vsub-") as directory:
        copy = Path(directory, Path(words[place]).name)
        copy.write_bytes(content)
        words[place] = str(copy)
        return batch_commands.run_with_streams([qsub, *words])


def _read(script: str) -> bytes:
    try:
        # O_NONBLOCK: a FIFO without a writer would hang here, open(2).
        with os.fdopen(os.open(script, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_SCRIPT + 1) if regular else b""
    except (OSError, ValueError):
        return b""
    if len(content) > MAX_SCRIPT:
        raise UsageError(f"{printable(script)}: the script of a VM job is larger than 64 MiB")
    return content


def torque_submitter(site: Site) -> PbsSubmitter:
    """Return the submitter for Torque."""
    return PbsSubmitter(TORQUE, site[Settings], site.paths.jobshell)


def openpbs_submitter(site: Site) -> PbsSubmitter:
    """Return the submitter for OpenPBS."""
    return PbsSubmitter(OPENPBS, site[Settings], site.paths.jobshell)
