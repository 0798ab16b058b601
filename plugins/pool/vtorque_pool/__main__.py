"""``python -I -m vtorque_pool``, as called by the programs in slurm.conf."""

import sys

from vtorque_pool.programs import main

sys.exit(main())
