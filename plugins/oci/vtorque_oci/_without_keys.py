"""Run a program that cannot use the kernel's keyrings.

Command line: ``python -m vtorque_oci._without_keys PROGRAM [ARGUMENT ...]``.

Namespaces do not separate keyrings, and the user's session keyring can contain Kerberos tickets
(keyrings(7)).
"""

from __future__ import annotations

import errno
import os
import sys

from vtorque_core.api.confined_tool import answer_calls

if __name__ == "__main__":
    answer_calls((call, errno.EPERM, ()) for call in ("add_key", "request_key", "keyctl"))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - as is
