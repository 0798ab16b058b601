"""Register the plugin's commands, ``-vm`` options and settings."""

from __future__ import annotations

from vtorque_core.api import Command, Remote, constant_hook
from vtorque_survive import resume_options
from vtorque_survive.resume_options import CHECKPOINT, RESUME
from vtorque_survive.settings import Settings

_OF_JOB = Remote(("this_node",))

vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(RESUME, CHECKPOINT)
vtorque_parse_args = resume_options.vtorque_parse_args
vtorque_commands = constant_hook(
    Command("vmgr suspend", "vtorque_survive.command:suspend", _OF_JOB),
    Command("vmgr resume", "vtorque_survive.command:resume", _OF_JOB),
    Command("vmgr checkpoint", "vtorque_survive.command:checkpoint", Remote(("stop", "this_node"))),
    Command("vmgr checkpoints", "vtorque_survive.checkpoints_command:checkpoints"),
    Command("vtorque drain", "vtorque_survive.drain_command:drain"),
    Command("vmgr migrate", "vtorque_survive.migrate_command:migrate"),
    Command("vmgr arrival", "vtorque_survive.migrate_command:answer_source"),
)
