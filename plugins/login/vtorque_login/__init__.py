"""Commands about a job from where its user is: see :mod:`vtorque_login.elsewhere`."""
