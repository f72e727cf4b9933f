"""Boundaries: the graph of a block is replaced by one node, and the block is recorded for a repeat.

See the notes Boundaries and Same sums of `layer_major.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.experts import SuspendedExperts
from infinity.modules.accumulate.module_state import Attributes
from infinity.modules.accumulate.proof import Proof
from infinity.modules.accumulate.reachable import Changeable, Reachable
from infinity.modules.autograd.forward_nodes import nodes_since
from infinity.modules.autograd.outputs import tensors_in
from infinity.modules.autograd.threads import Modes
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.torch_functions import version_of
from infinity.modules.reading.discover import HookedModule
from infinity.modules.tiling.experts import TiledExperts
from infinity.modules.tiling.layers import Tiled


@dataclass(eq=False, slots=True)
class RunningBlock:
    """A block that fibers stop at."""

    hooked: HookedModule
    forward: Callable[..., Any]
    has_tiles: bool  # Other than experts.
    experts: list[TiledExperts]
    state: Reachable  # What this block alone can reach.
    changes: str | None = None  # What it has changed in this window.
    order: int = -1  # Counts blocks in the order in which a fiber first reached them.

    @classmethod
    def of(cls, hooked: HookedModule, proof: Proof) -> RunningBlock:
        """Returns the block of a hooked module."""
        tiled = [module for module in hooked.module.modules() if isinstance(module, Tiled)]
        experts = [module for module in tiled if isinstance(module, TiledExperts)]
        state = Reachable([(hooked.name, hooked.module)], proof)
        return cls(hooked, hooked.module.forward, len(tiled) > len(experts), experts, state)


class TileStop(NamedTuple):
    """A stop inside a block: at a tile or, in a backward, behind tiles (no units). The schedule
    serves the smallest stop first."""

    is_backward: bool
    order: float
    units: tuple[int, ...]


@dataclass(eq=False, slots=True)
class BlockInput:
    """A tensor argument that needs a gradient: its saved value, and the destination of the
    gradient."""

    value: Any  # The result of `ActivationStore.save`.
    edge: GradientEdge
    restored: torch.Tensor | None = None  # While the block's backward runs.


@dataclass(eq=False, slots=True)
class BlockCall:
    """One forward of one block in one fiber, with everything that repeats it."""

    block: RunningBlock
    # The flattened (args, kwargs); an `BlockInput` for a tensor that needs a gradient.
    leaves: list[Any]
    tree: Any
    modes: Modes
    attributes: Attributes  # Of the micro-batch, see `ModuleState`.
    random: list[Any]
    captured: tuple[str, ...]  # See `CapturedTensors.keys`.
    first_node: int  # What autograd numbers the first node of the forward in this thread.
    number: int = -1  # Counts the calls of the micro-batch.
    # Indexes of the flattened outputs that need a gradient.
    which: list[int] = field(default_factory=list)
    gradients: EdgeGradients = field(default_factory=lambda: EdgeGradients(0))
    experts: list[SuspendedExperts] = field(default_factory=list)
    # What the forward has changed: the attributes of modules, and their other state.
    before: tuple[Attributes, list[Changeable]] = field(default_factory=lambda: ({}, []))
    checksums: list[torch.Tensor | None] = field(default_factory=list)  # Of the outputs.

    def inputs(self) -> Iterator[BlockInput]:
        """Yields every input once."""
        return iter(
            {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, BlockInput)}.values()
        )


class EdgeGradients:
    """The gradients that arrive at the tensors of a boundary, as autograd passes them: the `.grad`
    of a leaf would have the strides of the leaf, and other strides make other roundings."""

    def __init__(self, count: int) -> None:
        self.sums: list[torch.Tensor | None] = [None] * count

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Adds a gradient of the tensor with this index."""
        before = self.sums[index]
        self.sums[index] = gradient if before is None else before + gradient


class Boundary(torch.autograd.Function):
    """Tensors at the exit of a block, or at the entry of a repeated one. The backward ends here."""

    @staticmethod
    @override
    def forward(
        ctx: Any, gradients: EdgeGradients, anchor: torch.Tensor, values: list[torch.Tensor]
    ) -> Any:
        ctx.edge_gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                ctx.edge_gradients.add(index, gradient)
        return None, None, None


def versions_of(leaves: Sequence[Any]) -> list[int | None]:
    """Returns what counts the changes of each activation."""
    return [version_of(leaf) for leaf in leaves if is_activation(leaf)]


def is_activation(leaf: Any) -> bool:
    """Whether the leaf is an activation, as opposed to a parameter or no tensor at all."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, (nn.Parameter, Handle))


def refuse_hidden(block: RunningBlock, output: Any, leaves: list[Any]) -> None:
    """Refuses an output with a tensor that pytree does not find."""
    seen = {id(leaf) for leaf in leaves}
    for tensor in tensors_in(output):
        if tensor.requires_grad and id(tensor) not in seen:
            raise UnsupportedError(
                f"{block.hooked.name} returns a tensor inside an object that "
                "torch.utils._pytree does not know; register the class there, or accumulate "
                "by several backward() calls"
            )


def refuse_side_channels(block: RunningBlock, first: int, outputs: list[torch.Tensor]) -> None:
    """Refuses a tensor that leads into the dropped graph of a block."""

    def refuse(gradients: Any) -> None:
        raise UnsupportedError(
            f"a tensor computed inside {block.hooked.name} reaches the loss by another way "
            "than its outputs (an auxiliary loss, such as that of a router); leave it out, or "
            "accumulate micro-batches by several backward() calls"
        )

    nodes = nodes_since(first, outputs)
    for node in (*nodes.inner, *nodes.exits):
        node.register_prehook(refuse)


def refuse_interleaved(call: BlockCall, called: list[RunningBlock], *, stops: bool) -> None:
    """Refuses state that a block has changed where micro-batches do not pass the block one after
    the other. called: the blocks that the micro-batch has called. `stops`: they stop inside it."""
    (attributes, cells), block = call.before, call.block
    shared = next((name for owner, name in attributes if block.state.passes_by(owner)), None)
    names = (*(cell.what() for cell in cells[:1]), *(name for _, name in attributes))
    block.changes = shared or block.changes or next(iter(names), None)
    if block.changes is None:
        return
    if any(isinstance(cell.owner, nn.Parameter) for cell in cells):
        how = "its forward runs twice"
    elif shared is not None:
        how = "a module has it that is not of this block alone"
    elif stops:
        how = "micro-batches stop inside it, at its tiles"
    elif called.count(block) > 1:
        how = "a micro-batch calls it more than once"
    else:
        return
    raise UnsupportedError(
        f"{block.hooked.name} changes {block.changes}, and {how}, so the changes would come in "
        "another order than in plain accumulation; accumulate micro-batches by several backward() "
        "calls instead"
    )
