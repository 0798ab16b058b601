"""Print the lowest frequencies of a chain of N masses and springs, as JSON."""

import json
import sys

import numpy

size = int(sys.argv[1])
matrix = 2 * numpy.eye(size) - numpy.eye(size, k=1) - numpy.eye(size, k=-1)
lowest = numpy.sqrt(numpy.linalg.eigvalsh(matrix)[:3])
print(json.dumps({"masses": size, "lowest": [round(float(value), 6) for value in lowest]}))
