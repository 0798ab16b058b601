"""``python -I -m vtorque_pool``: as the programs in slurm.conf call it."""

import sys

from vtorque_pool.programs import main

sys.exit(main())
