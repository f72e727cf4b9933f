"""Codecs: how the bytes of a stored tensor become a weight, per format of quantised checkpoints.

A codec is a frozen value. It says which tensors of a file (parts) hold one logical weight of a
shape, decodes their bytes into a tensor, and encodes a weight into such parts. The rounding of
`decode` is part of the format and is the same on every device, instruction set and number of
threads: docs/formats/quantized.md. `detect.py` finds the codec of every tensor of a checkpoint.
"""

from infinity.codecs.detect import logical_tensors, quantization_of
from infinity.codecs.found import LogicalTensor
from infinity.codecs.fp8 import Fp8Blocks
from infinity.codecs.int4 import Int4Groups
from infinity.codecs.mxfp4 import Mxfp4Blocks
from infinity.codecs.nf4 import Nf4
from infinity.codecs.part import Codec, Encoding, StoredPart, stored_nbytes
from infinity.codecs.plain import Plain

__all__ = [
    "Codec",
    "Encoding",
    "Fp8Blocks",
    "Int4Groups",
    "LogicalTensor",
    "Mxfp4Blocks",
    "Nf4",
    "Plain",
    "StoredPart",
    "logical_tensors",
    "quantization_of",
    "stored_nbytes",
]
