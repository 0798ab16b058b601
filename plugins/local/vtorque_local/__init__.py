"""The batch system ``local``: one machine and one queue, with Torque's conventions."""
