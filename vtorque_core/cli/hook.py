"""Entry points for the batch system's root hooks and its job shell.

``vtorque hook [--config FILE] prologue|epilogue`` and ``vtorque jobshell [--config FILE]``,
followed by the batch system's arguments.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtorque_core.base.errors import EXIT_NO_PROOF, HostFault, UsageError, VtorqueError
from vtorque_core.base.names import CONFIG_PATH
from vtorque_core.cli.entry import forget_coerced_locale, reset_process


def run(argv: Sequence[str]) -> int:
    name, *words = argv
    config = CONFIG_PATH
    if words[:1] == ["--config"] and len(words) > 1:
        config, words = Path(words[1]), words[2:]
    elif words and words[0].startswith("--config="):
        config, words = Path(words[0].removeprefix("--config=")), words[1:]
    if name == "jobshell":
        return jobshell(config, words)
    gc.disable()  # a hook ends before it would matter: 8 ms of a start
    environ = dict(os.environ)
    reset_process()  # plugins get what they need as arguments
    if words[:1] == ["prologue"]:
        return prologue(config, words[1:], environ)
    if words[:1] == ["epilogue"]:
        return epilogue(config, words[1:])
    if words == ["receive"]:
        return receive(config)
    raise UsageError(f"{name} {' '.join(words[:1])}: use hook prologue or hook epilogue")


def prologue(config: Path, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from vtorque_core.node.start import prologue as module  # noqa: PLC0415
    from vtorque_core.site.load import load_node  # noqa: PLC0415

    return module.run(*load_node(config), argv, environ)


def receive(config: Path) -> int:
    from vtorque_core.node.start import receive as module  # noqa: PLC0415
    from vtorque_core.site.load import load_node  # noqa: PLC0415

    return module.run(*load_node(config), 0, 1)


def epilogue(config: Path, argv: Sequence[str]) -> int:
    """Release all resources in the job's journals. As root.

    ``argv`` begins with the job id. The tenth argument, if given, is the job's exit status.
    """
    from vtorque_core.node.end import epilogue as module  # noqa: PLC0415

    if not argv:
        raise HostFault("the batch system passed no job id", stage="epilogue")
    return module.run(config, argv[0], argv[9] if len(argv) > 9 else "")


def jobshell(config: Path, argv: Sequence[str]) -> int:
    """Run a job script in its guest instead of a shell. As the job's owner.

    With ``--await-job JOB``, only wait for this node's guests.
    """
    from vtorque_core.node.shell import around_script  # noqa: PLC0415
    from vtorque_core.node.shell.jobshell import (  # noqa: PLC0415
        AWAIT,
        PluginCalls,
        await_local_proof,
        import_drivers,
        run_job,
    )
    from vtorque_core.site.load import load  # noqa: PLC0415
    from vtorque_core.site.plugins import Plugins  # noqa: PLC0415

    def plugins_with(name: str) -> Plugins:
        return plugins if name in plugins.names else Plugins.load(node=False, only={name})

    forget_coerced_locale()
    try:
        site, plugins = load(config, node=False)
        if argv[:1] == [AWAIT] and len(argv) == 2:
            return await_local_proof(site.paths, argv[1], owner_uid=site.owner)
        batch = plugins.batch_system(site.batch.system)
        shell = batch.shell()
        # Python writes here which signals the guest type's handlers get (signal.set_wakeup_fd).
        came, coming = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(coming, warn_on_full_buffer=False)
        calls = PluginCalls(
            load=plugins_with,
            beside=lambda proof: around_script.run_beside(proof, batch, site, plugins),
            after=lambda proof, code: around_script.run_after(proof, code, site, plugins),
            meanwhile=lambda: import_drivers(plugins),
        )
        code = run_job(site.paths, shell, tuple(argv), calls=calls, owner_uid=site.owner)
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
