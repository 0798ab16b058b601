"""An MPI job with one rank in each of two guests, which exchange numbers in every iteration.

A rank cannot continue while the other is suspended, or after a message has been lost.
"""

IMAGE = "debian-mpi"
PACKAGES = "packages=openmpi-bin"
ASKED = ("-N2", "-vm", f"img={IMAGE},ram=768M,vcpus=1")
TURNS = 800
SCRIPT = """#!/bin/bash
mpirun python3 ranks.py libmpi.so.40
code=$?
date +%s > ended
exit $code
"""
_RANKS = f"""
import ctypes, sys, time
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
def handle(symbol):
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, symbol)))
world, integer, add = map(handle, ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum"))
mpi.MPI_Init(None, None)
rank, size, one, all_ = (ctypes.c_int() for _ in range(4))
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
with open(f"turns.{{rank.value}}", "w", buffering=1) as told:
    for turn in range({TURNS}):
        one.value = turn + rank.value
        mpi.MPI_Allreduce(ctypes.byref(one), ctypes.byref(all_), 1, integer, add, world)
        told.write(f"{{turn}} {{all_.value}}\\n")
        time.sleep(0.05)
mpi.MPI_Finalize()
"""


def prepare(cluster):
    """Build the image if it is missing, and give the user the program of the ranks."""
    cluster.image(IMAGE, "-o", PACKAGES)
    cluster.script(_RANKS, "ranks.py")
    for path in (*cluster.home.glob("turns.*"), cluster.home / "ended"):
        path.unlink(missing_ok=True)


def turn(cluster):
    """Return the number of the first rank's turns."""
    path = cluster.home / "turns.0"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def check(cluster):
    """Check that each rank had every turn once, and the clock of the job's first guest."""
    wanted = [f"{turn} {2 * turn + 1}" for turn in range(TURNS)]
    for rank in (0, 1):
        assert cluster.read(f"turns.{rank}").decode().splitlines() == wanted
    ended = cluster.home / "ended"
    assert -1 <= ended.stat().st_mtime - int(ended.read_text()) <= 2  # date prints whole seconds
