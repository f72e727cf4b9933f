"""Arithmetic of packed experts: pairs of token and expert, their rows, and sums of these."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from infinity.fused import launches as fused
from infinity.fused.choice import Trials

trials = Trials()
_log = logging.getLogger("infinity")
_COUNTS = ((1, 130), (259, 70), (5, 129))  # Rows of two groups in three parts.


class Pairs:
    """The pairs of token and expert, ordered by expert, then by a token's choice, then by token.

    indices: [tokens, k], the experts of each token; an index past the last expert belongs to no
    expert. `read` comes before any use on the host.
    """

    def __init__(self, indices: torch.Tensor, num_experts: int) -> None:
        self._experts, order = indices.t().reshape(-1).sort(stable=True)
        self.tokens, self.choices = order % len(indices), order // max(len(indices), 1)
        borders = torch.arange(num_experts + 1, dtype=indices.dtype, device=indices.device)
        self.ends = torch.searchsorted(self._experts, borders)
        self.ends_on_host: list[int] = []

    @staticmethod
    def read(every: Sequence[Pairs]) -> None:
        """Reads the ends of all experts from the device: one wait."""
        unread = [pairs for pairs in every if not pairs.ends_on_host]
        if unread:
            known = torch.cat([pairs.ends for pairs in unread]).tolist()
            for pairs in unread:
                count = len(pairs.ends)
                pairs.ends_on_host, known = known[:count], known[count:]

    def range_of(self, experts: slice) -> slice:
        """Returns the pairs of some experts."""
        return slice(self.ends_on_host[experts.start], self.ends_on_host[experts.stop])

    def places_of(self, experts: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token and choice of the pairs of some experts."""
        rows = self.range_of(experts)
        return self.tokens[rows], self.choices[rows]

    def numbers_of(self, experts: slice) -> torch.Tensor:
        """Returns the expert of each pair, counted from the first of these experts."""
        numbers: torch.Tensor = self._experts[self.range_of(experts)] - experts.start
        return numbers

    def ends_of(self, experts: slice) -> torch.Tensor:
        """Returns where the pairs of each expert end, counted from those of the first: int32."""
        ends = self.ends[experts.start + 1 : experts.stop + 1] - self.range_of(experts).start
        narrow: torch.Tensor = ends.to(torch.int32)
        return narrow

    def parts(self, experts: slice, most_rows: int) -> list[slice]:
        """Divides experts into parts with pairs, of no more than `most_rows`, or of one step."""
        parts = [slice(experts.start, experts.start)]
        for stop in range(experts.start + experts.step, experts.stop + 1, experts.step):
            grown = slice(parts[-1].start, stop)
            rows = self.range_of(grown)
            if rows.stop - rows.start > most_rows and parts[-1].start < parts[-1].stop:
                grown = slice(parts[-1].stop, stop)
                parts.append(grown)
            parts[-1] = grown
        ranges = map(self.range_of, parts)
        return [part for part, rows in zip(parts, ranges, strict=True) if rows.start < rows.stop]


# -- Rows times a weight each ----------------------------------------------------------------------


def weighted(rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `(rows * weights).to(dtype)`, with its bits and those of its gradients.

    rows: [rows, width]. weights: [rows, 1].
    """
    if torch.result_type(rows, weights) == dtype:
        return rows * weights
    product: torch.Tensor = _Weighted.apply(rows, weights, dtype)  # type: ignore[no-untyped-call]
    return product


class _Weighted(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return torch.mul(rows, weights, out=torch.empty_like(rows, dtype=dtype))

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        of_rows, of_weights = ctx.needs_input_grad[0] or None, ctx.needs_input_grad[1] or None
        if of_rows:
            of_rows = torch.mul(gradient, weights, out=torch.empty_like(rows))
        if of_weights:
            wide = gradient.to(torch.result_type(rows, weights))
            of_weights = (wide * rows).sum(-1, keepdim=True).to(weights.dtype)
        return of_rows, of_weights, None


# -- Sums of rows per token: by the Triton kernel, or by torch operations --------------------------


def add_rows_(
    out: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, *, is_last_first: bool = False
) -> None:
    """Adds rows to the rows `tokens` of `out`, those of one token in their order, or from the last
    one on. The bits are those of an `index_add_` for each expert in turn.

    out: [tokens, width]. rows: [pairs, width], of the dtype of `out`.
    """
    by_token = tokens.argsort(stable=True)
    there = tokens[by_token]
    is_dense = out.is_contiguous() and rows.is_contiguous()
    if out.device.type == "cuda" and is_dense and not explain_refusal(out):
        ends = torch.searchsorted(there, torch.arange(len(out) + 1, device=out.device))
        fused.add_rows_(out, rows, by_token, ends, is_last_first=is_last_first)
    else:
        _add_by_slots_(out, tokens, rows, by_token, there, is_last_first=is_last_first)


def _add_by_slots_(
    out: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    by_token: torch.Tensor,
    there: torch.Tensor,
    *,
    is_last_first: bool,
) -> None:
    """Adds the first row of every token, then the second of those that have two, and so on."""
    number = torch.arange(len(there), device=there.device) - torch.searchsorted(there, there)
    order = by_token[number.argsort(stable=True)]
    slots = order.split(number.bincount().tolist())
    for slot in reversed(slots) if is_last_first else slots:
        out.index_add_(0, tokens[slot], rows[slot])


def explain_refusal(out: torch.Tensor) -> str:
    """Returns why torch operations add to `out`, "" if the Triton kernel does."""
    if out.dtype not in fused.FORMS:
        return f"the kernel is not for {out.dtype}"
    return trials.explain_refusal(
        "sums of experts", out.dtype, out.device, lambda: has_bits(out.dtype, out.device)
    )


def has_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether sums of random numbers of all magnitudes are those of torch operations."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    tokens = torch.randint(37, (200,), generator=source, device="cpu").to(device)
    rows = torch.randn(200, 1041, generator=source, device="cpu")
    rows *= 10.0 ** torch.randint(-30, 4, rows.shape, generator=source, device="cpu")
    rows = rows.to(dtype).to(device)
    by_token = tokens.argsort(stable=True)
    there = tokens[by_token]
    ends = torch.searchsorted(there, torch.arange(41, device=device))
    for is_last_first in (False, True):
        found, wanted = (rows[:40] * 1.0 for _ in range(2))
        fused.add_rows_(found, rows, by_token, ends, is_last_first=is_last_first)
        _add_by_slots_(wanted, tokens, rows, by_token, there, is_last_first=is_last_first)
        if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            return False
    return True


# -- Grouped products ------------------------------------------------------------------------------
#
# BLAS may choose another kernel, and so another order of a sum, for another number of rows. A
# kernel of grouped products takes the columns in one order. No device is believed: a trial
# compares.


@cache
def are_rows_apart(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_transposed: bool,
    is_trained: bool,
) -> bool:
    """Whether `functional.grouped_mm` and its backward give a row the same bits beside any others,
    by a trial; False on the CPU, whose products go by the number of rows.

    shape: (columns of the rows, columns of the product); each is padded to 16 bytes. is_transposed:
    the last two dimensions of the stack of matrices are swapped in memory. is_trained: each part of
    the rows has a group of its own, whose gradient depends on no other.
    """
    if device.type == "cpu":
        return False
    is_apart = try_rows(shape, dtype, device, is_transposed=is_transposed, is_trained=is_trained)
    if not is_apart:
        _log.warning(
            "micro-batches pass experts one by one: on %s a row of a grouped product of %s depends "
            "on the number of rows", device, shape,
        )  # fmt: skip
    return is_apart


def try_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_transposed: bool,
    is_trained: bool,
) -> bool:
    """The trial: parts of rows alone, and together."""
    multiple = 16 // dtype.itemsize
    shape = -(-shape[0] // multiple) * multiple, -(-shape[1] // multiple) * multiple
    generator = torch.Generator(device).manual_seed(0)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

    stack = some(2, *(reversed(shape) if is_transposed else shape))
    rows = [[some(count, shape[0]) for count in counts] for counts in _COUNTS]
    gradients = [[some(count, shape[1]) for count in counts] for counts in _COUNTS]

    def results(parts: Sequence[int]) -> dict[tuple[int, int], list[torch.Tensor]]:
        places = [(group, part) for group in range(2) for part in parts]
        sizes = [_COUNTS[part][group] for group, part in places]
        ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
        leaves = [torch.cat([rows[part][group] for group, part in places]).requires_grad_()]
        matrices = stack
        if is_trained:
            matrices = stack.repeat_interleave(len(parts), 0).requires_grad_()
            leaves.append(matrices)
        else:
            ends = ends[len(parts) - 1 :: len(parts)].contiguous()
        turned = matrices.transpose(-2, -1) if is_transposed else matrices
        with torch.enable_grad():
            out = functional.grouped_mm(leaves[0], turned, offs=ends)
        of_out = torch.cat([gradients[part][group] for group, part in places])
        of_rows, *others = torch.autograd.grad([out], leaves, [of_out])
        found = zip(out.detach().split(sizes), of_rows.split(sizes), *others, strict=True)
        return dict(zip(places, map(list, found), strict=True))

    together = results(range(len(_COUNTS)))
    return all(
        torch.equal(found, other)
        for part in range(len(_COUNTS))
        for place, alone in results([part]).items()
        for found, other in zip(alone, together[place], strict=True)
    )
