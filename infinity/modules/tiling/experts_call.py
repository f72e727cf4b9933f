"""One call of tiled experts: tile after tile, in both directions.

The forward keeps no activations. It visits the tiles in ascending order and adds what each expert
gives to the sum. The backward visits the tiles in descending order, repeats the forward of a tile
and runs its backward at once. Each direction needs each tile once, and the activations of one tile
are in memory. A runner may put the calls of several micro-batches together
(`modules/accumulate/experts.py`): every tile is then there for all of them.

Note [Same bits]
  All sums have the order of the loop over experts ("eager") and of its autograd. An output row is a
  sum over its experts in ascending order. The gradient of a hidden state is a sum over its experts
  in descending order. The gradient of an expert's weights, of its adapters and of a routing weight
  depends on that expert's rows only. Therefore no bit depends on the division into tiles, on the
  number of calls that share a tile, or on where tiles rest. A repeated forward has the bits of the
  first one: the module draws no random numbers (`experts.why_not_cut`), and the autocast state is
  the same. A block that reads the hidden states again behind its experts (Qwen2-MoE's shared gate)
  differs from the loop by rounding: autograd adds the gradient of every expert to that of the later
  reader, one by one, and a call gives their sum. It is the same sum for every division.

Note [Leaves]
  The parameters of a tile are no inputs of the call's node, because they have no bytes when the
  call begins. Their gradients are delivered by the call, in the way of autograd's own node for
  leaves. A backward for chosen inputs (`torch.autograd.grad`) must not do that. A call with trained
  parameters therefore has an anchor, a node that runs only in a backward for all leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from typing_extensions import override

from infinity.modules.autograd.threads import Modes
from infinity.modules.tiling.peft_experts import Adaptation
from infinity.private.torch import will_engine_execute_node

Recipe = tuple[str, int, Callable[..., Any]]  # An attribute; number and `shown` of its adaptation.


class Pairs:
    """The pairs of token and expert, ordered by expert, then by a token's choice, then by token.

    indices: [tokens, k], the experts of each token; an index past the last expert belongs to no
    expert. starts: the first expert of every tile, then the number of experts.
    """

    def __init__(self, indices: torch.Tensor, starts: Sequence[int]) -> None:
        self._starts = starts
        self._experts, order = indices.t().reshape(-1).sort(stable=True)
        self.tokens, self.choices = order % len(indices), order // max(len(indices), 1)
        bounds = torch.arange(starts[-1] + 1, dtype=indices.dtype, device=indices.device)
        self._ends: list[int] = torch.searchsorted(self._experts, bounds).tolist()

    def experts_of(self, tile: int) -> slice:
        """Returns the experts of a tile."""
        return slice(self._starts[tile], self._starts[tile + 1])

    def range_of(self, tile: int) -> tuple[int, int]:
        """Returns the first pair of a tile, and the end."""
        return self._ends[self._starts[tile]], self._ends[self._starts[tile + 1]]

    def ranges_of_experts(self, tile: int) -> list[tuple[int, int]]:
        """Returns first pair and end of every expert that has pairs."""
        ends = self._ends[self._starts[tile] : self._starts[tile + 1] + 1]
        return [(first, end) for first, end in pairwise(ends) if first < end]

    def indices_in(self, tile: int) -> torch.Tensor:
        """Returns the tile's own number of the expert of each pair: [pairs, 1]."""
        first, end = self.range_of(tile)
        return (self._experts[first:end] - self._starts[tile]).unsqueeze(-1)


class ExpertsCall:
    """The arguments of one call, and its sums over experts. One thread at a time."""

    def __init__(
        self,
        tiles: Sequence[Any],
        starts: Sequence[int],
        recipes: Sequence[Recipe],
        anchor: Node | None,
        modes: Modes,
    ) -> None:
        self.tiles = tiles
        self._starts = starts
        self._recipes = recipes
        self._anchor = anchor
        self._modes = modes
        self.is_graded = torch.is_grad_enabled()
        self._arguments: _Arguments | None = None

    @contextmanager
    def with_arguments(self, *values: torch.Tensor) -> Iterator[None]:
        """Has arguments and sums for the time of a `with` block. values: hidden states [tokens,
        width], indices [tokens, k], routing weights [tokens, k], factors of adapters."""
        self._arguments = _Arguments(values, self._starts)
        try:
            yield
        finally:
            self._arguments = None

    @property
    def arguments(self) -> _Arguments:
        """The arguments of the running call."""
        assert self._arguments is not None
        return self._arguments

    @property
    def is_for_leaves(self) -> bool:
        """Whether the running backward is for all leaves, and some of them are of tiles."""
        return self._anchor is not None and will_engine_execute_node(self._anchor)

    @property
    def has_leaves(self) -> bool:
        """Whether a leaf of a tile may need a gradient of this call."""
        return self._anchor is not None

    # -- Forward -----------------------------------------------------------------------------------

    def needs_forward(self, index: int) -> bool:
        """A tile without tokens gives nothing."""
        first, end = self.arguments.pairs.range_of(index)
        return first < end

    @torch.no_grad()
    def run_forward(self, index: int) -> None:
        """Adds what the experts of one tile give. The tile's weights are there."""
        arguments, out = self.arguments, self.arguments.sum()
        with self._modes.set(), torch.no_grad():
            part = self._run_tile(index, *arguments.rows_of(index)).to(out.dtype)
        first, _ = arguments.pairs.range_of(index)
        for begin, end in arguments.pairs.ranges_of_experts(index):
            out.index_add_(0, arguments.pairs.tokens[begin:end], part[begin - first : end - first])

    # -- Backward ----------------------------------------------------------------------------------

    def begin_backward(self, gradient: torch.Tensor, needs: Sequence[bool]) -> None:
        """gradient: of the output. `needs`: which of the hidden states, the routing weights and the
        factors need one."""
        self.arguments.out, self.arguments.needs = gradient, tuple(needs)

    def needs_backward(self, index: int, *, is_for_leaves: bool) -> bool:
        """A trained tile without tokens has a gradient, too: zeros, and AdamW decays it."""
        return self.needs_forward(index) or (is_for_leaves and self.tiles[index].is_trained)

    @torch.no_grad()
    def run_backward(self, index: int, *, is_for_leaves: bool) -> None:
        """Adds the gradients of one tile, whose weights are there."""
        arguments, tile = self.arguments, self.tiles[index]
        totals = arguments.gradients()
        trained = tile.trained() if is_for_leaves else []
        found: list[torch.Tensor | None] = [None] * len(trained)
        if self.needs_forward(index):
            leaves = [
                value.detach().requires_grad_(total is not None)
                for value, total in zip(arguments.rows_of(index), totals, strict=True)
            ]
            needed = [leaf for leaf in leaves if leaf.requires_grad] + trained
            if not needed:
                return
            with self._modes.set():
                part = self._run_tile(index, *leaves).to(arguments.sum().dtype)
            first, end = arguments.pairs.range_of(index)
            gradient = arguments.sum()[arguments.pairs.tokens[first:end]]
            found = list(torch.autograd.grad([part], needed, [gradient], allow_unused=True))
            self._add(index, [found.pop(0) if leaf.requires_grad else None for leaf in leaves])
        _deliver(trained, found)

    def _add(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        arguments, pairs = self.arguments, self.arguments.pairs
        first, end = pairs.range_of(index)
        (hidden, of_hidden), (weights, of_weights), *rest = zip(
            arguments.gradients(), gradients, strict=True
        )
        if hidden is not None and of_hidden is not None:
            for begin, stop in reversed(pairs.ranges_of_experts(index)):
                rows = of_hidden[begin - first : stop - first]
                hidden.index_add_(0, pairs.tokens[begin:stop], rows)
        if weights is not None and of_weights is not None:
            places = pairs.tokens[first:end], pairs.choices[first:end]
            weights.index_put_(places, of_weights, accumulate=True)
        for factor, of_factor in rest:
            if factor is not None and of_factor is not None:
                factor[pairs.experts_of(index)] = of_factor

    def _run_tile(
        self,
        index: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        adaptations, rest = {}, list(factors)
        for name, count, shown in self._recipes:
            adaptations[name] = Adaptation(tuple(rest[:count]), shown)
            del rest[:count]
        tile = self.tiles[index]
        with tile.adapted(adaptations):
            part: torch.Tensor = tile(
                hidden, self.arguments.pairs.indices_in(index), weights.unsqueeze(-1)
            )
        return part


class _Arguments:
    """The tensors of a running call."""

    out: torch.Tensor | None = None  # The output so far; in a backward, its gradient.
    needs: tuple[bool, ...] = ()  # Which of hidden states, routing weights, factors.

    def __init__(self, values: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        self.hidden, self.indices, self.weights, *self.factors = values
        self._starts = starts
        self._gradients: list[torch.Tensor | None] | None = None

    def sum(self) -> torch.Tensor:
        """Returns the output so far, or its gradient. It has memory from the first use on."""
        if self.out is None:
            self.out = torch.zeros_like(self.hidden)
        return self.out

    def gradients(self) -> list[torch.Tensor | None]:
        """Returns the gradients so far of hidden states, routing weights and factors. They have
        memory from the first use on."""
        if self._gradients is None:
            values = (self.hidden, self.weights, *self.factors)
            self._gradients = [
                torch.zeros_like(value, memory_format=torch.contiguous_format) if need else None
                for value, need in zip(values, self.needs, strict=True)
            ]
        return self._gradients

    def per_token(self) -> list[torch.Tensor]:
        """Returns the tensors as large as the hidden states: these and what is summed so far."""
        found = [self.hidden, self.out, (self._gradients or [None])[0]]
        return [tensor for tensor in found if tensor is not None]

    @cached_property
    def pairs(self) -> Pairs:
        return Pairs(self.indices, self._starts)

    def rows_of(self, index: int) -> list[torch.Tensor]:
        """Returns hidden states and routing weights by pair, and the factors of a tile's
        experts."""
        first, end = self.pairs.range_of(index)
        tokens, choices = self.pairs.tokens[first:end], self.pairs.choices[first:end]
        experts = self.pairs.experts_of(index)
        factors = [factor[experts] for factor in self.factors]
        return [self.hidden[tokens], self.weights[tokens, choices], *factors]


def _deliver(parameters: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Gives leaves their gradients, as autograd does; None stands for zeros."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        found = gradient
        if found is None:  # The hooks of any other gradient have run when autograd returned it.
            found = torch.zeros_like(parameter)
            for hook in list((parameter._backward_hooks or {}).values()):
                changed = hook(found)
                found = found if changed is None else changed
        parameter.grad = found if parameter.grad is None else parameter.grad + found
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


class Runner:
    """Takes calls through the tiles, one by one."""

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """Returns the output."""
        go_forward([call])
        return call.arguments.sum()

    def note_output(self, call: ExpertsCall, out: torch.Tensor) -> None:
        """Takes the output when it is a part of the graph."""

    def backward(
        self, call: ExpertsCall, gradient: torch.Tensor, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of hidden states, routing weights and factors."""
        call.begin_backward(gradient, needs)
        go_backward([call], is_for_leaves=call.is_for_leaves)
        return call.arguments.gradients()


# Yields calls one after the other, each while its tensors are there.
Present = Callable[[Sequence[ExpertsCall]], Iterable[ExpertsCall]]


def go_forward(calls: Sequence[ExpertsCall], present: Present = iter) -> None:
    """Runs calls of the same module; every tile is fetched once for all of them."""
    for index, tile in enumerate(calls[0].tiles):
        needy = [call for call in calls if call.needs_forward(index)]
        if needy:
            with tile.held():
                for call in present(needy):
                    call.run_forward(index)


def _hold(tile: Any) -> AbstractContextManager[Any]:
    held: AbstractContextManager[Any] = tile.held()
    return held


def go_backward(
    calls: Sequence[ExpertsCall],
    *,
    is_for_leaves: bool,
    hold: Callable[[Any], AbstractContextManager[Any]] = _hold,
    present: Present = iter,
) -> None:
    """Runs the backward of calls that have begun theirs. `hold(tile)` keeps a tile in memory."""
    tiles = calls[0].tiles
    for index in reversed(range(len(tiles))):
        needy = [c for c in calls if c.needs_backward(index, is_for_leaves=is_for_leaves)]
        if needy:
            with hold(tiles[index]):
                for call in present(needy):
                    call.run_backward(index, is_for_leaves=is_for_leaves)


class ExpertsNode(torch.autograd.Function):
    """The only node of a call."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        call: ExpertsCall,
        runner: Runner,
        anchor: torch.Tensor | None,
        *values: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.runner = call, runner
        ctx.save_for_backward(*values)
        with call.with_arguments(*values):
            return runner.forward(call)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needs = list(ctx.needs_input_grad[3:])
        del needs[1]  # Of the indices.
        with ctx.call.with_arguments(*ctx.saved_tensors):
            hidden, weights, *factors = ctx.runner.backward(ctx.call, gradient, needs)
        return None, None, None, hidden, None, weights, *factors


def anchored(tiles: Sequence[nn.Module]) -> torch.Tensor | None:
    """Returns the anchor of a call, if one of its tiles is trained."""
    if not torch.is_grad_enabled() or not any(tile.is_trained for tile in tiles):
        return None
    return torch.zeros((), requires_grad=True).clone()
