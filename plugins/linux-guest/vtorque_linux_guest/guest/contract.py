"""Names that the host, the seed and the guest have agreed on: ports and paths (doc/guests.md)."""

from __future__ import annotations

STATUS_PORT = "org.vtorque.status"
RUN_PORT = "org.vtorque.run"
CANCEL_PORT = "org.vtorque.cancel"

STATUS_SOCKET = "status.sock"
RUN_SOCKET = "run.sock"
CANCEL_SOCKET = "cancel.sock"
"""The ports' other ends: unix sockets in the guest's run_dir on the node."""

SSH_CONFIG = "ssh_config"
"""In the run_dir: how its user's ssh reaches the guest (ssh_config(5)), if it has an sshd."""

SPOOL = "/var/spool/vtorque"
"""Where the agent puts the job's script; root's, so that only the files are the user's."""

ENVIRONMENT = ".vtorque-environment"
"""The file in the spool with the running job's environment, for login shells."""

SITE = "/usr/lib/vtorque"
"""Where the admin's scripts are run from: /run may be noexec."""

ON_CANCEL = f"{SITE}/on-cancel"
"""Runs all that is to run when the job is cancelled, as its user."""

CANCEL_MARKER = "on-cancel"
"""In the run_dir, empty: the guest has such commands."""

BREAK_MARKER = "break-expected"
"""In the run_dir, root's: until which time.time() the ports may break and come again."""

DATA = "/data"
"""Where the user's own disk is mounted in the job's first guest."""

AS_USER = f"{SITE}/cloud-config/as-user"
"""Becomes the job's user, and does what their cloud-config says."""

ON_GUEST = f"{SITE}/on-guest"
"""Program that runs a command on another guest of the job, for the batch commands in guests."""

EPILOGUE_CLIENT = f"{SITE}/site-epilogue"
EPILOGUE_MARKER = "site-epilogue"
"""In the run_dir, empty: the guest has a site epilogue."""
