"""Codecs: how the bytes of a stored tensor become a weight, per format of quantised checkpoints.

A codec is a frozen value. It says which tensors of a file (parts) hold one logical weight of a
shape, decodes their bytes into a tensor, and encodes a weight into such parts. The rounding of
`decode` is part of the format and is the same on every device, instruction set and number of
threads: docs/formats/quantized.md. Codes are numbers in groups (`affine.py`), floats in blocks
(`floats.py`) or indices of a table (`tables.py`); formats are layouts of these three. `detect.py`
finds the codec of every tensor of a checkpoint.
"""

from infinity.codecs.affine import AffineGroups
from infinity.codecs.detect import logical_tensors, quantization_of
from infinity.codecs.floats import FloatBlocks, mxfp4, nvfp4
from infinity.codecs.found import LogicalTensor
from infinity.codecs.part import Codec, Encoding, StoredPart, stored_nbytes
from infinity.codecs.plain import Plain
from infinity.codecs.tables import TableBlocks

__all__ = [
    "AffineGroups",
    "Codec",
    "Encoding",
    "FloatBlocks",
    "LogicalTensor",
    "Plain",
    "StoredPart",
    "TableBlocks",
    "logical_tensors",
    "mxfp4",
    "nvfp4",
    "quantization_of",
    "stored_nbytes",
]
