"""``vtorque jobshell``: run a job's script in its guest, instead of the batch system's shell."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vtorque_core.base.errors import EXIT_NO_PROOF, VtorqueError
from vtorque_core.cli.entry import forget_coerced_locale
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.shell import around_script
from vtorque_core.node.shell import jobshell as in_guest


def jobshell(config: Path, argv: Sequence[str]) -> int:
    """Run a job's script in its first guest. As the job's owner.

    With ``--await-job JOB``, only wait until this node's guests are ready.
    """

    def plugins_with(name: str) -> Plugins:
        return plugins if name in plugins.names else Plugins.load(node=False, only={name})

    forget_coerced_locale()
    try:
        site, plugins = load(config, node=False)
        if argv[:1] == [in_guest.AWAIT] and len(argv) == 2:
            return in_guest.await_local_proof(site.paths, argv[1], owner_uid=site.owner)
        batch = plugins.batch_system(site.batch.system)
        shell = batch.shell()
        # Python writes the numbers of caught signals to this pipe (signal.set_wakeup_fd).
        came, coming = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(coming, warn_on_full_buffer=False)
        calls = in_guest.PluginCalls(
            load=plugins_with,
            beside=lambda proof: around_script.run_beside(proof, batch, site, plugins),
            after=lambda proof, code: around_script.run_after(proof, code, site, plugins),
            meanwhile=lambda: in_guest.import_drivers(plugins),
        )
        code = in_guest.run_job(site.paths, shell, tuple(argv), calls=calls, owner_uid=site.owner)
        signal.set_wakeup_fd(-1)
        os.close(coming)
        if shell.dies_of_term and signal.SIGTERM in os.read(came, 1 << 16):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.raise_signal(signal.SIGTERM)
        return code
    except VtorqueError as error:
        sys.stderr.write(f"vtorque: {error}\n")
        return EXIT_NO_PROOF
