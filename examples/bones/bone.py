"""A cube of cancellous bone as finite elements for CalculiX, and its stiffness.

    bone.py mesh SPECIMEN                        the solver's input, on standard output
    bone.py stiffness SPECIMEN RESULTS           a line: how much is bone, how stiff it is

The struts are where a sum of random waves (seed: the specimen's number) is near zero, as of a
Gaussian random field (Cahn 1965). The cube is pressed by 1 % from above: the force on its top
over its area and the strain is its apparent Young's modulus, in MPa.
"""

import math
import operator
import random
import sys
from pathlib import Path

CELLS, EDGE = 10, 4.0  # voxels along an edge, the cube's edge in mm
TISSUE, POISSON = 15_000.0, 0.3  # MPa: of the bone's substance
STRAIN, SHARE = 0.01, 0.45  # how far it is pressed, how much of it is bone
WAVES = 30


def bone(specimen: int) -> set[tuple[int, int, int]]:
    """Return the voxels that are bone and hang together from bottom to top."""
    chance = random.Random(specimen)
    waves = []
    for _ in range(WAVES):
        direction = [chance.gauss(0, 1) for _ in range(3)]
        length = math.dist(direction, (0, 0, 0)) * CELLS / (2 * math.pi * 2)
        waves.append(([part / length for part in direction], chance.uniform(0, 2 * math.pi)))
    cells = [(x, y, z) for x in range(CELLS) for y in range(CELLS) for z in range(CELLS)]

    def field(cell: tuple[int, int, int]) -> float:
        return sum(math.cos(sum(map(operator.mul, k, cell)) + phase) for k, phase in waves)

    solid = set(sorted(cells, key=lambda cell: abs(field(cell)))[: int(SHARE * len(cells))])
    reached, front = set(), [cell for cell in solid if cell[2] == 0]
    while front:
        cell = front.pop()
        if cell in solid and cell not in reached:
            reached.add(cell)
            x, y, z = cell
            front += [(x + 1, y, z), (x - 1, y, z), (x, y + 1, z), (x, y - 1, z)]
            front += [(x, y, z + 1), (x, y, z - 1)]
    return reached


def corners(cell: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return a voxel's corners in the order of CalculiX's C3D8."""
    x, y, z = cell
    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    return [(x + a, y + b, z + c) for c in (0, 1) for a, b in square]


def mesh(specimen: int) -> None:
    """Print the solver's input."""
    cells = sorted(bone(specimen))
    corner_nodes = sorted({node for cell in cells for node in corners(cell)})
    nodes = {node: number for number, node in enumerate(corner_nodes, 1)}
    size = EDGE / CELLS
    print("*NODE, NSET=ALL")
    for (x, y, z), number in nodes.items():
        print(f"{number}, {x * size}, {y * size}, {z * size}")
    print("*ELEMENT, TYPE=C3D8, ELSET=BONE")
    for number, cell in enumerate(cells, 1):
        print(f"{number}, " + ", ".join(str(nodes[node]) for node in corners(cell)))
    for name, height in (("BOTTOM", 0), ("TOP", CELLS)):
        print(f"*NSET, NSET={name}")
        for node, number in nodes.items():
            if node[2] == height:
                print(f"{number},")
    print(f"*MATERIAL, NAME=TISSUE\n*ELASTIC\n{TISSUE}, {POISSON}")
    print("*SOLID SECTION, ELSET=BONE, MATERIAL=TISSUE\n*STEP\n*STATIC\n*BOUNDARY")
    print(f"BOTTOM, 1, 3, 0\nTOP, 1, 2, 0\nTOP, 3, 3, {-STRAIN * EDGE}")
    print("*NODE PRINT, NSET=TOP, TOTALS=ONLY\nRF\n*END STEP")


def stiffness(specimen: int, results: str) -> None:
    """Print the modulus from the force that the solver has written. Exits 1 without one."""
    lines = [line.split() for line in Path(results).read_text().splitlines()]
    forces = [float(words[2]) for words in lines if len(words) == 3 and "." in words[0]]
    if not forces:
        sys.exit(f"{results} has no force")
    modulus = -forces[-1] / EDGE**2 / STRAIN
    share = len(bone(specimen)) / CELLS**3
    print(f"specimen {specimen}: {share:.0%} bone, {modulus:.0f} MPa")


if __name__ == "__main__":
    if sys.argv[1] == "mesh":
        mesh(int(sys.argv[2]))
    else:
        stiffness(int(sys.argv[2]), sys.argv[3])
