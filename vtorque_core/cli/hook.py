"""Entry points for the batch system's root hooks and its job shell.

``vtorque hook [--config FILE] prologue|epilogue`` and ``vtorque jobshell [--config FILE]``,
followed by the batch system's arguments.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence

from vtorque_core.api.strategies import deferred
from vtorque_core.base.errors import UsageError
from vtorque_core.cli.entry import reset_process, split_config


def run(argv: Sequence[str]) -> int:
    name, *rest = argv
    config, words = split_config(rest)
    if name == "jobshell":
        return jobshell(config, words)
    gc.disable()  # saves 8 ms of a start; a hook ends before its memory would grow
    environ = dict(os.environ)
    reset_process()  # plugins get the variables as an argument
    if words[:1] == ["prologue"]:
        return prologue(config, words[1:], environ)
    if words[:1] == ["epilogue"]:
        return epilogue(config, words[1:])
    if words == ["receive"]:
        return receive(config)
    raise UsageError(f"{name} {' '.join(words[:1])}: write hook prologue or hook epilogue")


# A process imports only the code that it runs.
prologue: Callable[..., int] = deferred("vtorque_core.node.start.prologue:run_hook")
receive: Callable[..., int] = deferred("vtorque_core.node.start.receive:run_hook")
epilogue: Callable[..., int] = deferred("vtorque_core.node.end.epilogue:run_hook")
jobshell: Callable[..., int] = deferred("vtorque_core.cli.jobshell:jobshell")
