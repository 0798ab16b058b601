"""Compile the guest agent: one static binary for all Linux guests of an architecture."""

import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
STATIC = ("-Os", "-static", "-s", "-Wl,--build-id=none")
"""No build id, no debug paths, no timestamps: the same source and compiler give the same bytes."""


class AgentBuildError(Exception):
    """The agent could not be compiled; the text says what to install or what the compiler said."""


def agent_source() -> Path:
    """The directory of the C source."""
    return Path(__file__).parent / "agent"


def agent_files() -> list[Path]:
    """The C files, in the fixed order in which they are compiled."""
    return sorted(agent_source().glob("*.c"))


def build_agent(out: Path, cc: str = "musl-gcc", flags: tuple[str, ...] = STATIC) -> None:
    """Compile the agent to `out` (mode 0755), by default static, stripped and reproducible.

    `cc` is a compiler's name or path; plain `gcc` works too where it has a static C library.
    Raises AgentBuildError when there is no such compiler or it reports an error.
    """
    found = shutil.which(cc)
    if found is None:
        raise AgentBuildError(
            f"no compiler {cc!r} to build the guest agent with; install it "
            "(Debian: apt-get install musl-tools gcc)"
        )
    names = [path.name for path in agent_files()]
    command = [found, *FLAGS, *flags, "-o", str(out.absolute()), *names]
    result = subprocess.run(
        command, cwd=agent_source(), capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode != 0:
        raise AgentBuildError(f"{cc} could not compile the guest agent:\n{result.stderr[-4000:]}")
    out.chmod(0o755)


if __name__ == "__main__":
    build_agent(Path(sys.argv[1]))
