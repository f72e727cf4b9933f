"""Gradients on their way to the ranks that own them, their sums over ranks and the norms."""
