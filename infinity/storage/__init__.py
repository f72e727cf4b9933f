"""Bytes to files: the engine protocol, two engines, the host arena, striped swap volumes."""
