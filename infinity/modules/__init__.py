"""The face of an offloaded model towards PyTorch: handles, hooks and uses of units."""
