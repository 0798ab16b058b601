"""Compile the guest agent: one static binary per architecture, for all Linux guests."""

import shutil
import subprocess
import sys
from pathlib import Path

from vtorque_core.api import HostFault

FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
STATIC = ("-Os", "-static", "-s", "-Wl,--build-id=none")
"""Compiler flags for a reproducible binary: static, no build id, debug paths or timestamps."""


def build_agent(
    out: Path,
    cc: str = "musl-gcc",
    flags: tuple[str, ...] = STATIC,
    sources: tuple[str, ...] = (),
) -> None:
    """Compile the agent to `out` (mode 0755), by default static, stripped and reproducible.

    `cc` is a compiler; ``gcc`` needs a static C library. `sources` are the C files of another
    program, which may include the agent's files. Raises HostFault with the compiler's output.
    """
    found = shutil.which(cc)
    if found is None:
        raise HostFault(
            f"the compiler {cc!r} for the guest agent is missing; install it (Debian: apt-get "
            "install musl-tools gcc)",
            stage="agent",
        )
    source = Path(__file__).parent
    names = sources or sorted(path.name for path in source.glob("*.c"))
    command = [found, *FLAGS, *flags, "-I.", "-o", str(out.absolute()), *names]
    result = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode != 0:
        output = result.stderr[-4000:]
        raise HostFault(f"{cc} could not compile the guest agent:\n{output}", stage="agent")
    out.chmod(0o755)


def built_agent(scratch: Path, sources: tuple[str, ...] = ()) -> bytes:
    """Compile the agent, or ``sources``, in ``scratch``. Return the program. Raises HostFault."""
    binary = scratch / "vtorque-agent"
    build_agent(binary, sources=sources)
    return binary.read_bytes()


if __name__ == "__main__":
    build_agent(Path(sys.argv[1]))
