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
  A block with tiles (`engine/tiling.py`) is more than is fetched at once. So strands stop in it as
  well, wherever they come to a tile, and one fetch of the tile serves all of them. In the backward
  the repetitions of a block's forward, and their backward, are strands again, which stop at tiles
  on both ways. Inside a block a strand keeps the block's activations: no more than `num_inside`
  micro-batches are inside at once, in order; which changes no bit.

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
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from infinity.engine.activations import Activations
from infinity.engine.handles import Handle
from infinity.engine.hooks import (
    OUTSIDE_BACKWARD,
    Site,
    SiteHooks,
    current_backward,
    nodes_since,
)
from infinity.engine.outputs import detach_from_parameters, tensors_in
from infinity.engine.shared_activations import SharedActivations
from infinity.engine.strand import Modes, Random, Strand
from infinity.engine.tiled import Tiled
from infinity.errors import UnsupportedError

# Calls whose inputs are brought back ahead of the one that runs.
_RESTORED_AHEAD = 2

# Where a strand stops behind a block.
_THROUGH = object()

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class Blocks(Protocol):
    """Holds of units, as this module sees them."""

    turns: Callable[[list[int], bool], None] | None  # What `await_turn` of hooks is to do.

    def enter(self, units: list[int]) -> None: ...
    def leave(self, units: list[int]) -> None: ...
    def begin_block_backward(self, units: list[int]) -> None:
        """Every micro-batch will give a gradient to these units."""

    def end_of_block(self, units: list[int]) -> None:
        """The gradients of these units are complete: they go to where they rest."""

    def is_parameter_memory(self, tensor: torch.Tensor) -> bool: ...


@dataclass(eq=False, slots=True)
class _Block:
    """A site that strands stop at."""

    site: Site
    forward: Callable[..., Any]
    has_tiles: bool
    order: int = -1  # When a strand came here first.


class _Turn(NamedTuple):
    """Where strands stop inside of a block: a tile, or in a backward what is behind one (no units).
    The smallest is gone through first."""

    is_backward: bool
    order: float
    units: tuple[int, ...]


class _Suspended(Strand):
    """A strand with random numbers of its own."""

    at: _Block | _Turn | object | None
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

    value: Any  # What `park` of the activations gave.
    edge: GradientEdge
    reaches: frozenset[_Call]

    @property
    def key(self) -> tuple[Node, int]:
        return self.edge.node, self.edge.output_nr


@dataclass(eq=False, slots=True)
class _Call:
    """One forward of one block in one strand: enough to repeat it."""

    block: _Block
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


class _Cut(torch.autograd.Function):
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


class Conductor:
    """Runs the strands of one `accumulate` through the blocks, and back."""

    def __init__(
        self,
        model: nn.Module,
        holds: Blocks,
        hooks: Sequence[tuple[Site, SiteHooks]],
        activations: Activations | SharedActivations,
        device: torch.device,
        num_inside: int,
    ) -> None:
        self._model = model
        self._holds = holds
        self._hooks = [hook for _, hook in hooks]
        self._blocks = [
            _Block(site, site.module.forward, _has_tiles(site.module)) for site, _ in hooks
        ]
        self._num_inside = num_inside
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
        strands: list[_MicroBatch] = []
        try:
            with self._in_charge():
                for number, forward in enumerate(forwards):
                    strands.append(_MicroBatch(number, forward, self._device))
                for strand in strands[1:]:
                    strand.random = self._random.fresh()
                if strands:
                    strands[0].random = self._random.state()
                losses = self._go_forward(strands)
                when_back()
                self._go_backward(strands)
                return losses
        finally:
            for strand in strands:
                strand.abandon()
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
            module = block.site.module
            own.append("forward" in module.__dict__)
            module.forward = self._forward_of(block)  # type: ignore[method-assign]
        if self._num_inside > 1:
            self._holds.turns = self._await_turn
        try:
            yield
        finally:
            self._holds.turns = None
            for config in caching:
                config.use_cache = True
            for block, hooks, is_own in zip(self._blocks, self._hooks, own, strict=True):
                hooks.is_suspended = False
                if is_own:
                    block.site.module.forward = block.forward  # type: ignore[method-assign]
                else:
                    del block.site.module.__dict__["forward"]

    # -- Forward -----------------------------------------------------------------------------------

    def _go_forward(self, strands: list[_MicroBatch]) -> list[torch.Tensor]:
        losses: dict[int, torch.Tensor] = {}
        for strand in strands:
            self._run_on(strand, losses)
        while blocks := [s.at for s in strands if isinstance(s.at, _Block)]:
            # The block that was met first: strands that left some out wait for the others.
            block = min(blocks, key=lambda at: at.order)
            here = [strand for strand in strands if strand.at is block]
            with self._holding(block.site.units):
                for together in self._groups(here):
                    self._run_by_turns(together, losses)
            # But for those that are at another block, inside of this one.
            self._run_by_turns([strand for strand in here if strand.at is _THROUGH], losses)
        return [losses[strand.number] for strand in strands]

    def _run_by_turns(
        self, strands: Sequence[_MicroBatch], losses: dict[int, torch.Tensor]
    ) -> None:
        """To the next stop of each that is no tile."""
        for strand in strands:
            self._run_on(strand, losses)
        for turn, here in self._turns(strands):
            with self._holding(turn.units):
                for strand in here:
                    self._run_on(strand, losses)

    @contextmanager
    def _holding(self, units: Sequence[int]) -> Iterator[None]:
        self._holds.enter(list(units))
        try:
            yield
        finally:
            self._holds.leave(list(units))

    def _groups(self, every: list[_T]) -> list[list[_T]]:
        """Those that may be inside a block at once."""
        count = self._num_inside
        return [every[start : start + count] for start in range(0, len(every), count)]

    def _turns(self, strands: Sequence[_S]) -> Iterator[tuple[_Turn, list[_S]]]:
        """The tiles that strands are at, until none is at one: the caller runs those that it gets
        to their next stop."""
        while turns := [s.at for s in strands if isinstance(s.at, _Turn)]:
            turn = min(turns)
            yield turn, [strand for strand in strands if strand.at == turn]

    def _await_turn(self, units: list[int], is_over: bool) -> None:
        """In the strand: at a tile inside a block, before it is held, or behind it in a backward.

        What is behind comes only when all strands have given the tile its gradients, so that these
        leave before the block's own come: in little memory there is not room for both.
        """
        strand = self._running
        if strand is None or not strand.is_inside:
            return
        key = tuple(units)
        order = self._tiles.setdefault(key, len(self._tiles))
        is_backward = current_backward() != OUTSIDE_BACKWARD
        if is_over:
            node = torch._C._current_autograd_node()
            if strand.behind_tiles is not node:  # Of several tiles of a layer, once.
                strand.behind_tiles = node
                strand.pause_at(_Turn(True, 0.5 - order, ()))
        else:
            strand.pause_at(_Turn(is_backward, -order if is_backward else order, key))

    def _resume(self, strand: _Suspended) -> None:
        """The strand runs to its next stop, or to its end."""
        self._running = strand
        try:
            strand.run_on()
        finally:
            self._running = None

    def _run_on(self, strand: _MicroBatch, losses: dict[int, torch.Tensor]) -> None:
        with self._random_of(strand):
            self._resume(strand)
            at, loss = strand.at, strand.loss
            if isinstance(at, _Block):
                if at.order < 0:
                    at.order, self._num_seen = self._num_seen, self._num_seen + 1
            elif loss is not None:
                strand.loss = None
                losses[strand.number] = loss.detach()
                # The graph between blocks may be shared with what other uses of it still need.
                loss.backward(retain_graph=True)

    @contextmanager
    def _random_of(self, strand: _Suspended) -> Iterator[None]:
        """The strand draws from its own numbers; the first micro-batch's are the caller's."""
        kept = self._random.state()
        self._random.set(strand.random)
        is_caller_s = isinstance(strand, _MicroBatch) and strand.number == 0
        try:
            yield
        finally:
            strand.random = self._random.state()
            self._random.set(strand.random if is_caller_s else kept)

    def _forward_of(self, block: _Block) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            strand = self._running
            assert isinstance(strand, _MicroBatch), f"{block.site.name} runs outside of a strand"
            for name in _CACHES:
                if kwargs.get(name) is not None:
                    raise UnsupportedError(
                        f"{block.site.name} is given {name}, which its repeated forward would "
                        "change again; set use_cache=False for training"
                    )
            strand.pause_at(block)
            output = self._call(strand, block, args, kwargs)
            strand.pause_at(_THROUGH)
            return output

        return forward

    def _call(
        self, strand: _MicroBatch, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In the strand: the block's forward, its graph dropped and its inputs put aside."""
        call = _Call(block, *tree_flatten((args, kwargs)), Modes.now(self._device), [])
        call.random = self._random.state()
        versions = [leaf._version for leaf in call.leaves if _is_plain(leaf)]
        first = torch.autograd._get_sequence_nr()
        was_inside, strand.is_inside = strand.is_inside, True
        output = block.forward(*args, **kwargs)
        strand.is_inside = was_inside
        if versions != [leaf._version for leaf in call.leaves if _is_plain(leaf)]:
            raise UnsupportedError(
                f"{block.site.name} changes an argument in place, so its forward cannot be "
                "repeated; accumulate micro-batches by several backward() calls instead"
            )
        output = detach_from_parameters(output, self._holds.is_parameter_memory)
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
                    reaches = _calls_behind(edge.node, strand.behind)
                    inputs[key] = _Input(self._activations.park(leaf), edge, reaches)
                call.leaves[index] = inputs[key]
        values = [leaves[index].data for index in call.which]
        cuts = _Cut.apply(call, self._anchor, values)  # type: ignore[no-untyped-call]
        for index, cut in zip(call.which, cuts, strict=True):
            leaves[index] = cut
        strand.calls.append(call)
        return tree_unflatten(leaves, tree)

    def _refuse_hidden(self, block: _Block, output: Any, leaves: list[Any]) -> None:
        seen = {id(leaf) for leaf in leaves}
        for tensor in tensors_in(output):
            if tensor.requires_grad and id(tensor) not in seen:
                raise UnsupportedError(
                    f"{block.site.name} returns a tensor inside an object that "
                    "torch.utils._pytree does not know; register the class there, or accumulate "
                    "by several backward() calls"
                )

    def _refuse_side_channels(self, block: _Block, first: int, outputs: list[torch.Tensor]) -> None:
        """The graph inside a block is gone; a tensor that was put aside there leads into it."""

        def refuse(gradients: Any) -> None:
            raise UnsupportedError(
                f"a tensor computed inside {block.site.name} reaches the loss otherwise than by "
                "its outputs (an auxiliary loss, such as of a router); leave it out, or "
                "accumulate micro-batches by several backward() calls"
            )

        for nodes in nodes_since(first, outputs):
            for node in nodes:
                node.register_prehook(refuse)

    # -- Backward ----------------------------------------------------------------------------------

    def _go_backward(self, strands: list[_MicroBatch]) -> None:
        while waiting := [strand for strand in strands if strand.calls]:
            block = max((s.calls[-1].block for s in waiting), key=lambda at: at.order)
            here = [strand for strand in waiting if strand.calls[-1].block is block]
            for strand in here:
                self._flush(strand, strand.calls[-1])
            calls = [(strand, strand.calls.pop()) for strand in here]
            calls = [pair for pair in calls if any(g is not None for g in pair[1].gradients)]
            if not calls:
                continue
            units = set(block.site.units)
            with self._holding(block.site.units):
                self._holds.begin_block_backward(block.site.units)
                if block.has_tiles and self._num_inside > 1:
                    units |= self._repeat_by_turns(calls)
                else:
                    for index in range(len(calls)):
                        self._repeat(calls, index)
                for strand in waiting:  # What comes next, while the gradients leave.
                    first = next(strand.calls[-1].inputs(), None) if strand.calls else None
                    if first is not None:
                        self._activations.fetch(first.value)
            self._holds.end_of_block(list(units))
        for strand in strands:
            self._flush(strand, None)

    def _flush(self, strand: _MicroBatch, call: _Call | None) -> None:
        """Passes gradients on: those that the call waits for, or all."""
        due = [
            key for key, (each, _) in strand.pending.items() if call is None or call in each.reaches
        ]
        if due:
            pairs = [strand.pending.pop(key) for key in due]
            edges = [each.edge for each, _ in pairs]
            torch.autograd.backward(edges, [gradient for _, gradient in pairs], retain_graph=True)

    def _repeat_by_turns(self, calls: list[tuple[_MicroBatch, _Call]]) -> set[int]:
        """Repeats a block with tiles, each of which is held once for all that are inside. Returns
        the tiles' units to whose gradients not all came in one turn."""
        left: set[int] = set()
        for indexes in self._groups(list(range(len(calls)))):
            strands = []
            try:
                for index in indexes:
                    strand = _Suspended(index, partial(self._repeat, calls, index), self._device)
                    strand.random, strand.is_inside = calls[index][1].random, True
                    strands.append(strand)
                for strand in strands:
                    with self._random_of(strand):
                        self._resume(strand)
                for turn, here in self._turns(strands):
                    # Those of all micro-batches: the gradients are complete after this turn.
                    is_whole = turn.is_backward and len(here) == len(calls)
                    units = list(turn.units)
                    with self._holding(units):
                        if is_whole:
                            self._holds.begin_block_backward(units)
                        for strand in here:
                            with self._random_of(strand):
                                self._resume(strand)
                    if is_whole:
                        self._holds.end_of_block(units)
                    elif turn.is_backward:
                        left.update(units)
            finally:
                for strand in strands:
                    strand.abandon()
        return left

    def _repeat(self, calls: list[tuple[_MicroBatch, _Call]], index: int) -> None:
        """The block's forward once more, with a graph, and its backward."""
        for _, ahead in calls[index : index + 1 + _RESTORED_AHEAD]:
            for each in ahead.inputs():
                self._activations.fetch(each.value)
        strand, call = calls[index]
        copies = {
            each: self._activations.take(each.value).detach().requires_grad_()
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
            before = strand.pending.pop(each.key, None)
            if before is not None:
                pairs.append((copy, before[1]))
        # A strand's in its own thread, which may be suspended.
        is_strand = self._running is not None
        with torch.autograd.set_multithreading_enabled(False) if is_strand else nullcontext():
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for each, copy in copies.items():
            if copy.grad is not None:
                strand.pending[each.key] = each, copy.grad


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
