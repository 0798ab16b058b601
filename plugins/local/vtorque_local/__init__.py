"""The batch system ``local``: one machine, one queue, Torque's conventions."""
