"""Run jobs in guests, on the host side: driver, agent protocol, terminals, displays."""
