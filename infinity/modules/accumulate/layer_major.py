"""The layer-major schedule: all micro-batches pass a block before the next block is fetched.

Plain accumulation runs forward and backward of one micro-batch after the other, and so fetches
every weight once per micro-batch and direction. The layer-major schedule runs every micro-batch as
a *fiber*: the forward of the unmodified model, in a thread of its own, one fiber at a time. A fiber
stops where it reaches a block. When all fibers have reached the block, the schedule acquires the
block's units once, and every fiber runs through the block to its end. The fibers continue behind
the block after its units are released.

Note [Boundaries]
  The graph of a block is dropped as soon as its forward is over. The outputs of the block get a
  single node, the *boundary*. The graph that a fiber makes between blocks (embedding, residuals,
  head, loss) is kept and ends at boundaries. The backward of a fiber's tail runs as soon as its
  loss exists, so that only one micro-batch has logits at a time. Then the schedule visits the
  blocks in reverse. It acquires a block once. For each fiber, in order, it repeats the block's
  forward from the saved inputs, with the random numbers of the first forward, and runs its
  backward.

Note [Same sums]
  Within a fiber, gradients are summed in the order of plain autograd (`between.py`). The gradients
  of a parameter are added in the order of the fibers. The sums therefore have the bits of plain
  accumulation. One exception: if a parameter has several uses in one micro-batch (tied weights,
  shared blocks), plain autograd adds the uses first, and this schedule adds them in the order of
  arrival.

Note [Forwards alone]
  A call without gradients passes the blocks with the others and leaves no records, so the backward
  does not meet it. Where all calls are such, the schedule ends behind the last block.

Note [Random numbers]
  Each fiber draws from its own generator state; the first fiber continues the caller's. Results
  therefore do not depend on placement or prefetching. With more than one fiber, dropout differs
  from that of plain accumulation, in which a micro-batch begins where the one before has ended. A
  model that draws nothing leaves the caller's generator as it was.

Note [State of modules]
  Each fiber has its own attributes of modules, and a repeated forward begins with those of its call
  (`module_state.py`), and with the other state of its block that the first one found
  (`reachable.py`). What it gives is compared (`proof.py`). Calls beside each other in a loss are
  fibers, too (`fiber.py`). Behind each stop the schedule looks at what a program's code can reach,
  and refuses changes that other fibers, or a repeated forward, would see.

Note [Stops at tiles]
  A block with tiles (`modules/tiling/split.py`) is larger than the fetch window. Fibers therefore
  also stop at every tile in the block, and one fetch of the tile serves all of them. In the
  backward, the repeated forward of a block and its backward run as fibers, which stop at tiles in
  both directions. A fiber inside a block keeps the block's activations, so at most
  `tile_micro_batches` fibers are inside a block at the same time. Their order, and so every bit,
  stays the same. At tiled experts all fibers stop together (`experts.py`).

Note [Threads]
  On an accelerator, one autograd thread runs the nodes of all backwards, and none of them may be
  suspended there. A repeated block that runs as a fiber therefore runs its backward in the fiber's
  own thread.

Source of the order: Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a
New Execution Algorithm", 2020, section 3 (layer-to-layer).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.blocks import BlockRuns
from infinity.modules.accumulate.boundary import BlockCall, RunningBlock, TileStop
from infinity.modules.accumulate.experts import ExpertsSchedule
from infinity.modules.accumulate.fiber import Fiber, Random, Records
from infinity.modules.accumulate.module_state import Key, ModuleState
from infinity.modules.accumulate.of_transformers import (
    refuse_caches,
    without_caches_and_checkpointing,
)
from infinity.modules.accumulate.proof import Proof
from infinity.modules.accumulate.purity import BACKWARD_TABLES, foreign_hook, hooks_of, refuse_hook
from infinity.modules.accumulate.reachable import ProgramState
from infinity.modules.autograd.hooks import ModuleHooks
from infinity.modules.autograd.threads import process_flags, set_process_flags
from infinity.modules.autograd.uses import UnitUses
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.modules.tiling.experts_call import ExpertsCall
from infinity.private.torch import current_autograd_node
from infinity.streaming.inputs.activations import InputStore, WaitingMemory
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward

# The stop of a fiber behind a block.
_THROUGH = object()

_T = TypeVar("_T")


@dataclass(slots=True)
class ScheduleParts:
    """The parts that every `forward_backward` of one model needs."""

    inputs: InputStore  # Saved layer inputs, which ranks may divide among themselves.
    results: InputStore  # See `ExpertsSchedule`, as of `waiting`.
    waiting: WaitingMemory
    device: torch.device
    tile_micro_batches: int
    outside_blocks: Sequence[int]  # The units that several blocks, or modules outside, use.
    proof: Proof = field(default_factory=Proof)


class Passenger(NamedTuple):
    """A call that passes the blocks together with others. With `is_graded` it returns a loss, whose
    backward follows; otherwise it runs without gradients, and its result may be anything. It runs
    inside `around()`."""

    call: Callable[[], Any]
    is_graded: bool
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class LayerMajorSchedule:
    """Runs all micro-batches through the blocks, forward and backward. `hooks`: of the blocks."""

    def __init__(
        self, model: nn.Module, uses: UnitUses, hooks: Sequence[ModuleHooks], parts: ScheduleParts
    ) -> None:
        self._model = model
        self._uses = uses
        self._hooks = hooks
        self._blocks = [RunningBlock.of(block.hooked, parts.proof) for block in hooks]
        self._parts = parts
        self._random = Random(parts.device)
        self._attributes = ModuleState(model, on_backward=self._refuse_parts)
        self._experts = ExpertsSchedule(uses, parts.results, parts.waiting, self._stop_at_experts)
        self._at_experts: dict[Fiber, ExpertsCall] = {}
        self._runs = BlockRuns(
            parts.inputs, self._random, self._attributes, parts.proof, self._experts, parts.device,
            uses.param_table.is_parameter_memory, lambda: self._running is not None,
        )  # fmt: skip
        self._running: Fiber | None = None
        # All fibers of the run, in the order in which they pass a block.
        self._fibers: list[Fiber] = []
        self._started: list[Fiber] = []  # Calls beside a loss that have not run yet.
        # Numbers tiles in the order of their first use.
        self._tiles: dict[tuple[int, ...], int] = {}

    def run(self, passengers: Sequence[Passenger], when_back: Callable[[], None]) -> list[Any]:
        """Runs every call forward, and the backward of those that are graded, which come first.
        Returns the detached losses, and the results of the others.

        `when_back` is called between forward and backward. The caller delays signals; they are
        delivered between the micro-batches of a block.
        """
        if (found := foreign_hook(self._attributes.named)) is not None:
            refuse_hook(*found)
        attributes, calls = self._attributes, [passenger.call for passenger in passengers]
        left: dict[Key, Any] = {}  # By the micro-batches, for the code after them.
        try:
            with (
                without_caches_and_checkpointing(self._model),
                self._blocks_suspended(),
                attributes.watched(),
            ):
                proof = self._parts.proof
                proof.begin(len(calls))
                states = self._random.fresh(len(calls))
                results: list[Any] = [None] * len(calls)
                micro_batches: list[Fiber] = []
                for passenger, state in zip(passengers, states, strict=True):
                    number = len(micro_batches)
                    run = self._checked(passenger, partial(results.__setitem__, number))
                    micro_batches.append(self._fiber(number, run, state))
                    self._fibers.append(micro_batches[-1])
                hooks = hooks_of(attributes.named, BACKWARD_TABLES)
                self._program = ProgramState(
                    self._model,
                    [(b.state, b.hooked.module) for b in self._blocks],
                    [*calls, *(hook for _, hook in hooks)],
                    proof,
                )
                self._go_forward(micro_batches, results)
                graded = [f for f, p in zip(micro_batches, passengers, strict=True) if p.is_graded]
                drawn = list(zip(graded or micro_batches, states, strict=False))
                self._random.end([(fiber.random, state) for fiber, state in drawn])
                for fiber in micro_batches:
                    left.update(fiber.attributes)
                attributes.refuse_left([(f.attributes, f.touched) for f in micro_batches])
                if not graded:
                    return results
                when_back()
                self._program.changed()
                self._go_backward(graded)
                if (names := self._program.changed()) and not proof.is_alone:
                    _refuse(names, "in a backward (by a hook)")
                proof.end()
                return results
        finally:
            for fiber in self._fibers:
                fiber.abandon()
            self._fibers.clear()
            attributes.keep(left)
            self._parts.inputs.clear()

    def _fiber(
        self, number: int, run: Callable[[], Any], state: list[Any], records: Records | None = None
    ) -> Fiber:
        now = self._attributes.now()
        return Fiber(number, run, self._parts.device, state, now, records=records)

    @property
    def is_in_loss(self) -> bool:
        """Whether a micro-batch's loss is running, outside of blocks."""
        return self._running is not None and not self._running.is_inside

    def beside(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """See `infinity.beside`. Called in the thread of a micro-batch."""
        parent, is_graded, results = self._running, torch.is_grad_enabled(), []
        assert parent is not None and not parent.is_inside

        def forward() -> None:
            with torch.set_grad_enabled(is_graded):
                results.append(call())

        def result() -> Any:
            if not results:
                parent.pause_at(fiber)
            return results[0]

        fiber = self._fiber(parent.number, forward, self._random.fresh(2)[1], parent.records)
        parent.records.graph.is_in_one_thread &= not is_graded
        # Before its parent, so that its results are there when the parent needs them.
        self._fibers.insert(self._fibers.index(parent), fiber)
        self._started.append(fiber)
        return result

    def _look_at_changes(self, fiber: Fiber, is_first: bool) -> None:
        """Refuses changes that other micro-batches, or a repeated forward, would see.

        The plain order has them, too, if the first micro-batch makes them before any other begins
        (`is_first`), and those that each makes behind its last block, in their order.
        """
        if fiber.at is _THROUGH:
            _refuse(self._program.changed(), "in a block, and is not of this block alone")
        elif fiber.at is None:
            _refuse(self._program.written_again(), "in the course of micro-batches")
        elif self._parts.proof.is_alone:
            self._program.changed()
        elif fiber.records.called:
            _refuse(self._program.changed(), "in a micro-batch, before the one before it has ended")
        else:
            names = self._program.own(fiber.number)
            if not is_first:
                _refuse(names, "in a micro-batch, before the one before it has ended")
            self._program.early.update(names)

    def _checked(self, passenger: Passenger, take: Callable[[Any], None]) -> Callable[[], Any]:
        """Returns what the fiber runs. `take` gets the result of a call without gradients."""

        def run() -> Any:
            with passenger.around(), torch.set_grad_enabled(passenger.is_graded):
                result = passenger.call()
            _refuse(self._program.of_threads(), "in the thread of a micro-batch")
            return result if passenger.is_graded else take(result)

        return run

    def _refuse_parts(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Refuses a backward in a loss that needs gradients of blocks. Their graphs are dropped."""
        fiber = self._running
        if fiber is None or fiber.is_inside:
            return
        if fiber.records.graph.leads_to_blocks(outputs, inputs):
            raise UnsupportedError(
                "a loss runs a backward of its own through blocks (torch.autograd.grad, backward), "
                "whose graphs are there after the loss only; accumulate micro-batches by several "
                "backward() calls instead"
            )

    @contextmanager
    def _blocks_suspended(self) -> Iterator[None]:
        """Makes the blocks stop their fibers, and suspends the blocks' own hooks."""
        with ExitStack() as stack:
            for block, hooks in zip(self._blocks, self._hooks, strict=True):
                block.changes = None
                stack.enter_context(hooks.suspended())
                stack.enter_context(_replaced(block, self._forward_of(block)))
            if (functorch := sys.modules.get("torch._functorch.config")) is not None:
                stack.enter_context(functorch.patch(donated_buffer=False))  # Nodes may run twice.
            if self._parts.tile_micro_batches > 1:
                stack.enter_context(self._uses.tiles_stop(self._yield_at_tile))
            experts = [experts for block in self._blocks for experts in block.experts]
            stack.enter_context(self._experts.installed(experts))
            yield

    # -- Forward -----------------------------------------------------------------------------------

    def _go_forward(self, micro_batches: list[Fiber], losses: list[Any]) -> None:
        """Runs all fibers to their end. Writes the loss of each to its number in `losses`."""
        for fiber in micro_batches:
            self._run_on(fiber, losses)
        while blocks := [s.at for s in self._fibers if isinstance(s.at, RunningBlock)]:
            # The block that a fiber reached first. Fibers that skip blocks wait for the others.
            block = min(blocks, key=lambda at: at.order)
            arrived = [fiber for fiber in self._fibers if fiber.at is block]
            with self._uses.using(block.hooked.units):
                for group in [arrived] if block.experts else self._groups(arrived):
                    self._run_by_tiles(group, losses)
            # Except for fibers that are at another block inside this one.
            self._run_by_tiles([fiber for fiber in arrived if fiber.at is _THROUGH], losses)

    def _run_by_tiles(self, fibers: Sequence[Fiber], losses: list[Any]) -> None:
        """Runs every fiber to its next stop that is no tile."""
        for fiber in fibers:
            self._run_on(fiber, losses)
        for stop, stopped in self._tile_stops(fibers):
            with self._uses.using(stop.units):
                waiting = [fiber for fiber in stopped if fiber in self._at_experts]
                self._experts.serve([self._at_experts.pop(fiber) for fiber in waiting])
                for fiber in stopped:
                    self._run_on(fiber, losses)

    def _groups(self, every: list[_T]) -> list[list[_T]]:
        """Divides the fibers into groups that may be inside a block at the same time."""
        count = self._parts.tile_micro_batches
        return [every[start : start + count] for start in range(0, len(every), count)]

    def _tile_stops(self, fibers: Sequence[Fiber]) -> Iterator[tuple[TileStop, list[Fiber]]]:
        """Yields each tile stop with the fibers at it, until no fiber is at a tile. The caller runs
        these fibers to their next stop."""
        while on_tile := [s.at for s in fibers if isinstance(s.at, TileStop)]:
            stop = min(on_tile)
            yield stop, [fiber for fiber in fibers if fiber.at == stop]

    def _yield_at_tile(self, units: list[int], is_over: bool) -> None:
        """Stops the running fiber at a tile inside a block, before its units are acquired, or
        behind tiles in a backward (`is_over`).

        The stop behind tiles ends when every fiber has delivered the tile's gradients. These leave
        memory before the block's own gradients arrive, because little memory has no space for both.
        """
        fiber = self._running
        if fiber is None or not fiber.is_inside:
            return
        key = tuple(units)
        order = self._tiles.setdefault(key, len(self._tiles))
        is_backward = current_backward() != OUTSIDE_BACKWARD
        if is_over:
            node = current_autograd_node()
            if fiber.behind_tiles is not node:  # Once for all tiles of a layer.
                fiber.behind_tiles = node
                fiber.pause_at(TileStop(True, 0.5 - order, ()))
        else:
            fiber.pause_at(TileStop(is_backward, -order if is_backward else order, key))

    def _stop_at_experts(self, call: ExpertsCall) -> None:
        """Stops the running fiber at a module of tiled experts, until its call is served."""
        fiber = self._running
        assert fiber is not None
        self._at_experts[fiber] = call
        order = self._tiles.setdefault(tuple(map(id, call.tiles)), len(self._tiles))
        fiber.pause_at(TileStop(False, order, ()))

    def _resume(self, fiber: Fiber) -> None:
        """Runs the fiber to its next stop or to its end."""
        UNINTERRUPTED.check()
        self._running = fiber
        self._attributes.set(fiber.attributes)
        self._attributes.touched = fiber.touched
        flags = process_flags()
        set_process_flags(fiber.flags)
        try:
            fiber.run_on()
        finally:
            fiber.attributes, fiber.flags = self._attributes.now(), process_flags()
            set_process_flags(flags)
            self._running = None

    def _run_on(self, fiber: Fiber, losses: list[Any]) -> None:
        records = fiber.records
        is_first = fiber is self._fibers[0] and not records.called
        with self._random_of(fiber):
            self._program.enter(fiber.number)
            self._resume(fiber)
            self._look_at_changes(fiber, is_first)
            at, loss = fiber.at, fiber.loss
            if isinstance(at, RunningBlock):
                if at.order < 0:
                    at.order = 1 + max(block.order for block in self._blocks)
            elif loss is not None:
                fiber.loss = None
                losses[fiber.number] = loss.detach()
                if loss.numel() == 1 and loss.requires_grad:
                    records.graph.put(get_gradient_edge(loss), torch.ones_like(loss))
                    records.graph.run(records.calls[-1] if records.calls else None)
                else:
                    loss.backward()  # Raises the error of a plain loop.
        while self._started:
            self._run_on(self._started.pop(0), losses)
        for waiting in [f for f in self._fibers if f.at is fiber] if at is None else ():
            self._run_on(waiting, losses)

    @contextmanager
    def _random_of(self, fiber: Fiber) -> Iterator[None]:
        """Draws from the fiber's random numbers."""
        with self._random.drawn_from(fiber.random):
            try:
                yield
            finally:
                fiber.random = self._random.state()

    def _forward_of(self, block: RunningBlock) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            fiber = self._running
            if fiber is None or fiber.is_repeat:
                raise UnsupportedError(
                    f"{block.hooked.name} is called in a backward (a hook that calls the model "
                    "again) or in another thread; accumulate micro-batches by several backward() "
                    "calls instead"
                )
            refuse_caches(block.hooked.name, args, kwargs)
            fiber.pause_at(block)
            output = self._runs.first(fiber, block, args, kwargs)
            fiber.pause_at(_THROUGH)
            return output

        if "torch._dynamo" not in sys.modules:
            return forward
        stops: Callable[..., Any] = torch.compiler.disable(forward)  # Compiled code stops, too.
        return stops

    # -- Backward ----------------------------------------------------------------------------------

    def _go_backward(self, fibers: list[Fiber]) -> None:
        while waiting := [fiber for fiber in fibers if fiber.records.calls]:
            block = max((s.records.calls[-1].block for s in waiting), key=lambda at: at.order)
            arrived = [fiber for fiber in waiting if fiber.records.calls[-1].block is block]
            for fiber in arrived:
                self._attributes.set(fiber.attributes)  # As the loss has left them.
                fiber.records.graph.run(fiber.records.calls[-1])
            calls = [(fiber, fiber.records.calls.pop()) for fiber in arrived]
            calls = [pair for pair in calls if any(g is not None for g in pair[1].gradients.sums)]
            if not calls:
                continue
            units = set(block.hooked.units)
            with self._uses.using(block.hooked.units):
                self._uses.begin_block_backward(block.hooked.units)
                units |= self._repeat_all(block, calls)
                # Restores the inputs of the next calls while the gradients leave.
                following = [fiber.records.calls[-1] for fiber in waiting if fiber.records.calls]
                for first in (next(call.inputs(), None) for call in following):
                    if first is not None:
                        self._parts.inputs.fetch(first.value)
            self._uses.end_of_block(list(units))
        for fiber in fibers:
            self._attributes.set(fiber.attributes)
            fiber.records.graph.run(None)

    def _repeat_all(self, block: RunningBlock, calls: list[tuple[Fiber, BlockCall]]) -> set[int]:
        """Repeats a block for all micro-batches. Returns units whose gradients are not written
        yet."""
        left: set[int] = set()

        def run(indexes: Sequence[int], work: Callable[[int], None]) -> None:
            if block.has_tiles and self._parts.tile_micro_batches > 1:
                left.update(self._repeat_by_tiles(calls, indexes, work))
            else:
                for index in indexes:
                    work(index)

        is_kept = len(calls) <= self._parts.tile_micro_batches
        probe = partial(self._runs.probe, calls, is_kept)
        suspended = [call.experts for _, call in calls]
        self._experts.go_backward(suspended, lambda indexes: run(indexes, probe))
        run(range(len(calls)), partial(self._runs.finish, calls))
        self._experts.end_block()
        return left

    def _repeat_by_tiles(
        self,
        calls: list[tuple[Fiber, BlockCall]],
        every: Sequence[int],
        work: Callable[[int], None],
    ) -> set[int]:
        """Runs `work` for some calls of a block with tiles, as fibers; each tile is acquired once
        for all fibers in the block. Returns the units of tiles whose gradients did not all arrive
        at one stop."""
        left: set[int] = set()
        for indexes in self._groups(list(every)):
            fibers = []
            try:
                for index in indexes:
                    call, run = calls[index][1], partial(work, index)
                    fiber = Fiber(
                        index, run, self._parts.device, call.random, call.attributes, is_repeat=True
                    )
                    fibers.append(fiber)
                for fiber in fibers:
                    with self._random_of(fiber):
                        self._resume(fiber)
                for stop, stopped in self._tile_stops(fibers):
                    # These are all micro-batches, so the gradients are complete after this stop.
                    is_complete = stop.is_backward and len(stopped) == len(calls)
                    units = list(stop.units)
                    with self._uses.using(units):
                        if is_complete:
                            self._uses.begin_block_backward(units)
                        for fiber in stopped:
                            with self._random_of(fiber):
                                self._resume(fiber)
                    if is_complete:
                        self._uses.end_of_block(units)
                    elif stop.is_backward:
                        left.update(units)
            finally:
                for fiber in fibers:
                    fiber.abandon()
        return left


def _refuse(names: Sequence[str], where: str) -> None:
    for name in names:
        raise UnsupportedError(
            f"{name} changes {where}. Micro-batches pass blocks together and forwards are "
            "repeated, so the changes would come in another order than in plain accumulation; "
            "accumulate micro-batches by several backward() calls instead"
        )


@contextmanager
def _replaced(block: RunningBlock, forward: Callable[..., Any]) -> Iterator[None]:
    module = block.hooked.module
    is_own = "forward" in module.__dict__
    module.forward = forward
    try:
        yield
    finally:
        if is_own:
            module.forward = block.forward
        else:
            del module.__dict__["forward"]
