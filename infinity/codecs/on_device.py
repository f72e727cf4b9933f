"""The choice between the Triton kernel of a codec and its reference, on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from infinity.codecs.part import Codec, Shape
from infinity.codecs.rounding import decode_by_values
from infinity.fused import decode
from infinity.fused.choice import Trials

trials = Trials()


class FusedCodec(Codec, Protocol):
    """A codec that has a Triton kernel."""

    @property
    def trial_shape(self) -> Shape:
        """The shape of a weight that shows the borders of groups, blocks and tiles."""

    def decode_fused(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        """As `decode`, by the Triton kernel."""


def runs(codec: FusedCodec, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> bool:
    """Whether the Triton kernel decodes these tensors. The first call per device, codec and dtype
    compiles the kernel and compares its bits with those of the reference, which takes seconds."""
    if out.device.type != "cuda" or any(part.device != out.device for part in parts):
        return False
    return decode.can_run(shape, out) and not explain_refusal(codec, out.dtype, out.device)


def explain_refusal(codec: FusedCodec, dtype: torch.dtype, device: torch.device) -> str:
    """Returns why the reference decodes on the device, "" if the Triton kernel does."""
    return trials.explain_refusal(
        f"decoding of {codec.format} to {dtype}",
        (codec, dtype),
        device,
        lambda: has_reference_bits(codec, dtype, device),
    )


def has_reference_bits(codec: FusedCodec, dtype: torch.dtype, device: torch.device) -> bool:
    """Decodes random bytes, densely and transposed, with kernel and reference."""
    # Triton compiles apart for addresses that are multiples of 16.
    return all(_has_reference_bits(codec, dtype, device, offset) for offset in (0, 1))


def _has_reference_bits(
    codec: FusedCodec, dtype: torch.dtype, device: torch.device, offset: int
) -> bool:
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    shape = codec.trial_shape
    parts = []
    for part in codec.parts(shape):
        content = torch.randint(256, (part.nbytes + offset,), generator=source, dtype=torch.uint8)
        parts.append(content.to(device)[offset:])
    expected = torch.zeros(shape, dtype=dtype, device=device)
    decode_by_values(codec, parts, shape, expected)
    dense = torch.zeros_like(expected)
    turned = torch.zeros_like(expected.mT.contiguous()).mT
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for out in (dense, turned):
        codec.decode_fused(parts, shape, out)
        if not torch.equal(out.view(bits), expected.view(bits)):
            return False
    return True
