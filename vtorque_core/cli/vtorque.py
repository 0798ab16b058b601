"""``vtorque``: entry point of the admin's command, of root's hooks and of the job shell.

Hooks and job shells avoid click, whose import would take a fifth of their start.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from vtorque_core.cli.entry import OWN, report_errors, secure_process


def main() -> NoReturn:
    with report_errors("vtorque"):
        secure_process("vtorque_core.cli.vtorque")
        if sys.argv[1:2] and sys.argv[1] in OWN:
            from vtorque_core.cli.hook import run  # noqa: PLC0415 - after secure_process

            code = run(sys.argv[1:])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the job waits: Python's cleanup would take 20 ms
        from vtorque_core.cli import admin  # noqa: PLC0415 - hooks need no click
        from vtorque_core.cli.run_click import run as run_command  # noqa: PLC0415 - as above

        run_command(admin.vtorque, "vtorque")


if __name__ == "__main__":
    main()
