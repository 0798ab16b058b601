"""Run a click command as a program."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from vtorque_core.cli.entry import report_errors


def run(command: click.Command, program: str) -> NoReturn:
    # https://no-color.org; click only checks for a terminal.
    color = False if os.environ.get("NO_COLOR") else None
    with report_errors(program):
        try:
            result = command.main(prog_name=program, standalone_mode=False, color=color)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            raise KeyboardInterrupt from None
        sys.exit(result if isinstance(result, int) else 0)
