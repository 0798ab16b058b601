"""Create scripts that replace real programs."""

from pathlib import Path


def fake_program(path: Path, text: str) -> Path:
    """Write an executable script; its directory is made if it is missing."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
