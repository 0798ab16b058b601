"""A double of a command that always prints the same output, and records its calls."""

import json

_SCRIPT = """#!/bin/sh
printf '%s\\n' "$*" >> {notes}/calls
cat {notes}/out; cat {notes}/err >&2
exit "$(cat {notes}/code)"
"""


class RecordedCommand:
    def __init__(self, path):
        self.notes = path.with_name(f".{path.name}")
        self.notes.mkdir(parents=True)
        self.say()
        path.write_text(_SCRIPT.format(notes=self.notes))
        path.chmod(0o755)

    def say(self, out=b"", err="", code=0):
        if isinstance(out, dict):
            out = json.dumps(out).encode()
        (self.notes / "out").write_bytes(out)
        (self.notes / "err").write_text(err)
        (self.notes / "code").write_text(str(code))

    def calls(self):
        """Return the calls since the last time, in order."""
        path = self.notes / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines
