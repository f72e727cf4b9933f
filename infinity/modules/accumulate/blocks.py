"""The calls of blocks: the first forward, whose graph is dropped; its repeat with a graph; the
backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node, get_gradient_edge

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.boundary import (
    BlockCall,
    BlockInput,
    Boundary,
    EdgeGradients,
    RunningBlock,
    is_activation,
    refuse_hidden,
    refuse_interleaved,
    refuse_side_channels,
    versions_of,
)
from infinity.modules.accumulate.experts import ExpertsSchedule
from infinity.modules.accumulate.fiber import Fiber, Random
from infinity.modules.accumulate.module_state import ModuleState
from infinity.modules.accumulate.of_transformers import CapturedTensors, captured_again
from infinity.modules.accumulate.proof import Proof, checksums
from infinity.modules.accumulate.reachable import again
from infinity.modules.autograd.outputs import detach_from_parameters
from infinity.modules.autograd.threads import Modes
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.private.torch import get_sequence_nr, tree_flatten, tree_unflatten
from infinity.streaming.inputs.activations import InputStore

# The inputs of this many calls are restored ahead of the running call.
_RESTORED_AHEAD = 2

_NONE = nullcontext()

Calls = Sequence[tuple[Fiber, BlockCall]]


class Repeated(NamedTuple):
    """A repeated forward: copies of the block's inputs, the gradients that arrive there, and pairs
    of an output and its gradient."""

    copies: dict[BlockInput, torch.Tensor]
    arrived: EdgeGradients
    pairs: list[tuple[torch.Tensor, torch.Tensor]]


class BlockRuns:
    """Runs calls of blocks in the thread of the schedule or of a fiber, one at a time.

    `is_fiber` says whether the running thread may be suspended. Its backward stays in it then.
    """

    def __init__(
        self,
        inputs: InputStore,
        random: Random,
        attributes: ModuleState,
        proof: Proof,
        experts: ExpertsSchedule,
        device: torch.device,
        is_parameter_memory: Callable[[torch.Tensor], bool],
        is_fiber: Callable[[], bool],
    ) -> None:
        self._inputs = inputs
        self._random = random
        self._attributes = attributes
        self._proof = proof
        self._experts = experts
        self._device = device
        self._is_parameter_memory = is_parameter_memory
        self._is_fiber = is_fiber
        # Requires a gradient, so that boundaries are part of a graph.
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._kept: dict[int, Repeated] = {}  # From probes, by the number of the call.

    # -- First forward -----------------------------------------------------------------------------

    def first(
        self, fiber: Fiber, block: RunningBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the block's first forward in the fiber, drops its graph and saves its inputs."""
        captured = CapturedTensors()
        call = BlockCall(
            block, *tree_flatten((args, kwargs)), Modes.now(self._device), self._attributes.now(),
            self._random.state(), captured.keys(), get_sequence_nr(),
        )  # fmt: skip
        versions = versions_of(call.leaves)
        was_inside, fiber.is_inside = fiber.is_inside, True
        fiber.records.called.append(block)
        changed = block.state.watch()
        with (
            self._experts.within(call.experts, call.leaves) if block.experts else _NONE,
            self._attributes.graph_dropped(block.hooked.name, call.first_node),
        ):
            output = block.forward(*args, **kwargs)
        fiber.is_inside = was_inside
        stops = block.has_tiles or bool(block.experts)
        call.before = {} if stops else self._attributes.end_block(), changed()
        refuse_interleaved(call, fiber.records.called, stops=stops)
        if versions != versions_of(call.leaves):
            raise UnsupportedError(
                f"{block.hooked.name} changes an argument in place, so its forward cannot be "
                "repeated; accumulate micro-batches by several backward() calls instead"
            )
        output = detach_from_parameters(output, self._is_parameter_memory)
        aside = captured.tensors()
        leaves, tree = tree_flatten((output, aside))
        refuse_hidden(block, output, leaves)
        # A tensor that is returned twice stays one tensor: its gradients meet in one sum.
        places: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if is_activation(leaf) and leaf.requires_grad:
                places.setdefault(id(leaf), []).append(index)
        call.which = [indexes[0] for indexes in places.values()]
        if not call.which:
            return output  # It is not repeated.
        if self._proof.is_compared(fiber.number):
            call.checksums = checksums(leaves)
        refuse_side_channels(block, call.first_node, [leaves[index] for index in call.which])
        call.gradients = EdgeGradients(len(call.which))
        values = [leaves[index].data for index in call.which]
        boundaries = Boundary.apply(call.gradients, self._anchor, values)  # type: ignore[no-untyped-call]
        for indexes, tensor in zip(places.values(), boundaries, strict=True):
            for index in indexes:
                leaves[index] = tensor
        call.number = len(fiber.records.calls)
        fiber.records.calls.append(call)
        fiber.records.graph.note_inputs(call.number, self._save_inputs(call))
        self._experts.keep(call.experts)
        output, aside = tree_unflatten(leaves, tree)
        captured.replace(aside)
        return output

    def _save_inputs(self, call: BlockCall) -> list[Node]:
        """Saves the arguments that need gradients, and returns their nodes."""
        inputs: dict[tuple[Node, int], BlockInput] = {}
        for index, leaf in enumerate(call.leaves):
            if is_activation(leaf) and leaf.requires_grad:
                edge = get_gradient_edge(leaf)
                key = edge.node, edge.output_nr  # Those of one output of one node are one input.
                if key not in inputs:
                    inputs[key] = BlockInput(self._inputs.save(leaf), edge)
                call.leaves[index] = inputs[key]
        return [node for node, _ in inputs]

    # -- Repeat and backward ---------------------------------------------------------------------

    def probe(self, calls: Calls, is_kept: bool, index: int) -> None:
        """Repeats the forward of one call, for the gradient of the output of its experts.
        `is_kept`: the graph stays in memory for the next probe and for `finish`."""
        UNINTERRUPTED.check()
        repeated = self._kept.get(index) or self._forward(calls, index)
        if is_kept:
            self._kept[index] = repeated
        with self._same_thread():
            self._experts.probe(calls[index][1].experts, repeated.pairs)
        if not is_kept:
            self._experts.forget_graphs(calls[index][1].experts)

    def finish(self, calls: Calls, index: int) -> None:
        """Repeats the forward of one call, unless a probe has kept it, and runs its backward."""
        UNINTERRUPTED.check()
        repeated = self._kept.pop(index, None) or self._forward(calls, index)
        self._experts.forget_outputs(calls[index][1].experts)
        self._backward(*calls[index], repeated)

    def _same_thread(self) -> AbstractContextManager[Any]:
        return (
            torch.autograd.set_multithreading_enabled(False) if self._is_fiber() else nullcontext()
        )

    def _forward(self, calls: Calls, index: int) -> Repeated:
        for _, ahead in calls[index : index + 1 + _RESTORED_AHEAD]:
            for source in ahead.inputs():
                if source.restored is None:
                    self._inputs.fetch(source.value)
        _, call = calls[index]
        sources = list(call.inputs())
        for source in sources:
            if source.restored is None:
                source.restored = self._inputs.restore(source.value)
        arrived = EdgeGradients(len(sources))
        copies = dict(zip(sources, self._enter(arrived, sources), strict=True))
        leaves = [copies[leaf] if isinstance(leaf, BlockInput) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.tree)
        self._attributes.set(call.attributes)
        with (
            self._random.drawn_from(call.random),
            self._attributes.again(call.before[0]),
            again(call.before[1]),
            call.modes.set(),
            captured_again(call.captured) as aside,
            self._experts.within(call.experts, leaves, is_repeated=True),
        ):
            output = call.block.forward(*args, **kwargs)
        outputs = tree_flatten((output, aside))[0]
        if call.checksums:
            self._proof.compare(call.block.hooked.name, call.checksums, outputs)
        pairs = [
            (outputs[index], gradient)
            for index, gradient in zip(call.which, call.gradients.sums, strict=True)
            if gradient is not None
        ]
        return Repeated(copies, arrived, pairs)

    def _enter(self, arrived: EdgeGradients, sources: list[BlockInput]) -> Sequence[torch.Tensor]:
        """Returns the tensors that a repeated forward begins with."""
        if not sources:
            return ()
        values = [source.restored.detach() for source in sources if source.restored is not None]
        with torch.enable_grad():
            copies: tuple[torch.Tensor, ...] = Boundary.apply(arrived, self._anchor, values)  # type: ignore[no-untyped-call]
        return copies

    def _backward(self, fiber: Fiber, call: BlockCall, repeated: Repeated) -> None:
        pairs = list(repeated.pairs)
        call.gradients.sums.clear()
        # As in plain autograd, gradients of later blocks for the same tensor come first in the sum.
        for source, copy in repeated.copies.items():
            before = fiber.records.graph.take(source.edge)
            if before is not None:
                pairs.append((copy, before))
        changed = call.block.state.watch(is_assumed=False)
        with self._same_thread():
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if not self._proof.is_alone and (cells := changed()):
            raise UnsupportedError(
                f"{call.block.hooked.name} changes {cells[0].what()} in its backward (a checkpoint "
                "inside it repeats a forward), so the changes would come in another order than in "
                "plain accumulation; accumulate micro-batches by several backward() calls instead"
            )
        for source, gradient in zip(repeated.copies, repeated.arrived.sums, strict=True):
            source.restored = None
            if gradient is not None:
                fiber.records.graph.put(source.edge, gradient)
