"""Many micro-batches through one block before the next block: `accumulate`.

Plain accumulation runs forward and backward of one micro-batch after the other and so fetches every
weight once per micro-batch and direction. Here every micro-batch is a *strand*: the unmodified
model's forward, in a thread of its own, of which one runs at a time. A strand stops where it comes
to a block. When all have come, the block's units are held once and each strand runs through it, to
its end. From there it goes on when the block is not held any more.

Note [Cuts]
  A block's own graph is dropped as soon as its forward is over, and its outputs are given a single
  node, the *cut*. What a strand computes between blocks (embedding, residuals, head, loss) keeps
  its graph, which therefore ends at cuts. The backward of a strand's tail runs when its loss is
  there, so that no two micro-batches have logits at once. Then the blocks are gone through in
  reverse: a block is held once, and for each strand, in order, its forward is repeated from the
  inputs that were put aside, with the random numbers of the first time, and its backward run.

Note [Same sums]
  Within one strand gradients meet in the order of plain autograd: what flows into a cut is passed
  on only when all uses of its outputs have been seen, by one call into autograd. A parameter's
  gradients are added in the order of the strands. So the sums are those of plain accumulation, bit
  for bit, but for a parameter with several uses in one micro-batch (tied weights, shared
  blocks): plain autograd adds the uses first, here they are added as they come.

Note [Random numbers]
  Each strand draws from a generator state of its own; the first goes on from the caller's. So
  results do not depend on where state lives or on what is prefetched, but dropout differs from that
  of plain accumulation when there is more than one strand.

Note [Turns at tiles]
  A block with tiles (`modules/tiling/split.py`) is more than is fetched at once. So strands stop
  in it as
  well, wherever they come to a tile, and one fetch of the tile serves all of them. In the backward
  the repetitions of a block's forward, and their backward, are strands again, which stop at tiles
  on both ways. Inside a block a strand keeps the block's activations: no more than
  `tile_micro_batches` micro-batches are inside at once, in order; which changes no bit.

Note [Threads]
  On an accelerator autograd's own thread runs the nodes of all backwards, and none of them may be
  suspended there. A repetition that is a strand runs its backward in its own thread instead.

Source of the order: Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a
New Execution Algorithm", 2020, section 3 (layer-to-layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.fiber import Fiber, Modes, Random
from infinity.modules.handle import Handle
from infinity.modules.hooks import HookedModule, ModuleHooks, nodes_since
from infinity.modules.outputs import detach_from_parameters, tensors_in
from infinity.modules.tiling.layers import Tiled
from infinity.modules.uses import UnitUses
from infinity.streaming.activations import InputStore
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward

# Calls whose inputs are brought back ahead of the one that runs.
_RESTORED_AHEAD = 2

# Where a strand stops behind a block.
_THROUGH = object()

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


@dataclass(eq=False, slots=True)
class _RunningBlock:
    """A site that strands stop at."""

    hooked: HookedModule
    forward: Callable[..., Any]
    has_tiles: bool
    order: int = -1  # When a strand came here first.


class _TileStop(NamedTuple):
    """Where strands stop inside of a block: a tile, or in a backward what is behind one (no units).
    The smallest is gone through first."""

    is_backward: bool
    order: float
    units: tuple[int, ...]


class _Suspended(Fiber):
    """A strand with random numbers of its own."""

    at: _RunningBlock | _TileStop | object | None
    random: list[torch.Tensor]
    is_inside = False  # A block.
    behind_tiles: Node | None = None  # The last node it stopped at that follows tiles.


class _MicroBatch(_Suspended):
    """A strand, and what of its forward waits for the backward."""

    def __init__(
        self, number: int, forward: Callable[[], torch.Tensor], device: torch.device
    ) -> None:
        super().__init__(number, forward, device)
        self.calls: list[_Call] = []  # Not gone through in the backward yet.
        # Gradients on their way out of blocks, by where they go.
        self.pending: dict[tuple[Node, int], tuple[_Input, torch.Tensor]] = {}
        self.behind: dict[Node, frozenset[_Call]] = {}

    def abandon(self) -> None:
        super().abandon()
        self.calls.clear()
        self.pending.clear()
        self.behind.clear()


# -- Cuts ------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Input:
    """A tensor argument that gradients flow to: its value, and where its gradient goes."""

    value: Any  # What `save` of the activations gave.
    edge: GradientEdge
    reaches: frozenset[_Call]

    @property
    def key(self) -> tuple[Node, int]:
        return self.edge.node, self.edge.output_nr


@dataclass(eq=False, slots=True)
class _Call:
    """One forward of one block in one strand: enough to repeat it."""

    block: _RunningBlock
    leaves: list[Any]  # Of (args, kwargs), flattened; `_Input` where a gradient flows.
    tree: Any
    modes: Modes
    random: list[torch.Tensor]
    which: list[int] = field(default_factory=list)  # Outputs with a gradient, flattened.
    gradients: list[torch.Tensor | None] = field(default_factory=list)

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                before = self.gradients[index]
                self.gradients[index] = gradient if before is None else before + gradient

    def inputs(self) -> Iterator[_Input]:
        """Each once."""
        return iter({id(leaf): leaf for leaf in self.leaves if isinstance(leaf, _Input)}.values())


class _Boundary(torch.autograd.Function):
    """Outputs whose backward hands the gradients to the call they came from."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor, values: list[torch.Tensor]) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.call.take(gradients)
        return None, None, None


def _calls_behind(node: Node, known: dict[Node, frozenset[_Call]]) -> frozenset[_Call]:
    """The calls whose cuts a gradient that enters the graph at `node` can reach."""
    found = known.get(node)
    if found is None:
        calls: set[_Call] = set()
        seen, waiting = {node}, [node]
        while waiting:
            here = waiting.pop()
            call = getattr(here, "call", None)
            if isinstance(call, _Call):
                calls.add(call)
                continue
            fresh = {behind for behind, _ in here.next_functions if behind is not None} - seen
            seen |= fresh
            waiting.extend(fresh)
        found = known[node] = frozenset(calls)
    return found


_T = TypeVar("_T")
_S = TypeVar("_S", bound=_Suspended)


class LayerMajorSchedule:
    """Runs the strands of one `accumulate` through the blocks, and back."""

    def __init__(
        self,
        model: nn.Module,
        uses: UnitUses,
        hooks: Sequence[tuple[HookedModule, ModuleHooks]],
        activations: InputStore,
        device: torch.device,
        tile_micro_batches: int,
    ) -> None:
        self._model = model
        self._uses = uses
        self._hooks = [hook for _, hook in hooks]
        self._blocks = [
            _RunningBlock(hooked, hooked.module.forward, _has_tiles(hooked.module))
            for hooked, _ in hooks
        ]
        self._tile_micro_batches = tile_micro_batches
        self._activations = activations
        self._device = device
        self._random = Random(device)
        self._running: _Suspended | None = None
        self._num_seen = 0
        self._tiles: dict[tuple[int, ...], int] = {}  # In the order in which they are come to.
        # Something that requires a gradient, for cuts to hang on.
        self._anchor = torch.zeros((), requires_grad=True)

    def run(
        self, forwards: Sequence[Callable[[], torch.Tensor]], when_back: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Forward and backward of every micro-batch; their losses, detached.

        `when_back` is called between the two.
        """
        fibers: list[_MicroBatch] = []
        try:
            with self._in_charge():
                for number, forward in enumerate(forwards):
                    fibers.append(_MicroBatch(number, forward, self._device))
                for fiber in fibers[1:]:
                    fiber.random = self._random.fresh()
                if fibers:
                    fibers[0].random = self._random.state()
                losses = self._go_forward(fibers)
                when_back()
                self._go_backward(fibers)
                return losses
        finally:
            for fiber in fibers:
                fiber.abandon()
            self._activations.clear()

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        """Blocks run through here, and hold nothing by themselves."""
        own: list[bool] = []
        # Keys and values for generation: repeated forwards would add to them. transformers leaves
        # them out as well where it checkpoints activations.
        caching = [c for c in _configs_of(self._model) if c.use_cache]
        for config in caching:
            config.use_cache = False
        for block, hooks in zip(self._blocks, self._hooks, strict=True):
            hooks.is_suspended = True
            module = block.hooked.module
            own.append("forward" in module.__dict__)
            module.forward = self._forward_of(block)
        if self._tile_micro_batches > 1:
            self._uses.on_tile = self._yield_at_tile
        try:
            yield
        finally:
            self._uses.on_tile = None
            for config in caching:
                config.use_cache = True
            for block, hooks, is_own in zip(self._blocks, self._hooks, own, strict=True):
                hooks.is_suspended = False
                if is_own:
                    block.hooked.module.forward = block.forward
                else:
                    del block.hooked.module.__dict__["forward"]

    # -- Forward -----------------------------------------------------------------------------------

    def _go_forward(self, fibers: list[_MicroBatch]) -> list[torch.Tensor]:
        losses: dict[int, torch.Tensor] = {}
        for fiber in fibers:
            self._run_on(fiber, losses)
        while blocks := [s.at for s in fibers if isinstance(s.at, _RunningBlock)]:
            # The block that was met first: strands that left some out wait for the others.
            block = min(blocks, key=lambda at: at.order)
            here = [fiber for fiber in fibers if fiber.at is block]
            with self._using(block.hooked.units):
                for collective_section in self._groups(here):
                    self._run_by_tiles(collective_section, losses)
            # But for those that are at another block, inside of this one.
            self._run_by_tiles([fiber for fiber in here if fiber.at is _THROUGH], losses)
        return [losses[fiber.number] for fiber in fibers]

    def _run_by_tiles(self, fibers: Sequence[_MicroBatch], losses: dict[int, torch.Tensor]) -> None:
        """To the next stop of each that is no tile."""
        for fiber in fibers:
            self._run_on(fiber, losses)
        for turn, here in self._tile_stops(fibers):
            with self._using(turn.units):
                for fiber in here:
                    self._run_on(fiber, losses)

    @contextmanager
    def _using(self, units: Sequence[int]) -> Iterator[None]:
        self._uses.enter(list(units))
        try:
            yield
        finally:
            self._uses.leave(list(units))

    def _groups(self, every: list[_T]) -> list[list[_T]]:
        """Those that may be inside a block at once."""
        count = self._tile_micro_batches
        return [every[start : start + count] for start in range(0, len(every), count)]

    def _tile_stops(self, fibers: Sequence[_S]) -> Iterator[tuple[_TileStop, list[_S]]]:
        """The tiles that strands are at, until none is at one: the caller runs those that it gets
        to their next stop."""
        while on_tile := [s.at for s in fibers if isinstance(s.at, _TileStop)]:
            turn = min(on_tile)
            yield turn, [fiber for fiber in fibers if fiber.at == turn]

    def _yield_at_tile(self, units: list[int], is_over: bool) -> None:
        """In the strand: at a tile inside a block, before it is held, or behind it in a backward.

        What is behind comes only when all strands have given the tile its gradients, so that these
        leave before the block's own come: in little memory there is not room for both.
        """
        fiber = self._running
        if fiber is None or not fiber.is_inside:
            return
        key = tuple(units)
        order = self._tiles.setdefault(key, len(self._tiles))
        is_backward = current_backward() != OUTSIDE_BACKWARD
        if is_over:
            node = torch._C._current_autograd_node()
            if fiber.behind_tiles is not node:  # Of several tiles of a layer, once.
                fiber.behind_tiles = node
                fiber.pause_at(_TileStop(True, 0.5 - order, ()))
        else:
            fiber.pause_at(_TileStop(is_backward, -order if is_backward else order, key))

    def _resume(self, fiber: _Suspended) -> None:
        """The strand runs to its next stop, or to its end."""
        self._running = fiber
        try:
            fiber.run_on()
        finally:
            self._running = None

    def _run_on(self, fiber: _MicroBatch, losses: dict[int, torch.Tensor]) -> None:
        with self._random_of(fiber):
            self._resume(fiber)
            at, loss = fiber.at, fiber.loss
            if isinstance(at, _RunningBlock):
                if at.order < 0:
                    at.order, self._num_seen = self._num_seen, self._num_seen + 1
            elif loss is not None:
                fiber.loss = None
                losses[fiber.number] = loss.detach()
                # The graph between blocks may be shared with what other uses of it still need.
                loss.backward(retain_graph=True)

    @contextmanager
    def _random_of(self, fiber: _Suspended) -> Iterator[None]:
        """The strand draws from its own numbers; the first micro-batch's are the caller's."""
        kept = self._random.state()
        self._random.set(fiber.random)
        is_caller_s = isinstance(fiber, _MicroBatch) and fiber.number == 0
        try:
            yield
        finally:
            fiber.random = self._random.state()
            self._random.set(fiber.random if is_caller_s else kept)

    def _forward_of(self, block: _RunningBlock) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            fiber = self._running
            assert isinstance(fiber, _MicroBatch), f"{block.hooked.name} runs outside of a strand"
            for name in _CACHES:
                if kwargs.get(name) is not None:
                    raise UnsupportedError(
                        f"{block.hooked.name} is given {name}, which its repeated forward would "
                        "change again; set use_cache=False for training"
                    )
            fiber.pause_at(block)
            output = self._call(fiber, block, args, kwargs)
            fiber.pause_at(_THROUGH)
            return output

        return forward

    def _call(
        self,
        fiber: _MicroBatch,
        block: _RunningBlock,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """In the strand: the block's forward, its graph dropped and its inputs put aside."""
        call = _Call(block, *tree_flatten((args, kwargs)), Modes.now(self._device), [])
        call.random = self._random.state()
        versions = [leaf._version for leaf in call.leaves if _is_plain(leaf)]
        first = torch.autograd._get_sequence_nr()
        was_inside, fiber.is_inside = fiber.is_inside, True
        output = block.forward(*args, **kwargs)
        fiber.is_inside = was_inside
        if versions != [leaf._version for leaf in call.leaves if _is_plain(leaf)]:
            raise UnsupportedError(
                f"{block.hooked.name} changes an argument in place, so its forward cannot be "
                "repeated; accumulate micro-batches by several backward() calls instead"
            )
        output = detach_from_parameters(output, self._uses.is_parameter_memory)
        leaves, tree = tree_flatten(output)
        self._refuse_hidden(block, output, leaves)
        call.which = [i for i, leaf in enumerate(leaves) if _is_plain(leaf) and leaf.requires_grad]
        if not call.which:
            return output
        self._refuse_side_channels(block, first, [leaves[index] for index in call.which])
        call.gradients = [None] * len(call.which)
        inputs: dict[tuple[Node, int], _Input] = {}  # A tensor may be given twice.
        for index, leaf in enumerate(call.leaves):
            if _is_plain(leaf) and leaf.requires_grad:
                edge = get_gradient_edge(leaf)
                key = edge.node, edge.output_nr
                if key not in inputs:
                    reaches = _calls_behind(edge.node, fiber.behind)
                    inputs[key] = _Input(self._activations.save(leaf), edge, reaches)
                call.leaves[index] = inputs[key]
        values = [leaves[index].data for index in call.which]
        cuts = _Boundary.apply(call, self._anchor, values)  # type: ignore[no-untyped-call]
        for index, cut in zip(call.which, cuts, strict=True):
            leaves[index] = cut
        fiber.calls.append(call)
        return tree_unflatten(leaves, tree)

    def _refuse_hidden(self, block: _RunningBlock, output: Any, leaves: list[Any]) -> None:
        seen = {id(leaf) for leaf in leaves}
        for tensor in tensors_in(output):
            if tensor.requires_grad and id(tensor) not in seen:
                raise UnsupportedError(
                    f"{block.hooked.name} returns a tensor inside an object that "
                    "torch.utils._pytree does not know; register the class there, or accumulate "
                    "by several backward() calls"
                )

    def _refuse_side_channels(
        self, block: _RunningBlock, first: int, outputs: list[torch.Tensor]
    ) -> None:
        """The graph inside a block is gone; a tensor that was put aside there leads into it."""

        def refuse(gradients: Any) -> None:
            raise UnsupportedError(
                f"a tensor computed inside {block.hooked.name} reaches the loss otherwise than by "
                "its outputs (an auxiliary loss, such as of a router); leave it out, or "
                "accumulate micro-batches by several backward() calls"
            )

        for nodes in nodes_since(first, outputs):
            for node in nodes:
                node.register_prehook(refuse)

    # -- Backward ----------------------------------------------------------------------------------

    def _go_backward(self, fibers: list[_MicroBatch]) -> None:
        while waiting := [fiber for fiber in fibers if fiber.calls]:
            block = max((s.calls[-1].block for s in waiting), key=lambda at: at.order)
            here = [fiber for fiber in waiting if fiber.calls[-1].block is block]
            for fiber in here:
                self._flush(fiber, fiber.calls[-1])
            calls = [(fiber, fiber.calls.pop()) for fiber in here]
            calls = [pair for pair in calls if any(g is not None for g in pair[1].gradients)]
            if not calls:
                continue
            units = set(block.hooked.units)
            with self._using(block.hooked.units):
                self._uses.begin_block_backward(block.hooked.units)
                if block.has_tiles and self._tile_micro_batches > 1:
                    units |= self._repeat_by_tiles(calls)
                else:
                    for index in range(len(calls)):
                        self._repeat(calls, index)
                for fiber in waiting:  # What comes next, while the gradients leave.
                    first = next(fiber.calls[-1].inputs(), None) if fiber.calls else None
                    if first is not None:
                        self._activations.fetch(first.value)
            self._uses.end_of_block(list(units))
        for fiber in fibers:
            self._flush(fiber, None)

    def _flush(self, fiber: _MicroBatch, call: _Call | None) -> None:
        """Passes gradients on: those that the call waits for, or all."""
        due = [
            key for key, (each, _) in fiber.pending.items() if call is None or call in each.reaches
        ]
        if due:
            pairs = [fiber.pending.pop(key) for key in due]
            edges = [each.edge for each, _ in pairs]
            torch.autograd.backward(edges, [gradient for _, gradient in pairs], retain_graph=True)

    def _repeat_by_tiles(self, calls: list[tuple[_MicroBatch, _Call]]) -> set[int]:
        """Repeats a block with tiles, each of which is held once for all that are inside. Returns
        the tiles' units to whose gradients not all came in one turn."""
        left: set[int] = set()
        for indexes in self._groups(list(range(len(calls)))):
            fibers = []
            try:
                for index in indexes:
                    fiber = _Suspended(index, partial(self._repeat, calls, index), self._device)
                    fiber.random, fiber.is_inside = calls[index][1].random, True
                    fibers.append(fiber)
                for fiber in fibers:
                    with self._random_of(fiber):
                        self._resume(fiber)
                for turn, here in self._tile_stops(fibers):
                    # Those of all micro-batches: the gradients are complete after this turn.
                    is_whole = turn.is_backward and len(here) == len(calls)
                    units = list(turn.units)
                    with self._using(units):
                        if is_whole:
                            self._uses.begin_block_backward(units)
                        for fiber in here:
                            with self._random_of(fiber):
                                self._resume(fiber)
                    if is_whole:
                        self._uses.end_of_block(units)
                    elif turn.is_backward:
                        left.update(units)
            finally:
                for fiber in fibers:
                    fiber.abandon()
        return left

    def _repeat(self, calls: list[tuple[_MicroBatch, _Call]], index: int) -> None:
        """The block's forward once more, with a graph, and its backward."""
        for _, ahead in calls[index : index + 1 + _RESTORED_AHEAD]:
            for each in ahead.inputs():
                self._activations.fetch(each.value)
        fiber, call = calls[index]
        copies = {
            each: self._activations.restore(each.value).detach().requires_grad_()
            for each in call.inputs()
        }
        leaves = [copies[leaf] if isinstance(leaf, _Input) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.tree)
        kept = self._random.state()
        self._random.set(call.random)
        try:
            with call.modes.set():
                output = call.block.forward(*args, **kwargs)
        finally:
            self._random.set(kept)
        outputs = tree_flatten(output)[0]
        pairs = [
            (outputs[index], gradient)
            for index, gradient in zip(call.which, call.gradients, strict=True)
            if gradient is not None
        ]
        call.gradients.clear()
        # What later blocks gave to the same tensor goes first into the sum, as in plain autograd.
        for each, copy in copies.items():
            before = fiber.pending.pop(each.key, None)
            if before is not None:
                pairs.append((copy, before[1]))
        # A strand's in its own thread, which may be suspended.
        is_fiber = self._running is not None
        with torch.autograd.set_multithreading_enabled(False) if is_fiber else nullcontext():
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for each, copy in copies.items():
            if copy.grad is not None:
                fiber.pending[each.key] = each, copy.grad


def _has_tiles(block: nn.Module) -> bool:
    return any(isinstance(module, Tiled) for module in block.modules())


def _configs_of(model: nn.Module) -> list[Any]:
    """The configurations of transformers models in it that say whether to keep a cache, each
    once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = [c for c in configs if isinstance(getattr(c, "use_cache", None), bool)]
    return list({id(config): config for config in found}.values())


def _is_plain(leaf: Any) -> bool:
    """An activation, as opposed to a parameter or no tensor at all."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, (nn.Parameter, Handle))
