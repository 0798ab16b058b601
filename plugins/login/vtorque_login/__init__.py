"""Run commands about a job from any host; see :mod:`vtorque_login.remote_command`."""
