"""Names of ports and paths that host, seed and guest share (doc/guests.md)."""

from __future__ import annotations

STATUS_PORT = "org.vtorque.status"
RUN_PORT = "org.vtorque.run"
CANCEL_PORT = "org.vtorque.cancel"

STATUS_SOCKET = "status.sock"
RUN_SOCKET = "run.sock"
CANCEL_SOCKET = "cancel.sock"
"""Name of a Unix socket in the guest's run_dir on the node, like the two above. It is the host end
of a virtio-serial port."""

SSH_CONFIG = "ssh_config"
"""File in the run_dir: the ssh_config(5) for the user's logins to a guest that has an sshd."""

SPOOL = "/var/spool/vtorque"
"""Directory where the agent stores the job's script. Root owns it; the user owns the files in
it."""

ENVIRONMENT = ".vtorque-environment"
"""File in the spool with the running job's environment, for login shells."""

SITE = "/usr/lib/vtorque"
"""Directory of the site's scripts in the guest. It is not in /run, which may be noexec."""

ON_CANCEL = f"{SITE}/on-cancel"
"""Script that runs all commands for cancellation, as the job's user."""

CANCEL_MARKER = "on-cancel"
"""Empty file in the run_dir. If it exists, the guest has commands for cancellation."""

BREAK_MARKER = "break-expected"
"""File of root in the run_dir. It contains the Unix time until which the ports may disconnect."""

DATA = "/data"
"""Mount point of the user's own disk in the job's first guest."""

AS_USER = f"{SITE}/cloud-config/as-user"
"""Script that switches to the job's user and applies their cloud-config."""

ON_GUEST = f"{SITE}/on-guest"
"""Program that runs a command on another guest of the job, for the batch commands in guests."""

EPILOGUE_CLIENT = f"{SITE}/site-epilogue"
EPILOGUE_MARKER = "site-epilogue"
"""Empty file in the run_dir. If it exists, the guest has a site epilogue."""
