"""Run jobs in Linux guests: the protocol with the agent, on the host side."""
