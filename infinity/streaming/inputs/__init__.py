"""Layer inputs: saved in a forward, restored in its backward.

`activations.ActivationStore` moves them. `InputMemory` counts what they take from kept
weights, and only the store writes it.
"""
