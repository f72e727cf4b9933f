"""Takes a model over: what `infinity.offload` builds, the engine itself, and the optimizers."""
