"""Fibers of micro-batches and of the calls beside them, with the records of their backward.

Note [Calls beside]
  A loss may call the model twice, for a policy and for its reference. In the fiber of the
  micro-batch the second call begins when the first one has ended, and each block is acquired once
  more. `infinity.beside` runs a call in a fiber of its own, which reaches a block together with the
  fiber of the micro-batch. Both share the records of the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from infinity.modules.accumulate.between import GraphBetween
from infinity.modules.accumulate.boundary import BlockCall
from infinity.modules.accumulate.fiber import Fiber
from infinity.modules.accumulate.module_state import Attributes


class MicroBatch(Fiber):
    """The fiber of one micro-batch, with the records that its backward needs."""

    def __init__(
        self,
        number: int,
        forward: Callable[[], torch.Tensor | None],
        device: torch.device,
        random: list[Any],
        attributes: Attributes,
    ) -> None:
        self.calls: list[BlockCall] = []  # Calls whose backward has not run yet.
        self.graph = GraphBetween()
        super().__init__(number, forward, device, random, attributes)

    @override
    def abandon(self) -> None:
        super().abandon()
        self.calls.clear()
        self.graph.clear()


class CallBeside(MicroBatch):
    """A call that runs beside the rest of its micro-batch's loss and shares its records."""

    def __init__(
        self,
        parent: MicroBatch,
        call: Callable[[], Any],
        device: torch.device,
        random: list[Any],
        attributes: Attributes,
    ) -> None:
        is_graded = torch.is_grad_enabled()
        self.parent = parent
        self.has_ended = False
        self._result: Any = None

        def forward() -> None:
            with torch.set_grad_enabled(is_graded):
                self._result = call()
            self.has_ended = True

        super().__init__(parent.number, forward, device, random, attributes)
        self.calls, self.graph = parent.calls, parent.graph
        self.graph.is_in_one_thread &= not is_graded

    def result(self) -> Any:
        """Returns what the call has returned. Called in the parent's thread, which may stop."""
        if not self.has_ended:
            self.parent.pause_at(self)
        assert self.has_ended
        return self._result
