"""Tiled experts of a block: every tile passes all micro-batches, once in each direction.

Experts that are larger than the window are fetched tile by tile. Under the layer-major schedule the
micro-batches wait at the module of experts, not at its tiles: each of them has its routing, its
hidden states and the sum so far, and a tile that is there runs for all of them before the next tile
is fetched. So the bytes do not depend on the number of micro-batches.

Note [Backward]
  The repeated forward of a block does not run the experts again: their output was kept, beside the
  block's inputs. It yields the gradient of that output for every micro-batch (a *probe*). Then the
  tiles are visited in descending order, and each repeats its forward and runs its backward for all
  micro-batches. Then each micro-batch runs the backward of its block, in which the node of the
  experts hands out the gradients that are there already. The backward of a block therefore runs in
  the order of plain accumulation, and every sum has its order.

Note [Memory]
  The first forward of such a block keeps no activations: what autograd saves is dropped, because
  the forward is repeated. Up to `tile_micro_batches` micro-batches keep the graph of the repeated
  forward from the probe to the backward. More micro-batches run that forward once more instead. All
  micro-batches keep some tensors of the size of the hidden states while their block runs. Those
  that the tiles work on (hidden states and sum; in the backward of micro-batches without a graph
  also gradients) wait on a tier (`placement.experts`): each is on the device while a tile runs for
  its micro-batch. The routing stays: it is small, and says which tiles are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from typing_extensions import override

from infinity.modules.autograd.uses import UnitUses
from infinity.modules.tiling.experts import TiledExperts
from infinity.modules.tiling.experts_call import ExpertsCall, Runner, go_backward, go_forward
from infinity.streaming.inputs.activations import InputStore, WaitingMemory, place_of


@dataclass(eq=False, slots=True)
class SuspendedExperts:
    """One call of tiled experts in one micro-batch, from its forward to the block's backward."""

    out: torch.Tensor | None  # The output, while the block's forward or backward runs.
    saved: Any = None  # The output between them: what `InputStore.save` has returned.
    # Of the last repeated forward: the call, its arguments, and its output.
    call: ExpertsCall | None = None
    values: tuple[torch.Tensor, ...] = ()
    edge: GradientEdge | None = None
    needs: list[bool] = field(default_factory=list)
    gradient: torch.Tensor | None = None  # Of the output.
    can_wait: bool = False  # See `_Position.can_wait`.
    is_away: bool = False  # Since its probe: the values per token and the gradient.
    num_uses: int = 1  # How often `gradients` are read.
    # Of hidden states, routing weights and factors: what `InputStore.save` has returned.
    gradients: list[Any] | None = None

    @property
    def module(self) -> tuple[int, ...]:
        """Returns a key of the called module: the ids of its tiles."""
        assert self.call is not None
        return tuple(map(id, self.call.tiles))


@dataclass(eq=False, slots=True)
class _Position:
    """The block that runs in a thread, and how many of its calls of experts have begun."""

    suspended: list[SuspendedExperts]
    inputs: Sequence[Any]  # Of the block.
    is_repeated: bool
    count: int = 0

    def can_wait(self, call: ExpertsCall) -> bool:
        """Whether the call's hidden states have memory of their own. Other micro-batches may use
        that of the block's inputs."""
        place = place_of(call.arguments.hidden)
        tensors = (tensor for tensor in self.inputs if isinstance(tensor, torch.Tensor))
        return all(place_of(tensor) != place for tensor in tensors)


# A fiber has a context of its own.
_position: ContextVar[_Position | None] = ContextVar("block_with_experts", default=None)


class ExpertsSchedule(Runner):
    """Runs the calls of tiled experts of all micro-batches together, and others as `Runner`.

    `results` has outputs and gradients between the forward and the backward of a block, `waiting`
    what waits while a tile runs for another micro-batch. Both are of this rank: ranks that compute
    a layer together have other outputs and gradients of experts. `stop` suspends the running
    micro-batch until `serve` has run its call.
    """

    def __init__(
        self,
        uses: UnitUses,
        results: InputStore,
        waiting: WaitingMemory,
        stop: Callable[[ExpertsCall], None],
    ) -> None:
        self._uses = uses
        self._inputs = results
        self._waiting = waiting
        self._stop = stop
        # While the block's backward runs.
        self._suspended: dict[ExpertsCall, SuspendedExperts] = {}
        self._away: set[ExpertsCall] = set()  # What they have per token waits on a tier.

    @contextmanager
    def installed(self, modules: Sequence[TiledExperts]) -> Iterator[None]:
        """Makes these modules run their calls here."""
        for module in modules:
            module.__dict__["runner"] = self
        try:
            yield
        finally:
            for module in modules:
                module.__dict__.pop("runner", None)
            self._away.clear()
            self._waiting.clear()

    @contextmanager
    def within(
        self, suspended: list[SuspendedExperts], inputs: Sequence[Any], *, is_repeated: bool = False
    ) -> Iterator[None]:
        """Runs a block's forward on `inputs`, with its calls of experts in their order."""
        token = _position.set(_Position(suspended, inputs, is_repeated))
        try:
            with ExitStack() as stack:
                if not is_repeated:
                    stack.enter_context(saved_tensors_hooks(lambda tensor: None, _refuse))
                yield
        finally:
            _position.reset(token)

    # -- Calls, in the thread of a micro-batch -----------------------------------------------------

    @override
    def forward(self, call: ExpertsCall) -> torch.Tensor:
        position = _position.get()
        if position is None or (position.is_repeated and not call.is_graded):
            return super().forward(call)
        if not position.is_repeated:
            if position.can_wait(call):  # What it has per token waits on a tier.
                self._put_away(call)
            self._stop(call)  # Until the call is served.
            self._bring_back(call)
            out = call.arguments.sum()
            if not call.is_graded:
                return out
            position.suspended.append(SuspendedExperts(out))
            return out.clone()  # The block may change its own in place.
        suspended = position.suspended[position.count]
        position.count += 1
        arguments = call.arguments
        values = (arguments.hidden, arguments.indices, arguments.weights, *arguments.factors)
        self._suspended[call] = suspended
        if suspended.gradients is None:
            suspended.call, suspended.values = call, tuple(value.detach() for value in values)
            suspended.needs = [value.requires_grad for value in (values[0], *values[2:])]
            suspended.can_wait = position.can_wait(call)
        if suspended.out is None:
            suspended.out = self._inputs.restore(suspended.saved)
        return suspended.out.clone()

    def _put_away(self, call: ExpertsCall) -> None:
        if not self._waiting.keeps_all:
            self._away.add(call)
        for tensor in call.arguments.per_token():
            self._waiting.put_away(tensor)

    def _bring_back(self, call: ExpertsCall) -> None:
        for tensor in call.arguments.per_token():
            self._waiting.bring_back(tensor)
        self._away.discard(call)

    def _present(self, calls: Sequence[ExpertsCall]) -> Iterator[ExpertsCall]:
        """Yields calls one after the other. Those that wait on a tier are there for that time."""
        for call, following in zip_longest(calls, calls[1:]):
            is_waiting = call in self._away
            self._bring_back(call)
            if following in self._away:
                for tensor in following.arguments.per_token():
                    self._waiting.fetch(tensor)
            yield call
            if is_waiting:
                self._put_away(call)

    def keep(self, calls: Sequence[SuspendedExperts]) -> None:
        """Saves the outputs of a block whose forward will be repeated."""
        for suspended in calls:
            assert suspended.out is not None
            suspended.saved, suspended.out = self._inputs.save(suspended.out), None

    @override
    def note_output(self, call: ExpertsCall, out: torch.Tensor) -> None:
        """Takes the output when it is a part of the graph."""
        suspended = self._suspended.get(call)
        if suspended is not None and suspended.gradients is None:
            suspended.edge = get_gradient_edge(out) if out.requires_grad else None

    @override
    def backward(
        self, call: ExpertsCall, gradient: torch.Tensor, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        suspended = self._suspended.get(call)
        if suspended is None:
            return super().backward(call, gradient, needs)
        assert suspended.gradients is not None, "a backward has come to experts before its probe"
        return [
            None if gradient is None else self._inputs.restore(gradient)
            for gradient in suspended.gradients
        ]

    # -- Tiles, in the thread of the schedule ------------------------------------------------------

    def serve(self, calls: Sequence[ExpertsCall]) -> None:
        """Runs calls of the same module whose micro-batches are stopped."""
        if calls:
            go_forward(calls, self._present if self._away.intersection(calls) else None)

    def probe(
        self, calls: Sequence[SuspendedExperts], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Takes the gradient of the last output of experts that has none yet. pairs: outputs of the
        repeated block and their gradients."""
        suspended = _last_waiting(calls)
        edge, suspended.edge = suspended.edge, None
        if edge is not None:
            (suspended.gradient,) = torch.autograd.grad(
                [out for out, _ in pairs], [edge], [gradient for _, gradient in pairs],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip

    def forget_graphs(self, calls: Sequence[SuspendedExperts]) -> None:
        """The graph of the last repeated forward is not needed any more. What the call of experts
        that comes next has per token waits on a tier."""
        for suspended in calls:
            suspended.edge = None
        suspended = _last_waiting(calls)
        if suspended.can_wait and suspended.gradient is not None:
            suspended.is_away = True
            for tensor in (suspended.values[0], suspended.gradient):
                self._waiting.put_away(tensor)

    def forget_outputs(self, calls: Sequence[SuspendedExperts]) -> None:
        """The forward of this block is not repeated again."""
        for suspended in calls:
            suspended.out = None

    def go_backward(
        self, calls: Sequence[list[SuspendedExperts]], probe: Callable[[Sequence[int]], None]
    ) -> None:
        """Computes the gradients of all calls of experts, those of the last module first.

        `calls`: the calls of every micro-batch in one block. `probe(numbers)` repeats the block's
        forward of these micro-batches, and calls `self.probe` for each of them.
        """
        while numbers := [
            number
            for number, suspended in enumerate(calls)
            if any(call.gradients is None for call in suspended)
        ]:
            probe(numbers)
            by_module: dict[tuple[int, ...], list[SuspendedExperts]] = {}
            for number in numbers:
                suspended = _last_waiting(calls[number])
                # The backwards of later probes pass it, and that of the block.
                suspended.num_uses = sum(call.gradients is None for call in calls[number])
                by_module.setdefault(suspended.module, []).append(suspended)
            for together in by_module.values():
                self._serve_backward(together)

    def _serve_backward(self, together: list[SuspendedExperts]) -> None:
        running: list[ExpertsCall] = []
        with ExitStack() as stack:
            for suspended in together:
                call = suspended.call
                assert call is not None
                suspended.gradients = [None] * len(suspended.needs)
                if suspended.gradient is not None:
                    stack.enter_context(call.with_arguments(*suspended.values))
                    call.begin_backward(suspended.gradient, suspended.needs)
                    running.append(call)
                    if suspended.is_away and not self._waiting.keeps_all:
                        self._away.add(call)
            if running:
                is_for_leaves = any(call.has_leaves for call in running)
                present = self._present if self._away.intersection(running) else None
                go_backward(running, is_for_leaves=is_for_leaves, hold=self._hold, present=present)
            for suspended in together:
                if suspended.gradient is not None:
                    assert suspended.call is not None
                    self._bring_back(suspended.call)
                    for _ in range(suspended.num_uses):
                        suspended.gradients = [
                            None if gradient is None else self._inputs.save(gradient)
                            for gradient in suspended.call.arguments.gradients()
                        ]
                suspended.gradient, suspended.values, suspended.is_away = None, (), False

    @contextmanager
    def _hold(self, tile: Any) -> Iterator[None]:
        """Holds a tile to which several gradients come."""
        with tile.held() as units:
            self._uses.begin_block_backward(units)
            yield
        self._uses.end_of_block(units)

    def end_block(self) -> None:
        """Forgets the calls of a block whose backward is over."""
        for suspended in self._suspended.values():
            suspended.call = suspended.out = suspended.edge = None
        self._suspended.clear()


def _last_waiting(calls: Sequence[SuspendedExperts]) -> SuspendedExperts:
    return next(suspended for suspended in reversed(calls) if suspended.gradients is None)


def _refuse(nothing: None) -> torch.Tensor:
    raise AssertionError("a backward runs through the first forward of a block")
