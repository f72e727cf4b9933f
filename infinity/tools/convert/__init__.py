"""Directories of Hugging Face checkpoints: laid over drives, merged with adapters, quantised."""
