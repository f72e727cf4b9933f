"""The part of an offloaded model that PyTorch sees: handles, hooks and uses of units."""
