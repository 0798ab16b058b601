"""Run :mod:`vtorque_pool.programs` with ``python -I -m vtorque_pool``."""

import sys

from vtorque_pool.programs import main

sys.exit(main())
