"""Submit a request to the batch system ``local`` without vsub, as a user who forges it."""

import base64
import json

from vtorque_core.api.submission import to_token
from vtorque_core.config.request import Request

SCRIPT = "#!/bin/sh\necho ran\n"

_FORGE = """
import json, os, socket, sys
message = json.loads(sys.argv[1])
with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as lines:
    sock.connect(sys.argv[2])
    sock.sendall(json.dumps(message).encode() + b"\\n")
    answer = json.loads(lines.readline())
    if "id" in answer:  # the next line is the job's end
        answer = json.loads(lines.readline())
print(json.dumps(answer))
"""


def forged(node, token):
    """Submit a job with this token to the batch system without vsub; return answer and outputs."""
    for old in ("out", "err"):
        (node.home / old).unlink(missing_ok=True)
    message = {
        "op": "submit", "argv": ["-N", "t", "-o", "out", "-e", "err"], "environ": {},
        "script": base64.b64encode(SCRIPT.encode()).decode(), "cwd": str(node.home), "token": token,
    }  # fmt: skip
    done = node.as_user(
        str(node.prefix / "bin/python3"), "-I", "-c", _FORGE, json.dumps(message),
        str(node.run_dir / "local.sock"),
    )  # fmt: skip
    out, err = (p.read_text() if p.exists() else "" for p in (node.home / "out", node.home / "err"))
    return json.loads(done.stdout), out, err


def forged_pairs(node, *pairs, files=None):
    """Submit a job with these ``-vm`` pairs, which vsub might refuse; see :func:`forged`."""
    return forged(node, to_token(Request(pairs, files or {}).encode()))
