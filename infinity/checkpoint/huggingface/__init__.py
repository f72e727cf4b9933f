"""Weights as safetensors in the layout of Hugging Face."""
