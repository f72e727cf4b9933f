"""The optimizer step: its decision, and the updates of state by it, early, late or at once."""
