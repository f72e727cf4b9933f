"""One call of tiled experts: tile after tile, in both directions.

The forward keeps no activations. It visits the tiles in ascending order and adds what each expert
gives to the sum. The backward visits the tiles in descending order, repeats the forward of a tile
and runs its backward at once. Each direction needs each tile once, and the activations of one tile
are in memory. A runner may put the calls of several micro-batches together
(`modules/accumulate/experts.py`): every tile is then there for all of them, and a grouped product
may be, too (`products`).

Note [Same bits]
  A row has the bits of the class's forward, or of grouped products. All sums have the order of the
  loop over experts ("eager") and of its autograd. An output row is a sum over its experts in
  ascending order. The gradient of a hidden state is a sum over its experts
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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.nn import functional
from typing_extensions import override

from infinity.modules.autograd.threads import Modes
from infinity.modules.handles.torch_functions import TENSOR
from infinity.modules.tiling.expert_adapters import Adaptation
from infinity.ops.experts import Pairs, add_rows_, are_rows_apart, weighted
from infinity.private.torch import will_engine_execute_node

_ALIGNMENT_NBYTES = 16  # Of the rows of the matrices of a grouped product.

Recipe = tuple[str, int, Callable[..., Any]]  # An attribute; number and `shown` of its adaptation.


class ExpertsCall:
    """The arguments of one call, and its sums over experts. One thread at a time."""

    def __init__(
        self,
        tiles: Sequence[Any],
        starts: Sequence[int],
        recipes: Sequence[Recipe],
        anchor: Node | None,
        modes: Modes,
        num_joined: int = 1,
    ) -> None:
        self.tiles = tiles
        self.starts = starts
        self.recipes = recipes
        self.modes = modes
        self.num_joined = num_joined  # See `_joined`.
        self._anchor = anchor
        self.is_graded = torch.is_grad_enabled()
        self._arguments: _Arguments | None = None

    @contextmanager
    def with_arguments(self, *values: torch.Tensor) -> Iterator[None]:
        """Has arguments and sums for the time of a `with` block. values: hidden states [tokens,
        width], indices [tokens, k], routing weights [tokens, k], factors of adapters."""
        self._arguments = _Arguments(values, self.starts[-1])
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

    @property
    def kind(self) -> Any:
        """Calls of one kind may share products: equal adapters, modes and needs of gradients."""
        values, recipes = self.arguments, []
        for name, count, shown in self.recipes:
            options = getattr(shown, "keywords", {})
            recipes.append((name, count, getattr(shown, "func", shown), *options.items()))
        tensors = (values.hidden, values.indices, values.weights, *values.factors)
        facts = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        return (self.modes, values.needs, *recipes, *facts)

    def may_share_products(self) -> bool:
        """Whether rows of other calls may stand beside those of this one."""
        hidden, tile, rest = self.arguments.hidden, self.tiles[0], list(self.arguments.factors)
        if not tile.is_grouped_on(hidden.device):
            return False
        shapes = [(*matrices.shape[1:], False) for matrices in tile.matrices.values()]
        for _, count, _ in self.recipes:
            if count == 2:
                shapes += [(*factor.shape[1:], True) for factor in rest[:2]]
            del rest[:count]
        return all(
            are_rows_apart(
                (first, second) if tile.is_transposed else (second, first),
                next(iter(tile.matrices.values())).dtype, hidden.device,
                is_transposed=not tile.is_transposed, is_trained=is_factor,
            )
            for first, second, is_factor in shapes
        )  # fmt: skip

    # -- Forward -----------------------------------------------------------------------------------

    def needs_forward(self, index: int) -> bool:
        """A tile without tokens gives nothing."""
        return bool(self._parts(index))

    @torch.no_grad()
    def run_forward(self, index: int) -> None:
        """Adds what the experts of one tile give. The tile's weights are there."""
        arguments = self.arguments
        for experts in self._parts(index):
            with self.modes.set(), torch.no_grad():
                part = self._run(index, experts, *arguments.rows_of(experts))
            tokens, _ = arguments.pairs.places_of(experts)
            add_rows_(arguments.sum(), tokens, part)

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
        trained = self.tiles[index].trained() if is_for_leaves else []
        found: list[torch.Tensor | None] = [None] * len(trained)
        for experts in reversed(self._parts(index)):
            found = self._part_backward(index, experts, trained)
        _deliver(trained, found)

    def _part_backward(
        self, index: int, experts: slice, trained: list[nn.Parameter]
    ) -> list[torch.Tensor | None]:
        arguments = self.arguments
        leaves = [
            value.detach().requires_grad_(need)
            for value, need in zip(arguments.rows_of(experts), arguments.needs, strict=True)
        ]
        needed = [leaf for leaf in leaves if leaf.requires_grad] + trained
        if not needed:
            return []
        with self.modes.set():
            part = self._run(index, experts, *leaves)
        tokens, choices = arguments.pairs.places_of(experts)
        found: list[torch.Tensor | None] = list(
            torch.autograd.grad([part], needed, [arguments.sum()[tokens]], allow_unused=True)
        )
        own = [found.pop(0) if leaf.requires_grad else None for leaf in leaves]
        (hidden, of_hidden), (weights, of_weights), *rest = zip(
            arguments.gradients(), own, strict=True
        )
        if hidden is not None and of_hidden is not None:
            add_rows_(hidden, tokens, of_hidden, is_last_first=True)
        if weights is not None and of_weights is not None:
            weights.index_put_((tokens, choices), of_weights, accumulate=True)
        for factor, of_factor in rest:
            if factor is not None and of_factor is not None:
                factor[experts] = of_factor
        return found

    def _parts(self, index: int) -> list[slice]:
        """Returns the experts of a tile that have pairs, in parts of no more rows than one of the
        joined calls may have, or of one expert: so the memory does not grow with their number."""
        pairs, arguments = self.arguments.pairs, self.arguments
        experts = slice(self.starts[index], self.starts[index + 1], self.num_joined)
        return pairs.parts(experts, -(-arguments.indices.numel() // self.num_joined))

    def _run(
        self,
        index: int,
        experts: slice,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        """Returns what each row adds to the sum of its token, in the dtype of the sum."""
        adaptations, rest = {}, list(factors)
        for name, count, shown in self.recipes:
            adaptations[name] = Adaptation(tuple(rest[:count]), shown)
            del rest[:count]
        tile, pairs, dtype = self.tiles[index], self.arguments.pairs, self.arguments.sum().dtype
        start, weights = self.starts[index], weights.unsqueeze(-1)
        if tile.is_grouped_on(hidden.device):
            rows = products(
                tile, adaptations, hidden,
                pairs=pairs, experts=experts, first=start, num_joined=self.num_joined,
            )  # fmt: skip
            return weighted(rows, weights, dtype)
        numbers = pairs.numbers_of(experts) + (experts.start - start)
        with tile.adapted(adaptations):
            part: torch.Tensor = tile(hidden, numbers.unsqueeze(-1), weights)
        return part.to(dtype)


class _Arguments:
    """The tensors of a running call."""

    out: torch.Tensor | None = None  # The output so far; in a backward, its gradient.
    needs: tuple[bool, ...] = ()  # Which of hidden states, routing weights, factors.

    def __init__(self, values: Sequence[torch.Tensor], num_experts: int) -> None:
        self.hidden, self.indices, self.weights, *self.factors = values
        self._num_experts = num_experts
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

    @cached_property
    def pairs(self) -> Pairs:
        return Pairs(self.indices, self._num_experts)

    def rows_of(self, experts: slice) -> list[torch.Tensor]:
        """Returns hidden states and routing weights by pair, and the factors of some experts."""
        tokens, choices = self.pairs.places_of(experts)
        factors = [factor[experts] for factor in self.factors]
        return [self.hidden[tokens], self.weights[tokens, choices], *factors]

    def per_token(self) -> list[torch.Tensor]:
        """Returns the tensors as large as the hidden states: these and what is summed so far."""
        found = [self.hidden, self.out, (self._gradients or [None])[0]]
        return [tensor for tensor in found if tensor is not None]


@torch.no_grad()
def _joined(calls: Sequence[ExpertsCall]) -> ExpertsCall:
    """Returns one call in the place of several of one kind: each expert is there once for each of
    them, side by side, so a sum over its rows is one of theirs."""
    values, count, first = [call.arguments for call in calls], len(calls), calls[0]
    starts = [start * count for start in first.starts]
    joint = ExpertsCall(first.tiles, starts, first.recipes, None, first.modes, count)
    joint._arguments = _Arguments(
        [
            torch.cat([own.hidden for own in values]),
            torch.cat([own.indices * count + n for n, own in enumerate(values)]),
            torch.cat([own.weights for own in values]),
            *(
                torch.stack(of_calls, 1).flatten(0, 1)
                for of_calls in zip(*(own.factors for own in values), strict=True)
            ),
        ],
        starts[-1],
    )
    joint.arguments.needs = values[0].needs
    outs = [own.out for own in values if own.out is not None]
    joint.arguments.out = torch.cat(outs) if outs else None
    return joint


def _part(joint: ExpertsCall, calls: Sequence[ExpertsCall], *, is_backward: bool) -> None:
    """Gives each of the calls its part of the joint sums, or gradients."""
    sizes, parts = [len(call.arguments.hidden) for call in calls], []
    if not is_backward:
        for call, out in zip(calls, joint.arguments.sum().split(sizes), strict=True):
            call.arguments.out = out
        return
    for number, total in enumerate(joint.arguments.gradients()):
        if total is None:
            parts.append([None] * len(calls))
        elif number < 2:
            parts.append(total.split(sizes))
        else:
            parts.append(total.unflatten(0, (-1, len(calls))).unbind(1))
    for call, *own in zip(calls, *parts, strict=True):
        call.arguments._gradients = own


def _deliver(parameters: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Gives leaves their gradients, as autograd does; None stands for zeros."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        found = gradient
        if found is None:  # The hooks of any other gradient have run when autograd returned it.
            found = torch.zeros_like(parameter)
            for hook in list((parameter._backward_hooks or {}).values()):
                changed = hook(found)
                found = found if changed is None else changed
        present = TENSOR.grad.__get__(parameter)
        TENSOR.grad.__set__(parameter, found if present is None else present + found)
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


def go_forward(calls: Sequence[ExpertsCall], present: Present | None = None) -> None:
    """Runs calls of the same module; every tile is fetched once for all of them. With `present`
    they run one after the other."""
    with _together(calls, is_alone=present is not None, is_backward=False) as every:
        for index, tile in enumerate(calls[0].tiles):
            if needy := [call for call in every if call.needs_forward(index)]:
                with tile.held():
                    for call in (present or iter)(needy):
                        call.run_forward(index)


def go_backward(
    calls: Sequence[ExpertsCall],
    *,
    is_for_leaves: bool,
    hold: Callable[[Any], AbstractContextManager[Any]] = methodcaller("held"),
    present: Present | None = None,
) -> None:
    """Runs the backward of calls that have begun theirs. `hold(tile)` keeps a tile in memory."""
    tiles = calls[0].tiles
    # A weight has a gradient of each call.
    is_trained = is_for_leaves and any(tile.is_trained for tile in tiles)
    is_alone = is_trained or present is not None
    with _together(calls, is_alone=is_alone, is_backward=True) as every:
        for index in reversed(range(len(tiles))):
            needy = [c for c in every if c.needs_backward(index, is_for_leaves=is_for_leaves)]
            if needy:
                with hold(tiles[index]):
                    for call in (present or iter)(needy):
                        call.run_backward(index, is_for_leaves=is_for_leaves)


@contextmanager
def _together(
    calls: Sequence[ExpertsCall], *, is_alone: bool, is_backward: bool
) -> Iterator[list[ExpertsCall]]:
    """Has the calls, and one in the place of those that may share products, for a `with` block.
    Waits for the routing of all of them once."""
    alike: list[tuple[Any, list[ExpertsCall]]] = []
    for number, call in enumerate(calls):
        kind = number if is_alone else call.kind
        found = next((some for known, some in alike if known == kind), None)
        if found is None:
            alike.append((kind, [call]))
        else:
            found.append(call)
    every, joints = [], []
    for _, some in alike:
        if len(some) > 1 and some[0].may_share_products():
            joints.append((_joined(some), some))
            every.append(joints[-1][0])
        else:
            every += some
    Pairs.read([call.arguments.pairs for call in every])
    yield every
    for joint, some in joints:
        _part(joint, some, is_backward=is_backward)


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
    return torch.zeros((), requires_grad=True, device="cpu").clone()


# -- One product for all experts of a tile ---------------------------------------------------------
#
# `products` is the computation of transformers' `grouped_mm` (`integrations/moe.py`) over rows that
# are ordered by expert already. It knows of a class what transformers' decorator notes of it.
#
# A row's product does not depend on the rows of other experts or micro-batches where a trial has
# shown that of the device (`ops/experts.py`). There the rows of several micro-batches share a
# product. Elsewhere each micro-batch has its own. Sums over rows (gradients of adapters) are one
# group for each expert and micro-batch, so they have the bits of a micro-batch by itself.


def explain_no_groups(tile: Any) -> str:
    """Returns why the experts of a tile have no grouped product, "" if they have."""
    if not isinstance(getattr(tile, "has_post_expert_norm", None), bool):
        return f"transformers knows no grouped product of {type(tile).__name__}"
    for name, matrices in tile.matrices.items():
        sizes = [size * matrices.element_size() for size in matrices.shape[1:]]
        if matrices.dim() != 3 or any(nbytes % _ALIGNMENT_NBYTES for nbytes in sizes):
            return f"the {name} of {type(tile).__name__} has rows of no multiple of 16 bytes"
    return ""


def products(
    tile: Any,
    adaptations: Mapping[str, Adaptation],
    rows: torch.Tensor,
    *,
    pairs: Pairs,
    experts: slice,
    first: int,
    num_joined: int,
) -> torch.Tensor:
    """Returns what experts give for their rows, before routing weights: [rows, width].

    first: expert of the tile; num_joined: how often each expert is there
    """
    within = slice((experts.start - first) // num_joined, (experts.stop - first) // num_joined)
    ends = pairs.ends_of(experts)
    ends_of_experts = ends[num_joined - 1 :: num_joined].contiguous()

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight: Any = tile._parameters[name][within]
        if (adaptation := adaptations.get(name)) is not None:
            base = weight
            weight = adaptation.of(lambda: base).of_groups(ends)
        if not tile.is_transposed:
            weight = weight.transpose(-2, -1)
        out = functional.grouped_mm(rows.to(weight.dtype), weight, offs=ends_of_experts)
        return out.add_(bias_of(name)) if tile.has_bias else out

    def bias_of(name: str) -> torch.Tensor:
        name = f"{name}_bias"
        bias = tile._parameters[name][within]
        numbers = pairs.numbers_of(experts)
        if (adaptation := adaptations.get(name)) is None:
            chosen: torch.Tensor = bias[numbers // num_joined]
            return chosen
        sums: torch.Tensor = adaptation.of(lambda: bias.repeat_interleave(num_joined, 0))
        return sums[numbers]

    out = linear(rows, "gate_up_proj" if tile.has_gate else "up_proj")
    out = linear(tile._apply_gate(out) if tile.has_gate else tile.act_fn(out), "down_proj")
    normed: torch.Tensor = tile.post_expert_norm(out) if tile.has_post_expert_norm else out
    return normed
