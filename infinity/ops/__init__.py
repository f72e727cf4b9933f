"""Kernels of the update and of 8-bit state, each with a reference in torch operations."""
