"""Memory that is lent: the arena of the host, and the device behind its adapter."""
