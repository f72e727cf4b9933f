"""Fused kernels for CUDA devices, in Triton, and the choice between them and torch operations.

`choice` decides. `decode` and `launches` launch the kernels that `*_kernels.py` define; those files
are imported by a launch only, because Triton may be missing. docs/design/0008-on-a-device.md.
"""
