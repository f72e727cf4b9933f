"""Checkpoints of a run: the state that an exact continuation needs."""
