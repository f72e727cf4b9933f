"""The first forward of a block in a micro-batch: its graph is dropped, and its inputs are saved.

`repeat.py` repeats it with a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

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
)
from infinity.modules.accumulate.captured import CapturedTensors
from infinity.modules.accumulate.experts import ExpertsSchedule
from infinity.modules.accumulate.fiber import Modes, Random
from infinity.modules.accumulate.micro_batch import MicroBatch
from infinity.modules.accumulate.module_state import ModuleState
from infinity.modules.accumulate.proof import Proof, checksums
from infinity.modules.autograd.outputs import detach_from_parameters
from infinity.private.torch import get_sequence_nr, tree_flatten, tree_unflatten
from infinity.streaming.inputs.activations import InputStore

_NONE = nullcontext()


class BlockForward:
    """Runs blocks in the threads of fibers, one at a time. `anchor`: as of `BlockRepeat`."""

    def __init__(
        self,
        inputs: InputStore,
        random: Random,
        attributes: ModuleState,
        proof: Proof,
        experts: ExpertsSchedule,
        anchor: torch.Tensor,
        device: torch.device,
        is_parameter_memory: Callable[[torch.Tensor], bool],
    ) -> None:
        self._inputs = inputs
        self._random = random
        self._attributes = attributes
        self._proof = proof
        self._experts = experts
        self._anchor = anchor
        self._device = device
        self._is_parameter_memory = is_parameter_memory

    def call(
        self,
        fiber: MicroBatch,
        block: RunningBlock,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the block's forward in the fiber, drops its graph and saves its inputs."""
        captured = CapturedTensors()
        call = BlockCall(
            block, *tree_flatten((args, kwargs)), Modes.now(self._device), self._attributes.now(),
            self._random.state(), captured.keys(), get_sequence_nr(),
        )  # fmt: skip
        versions = [leaf._version for leaf in call.leaves if is_activation(leaf)]
        was_inside, fiber.is_inside = fiber.is_inside, True
        changed = block.state.watch()
        with self._experts.within(call.experts, call.leaves) if block.experts else _NONE:
            output = block.forward(*args, **kwargs)
        fiber.is_inside = was_inside
        stops = block.has_tiles or bool(block.experts)
        call.before = {} if stops else self._attributes.end_block(), changed()
        if versions != [leaf._version for leaf in call.leaves if is_activation(leaf)]:
            raise UnsupportedError(
                f"{block.hooked.name} changes an argument in place, so its forward cannot be "
                "repeated; accumulate micro-batches by several backward() calls instead"
            )
        output = detach_from_parameters(output, self._is_parameter_memory)
        aside = captured.tensors()
        leaves, tree = tree_flatten((output, aside))
        refuse_hidden(block, output, leaves)
        if self._proof.is_compared(fiber.number):
            call.checksums = checksums(leaves)
        # A tensor that is returned twice stays one tensor: its gradients meet in one sum.
        places: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if is_activation(leaf) and leaf.requires_grad:
                places.setdefault(id(leaf), []).append(index)
        call.which = [indexes[0] for indexes in places.values()]
        if not call.which:
            return output
        refuse_interleaved(call, fiber.calls, stops=stops)
        refuse_side_channels(block, call.first_node, [leaves[index] for index in call.which])
        call.gradients = EdgeGradients(len(call.which))
        values = [leaves[index].data for index in call.which]
        boundaries = Boundary.apply(call.gradients, self._anchor, values)  # type: ignore[no-untyped-call]
        for indexes, tensor in zip(places.values(), boundaries, strict=True):
            for index in indexes:
                leaves[index] = tensor
        call.number = len(fiber.calls)
        fiber.calls.append(call)
        fiber.graph.note_inputs(call.number, self._save_inputs(call))
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
