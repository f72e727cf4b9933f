"""Adapters on packed experts, computed as low-rank factors beside the frozen weight."""
