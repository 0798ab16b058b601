"""The hooks of plugins that watch jobs; a part of :mod:`vtorque_core.hookspecs`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vtorque_core.api import hookspec

if TYPE_CHECKING:
    import logging

    from vtorque_core.api_kept import Place
    from vtorque_core.api_log import LogJob
    from vtorque_core.api_node import Site


@hookspec
def vtorque_log_handlers(job: LogJob) -> Iterable[logging.Handler]:
    """Return handlers that get the job's log records: sinks beside the log that the core keeps.

    Called in a process of its own, as root, in the prologue and in the teardown of each job; a
    thread for each handler calls ``handle``, and ``close`` at the end. It may block: the job does
    not wait for it, but for a second at the end of prologue and teardown, when what it still has is
    lost. Records have the attributes ``job``, ``node``, ``guest``, ``phase``, ``plugin`` and
    ``entry`` (:func:`vtorque_core.api_log.entry_of`); ``asked`` is true where the job's user alone
    wants them (``-vm log=``), which a sink of the site's had better skip. Acting module. Raising,
    here or in a handler, is told once in the job's log and in syslog.

    Example::

        import logging
        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_log_handlers(job):
            yield logging.StreamHandler()
    """
    return ()


@hookspec
def vtorque_after_script(place: Place, code: int, site: Site) -> Iterable[Sequence[str]]:
    """Return commands whose output goes to the end of the job's error output.

    Declaring module; called in the job shell, as the job's owner, on the job's first node, when its
    script has ended with ``code``; not for interactive jobs. The guests are still there. ``place``
    is what is kept of the job on this node, ``site`` has the settings of declaring
    modules. A command has no input, a fixed environment, and what it writes to its own error output
    is lost. All commands of all plugins have one second together and then are killed. Raising, a
    missing program and exit codes change nothing for the job, and nobody is told.

    Example::

        from vtorque_core.api import hookimpl

        @hookimpl
        def vtorque_after_script(place, code):
            yield ["/usr/bin/echo", f"Acme thanks you for this job, which ended with {code}."]
    """
    return ()
