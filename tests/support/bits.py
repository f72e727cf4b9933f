"""Comparing tensors bit by bit: no tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def aligned(model: Model) -> Model:
    """Returns the model with weights at addresses that malloc gives. transformers and diffusers map
    them from a file at any address, and MKL's sums depend on it."""
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN, so that a poisoned run is not excused."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def describe(a: Tensor | None, b: Tensor | None) -> str:
    """How two tensors differ, in one line: expected, then what came."""
    if a is None or b is None:
        return f"expected {'None' if a is None else 'a tensor'}, got {'None' if b is None else 'a tensor'}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"expected {tuple(a.shape)} {a.dtype}, got {tuple(b.shape)} {b.dtype}"
    if not a.is_floating_point():
        return f"expected {a.flatten()[:8].tolist()}, got {b.flatten()[:8].tolist()}"
    gap = (a.double() - b.double()).abs()
    return (
        f"{int((a != b).sum())} of {a.numel()} differ, largest {gap.max().item():.3g}; "
        f"first values {a.flatten()[:3].tolist()} against {b.flatten()[:3].tolist()}"
    )


def differences(
    expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> list[str]:
    """One line per name whose tensors are not the same bits."""
    found = [f"{name}: missing" for name in expected if name not in actual]
    found += [f"{name}: unexpected" for name in actual if name not in expected]
    for name, tensor in expected.items():
        if name not in actual:
            continue
        other = actual[name]
        if tensor is None or other is None:
            if tensor is not other:
                found.append(f"{name}: {describe(tensor, other)}")
        elif not same_bits(tensor, other):
            found.append(f"{name}: {describe(tensor, other)}")
    return found


def assert_same(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, is_ordered: bool = True
) -> None:
    """The same names, at least one, in the same order unless told; the same bits, none NaN."""
    assert expected, "nothing is compared"
    lines = differences(expected, actual)
    if is_ordered and not lines and list(expected) != list(actual):
        places = zip(expected, actual, strict=True)
        lines = [
            f"expected {one}, got {other} in its place" for one, other in places if one != other
        ]
    lines += [f"{name}: NaN" for name, tensor in expected.items() if bool(tensor.isnan().any())]
    assert not lines, f"not the same bits ({len(lines)})\n  " + "\n  ".join(lines[:5])
