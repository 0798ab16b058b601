"""``python run_with_double.py DIRECTORY -I -m MODULE ARGUMENTS``: with the double's entry point.

DIRECTORY has its metadata. The programs in slurm.conf are called like this in place of the
interpreter alone.
"""

import runpy
import sys
from pathlib import Path

directory, *words = sys.argv[1:]
sys.path += [str(Path(__file__).parent), directory]
words = [word for word in words if word != "-I"]
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
