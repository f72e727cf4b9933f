"""Training loops of several adapters over one model, whose sweeps are one: see `infinity.together`.

Each loop runs in a fiber, and one runs at a time. A loop stops where it calls for a sweep. When all
have stopped or ended, their calls pass the blocks together, and each loop goes on with what it has
asked for. Between its stops a loop has generators, attributes of modules and flags of the process
for itself, so every number that it computes is the one of a run without the others.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.modules.accumulate.fiber import Fiber, Random
from infinity.modules.accumulate.layer_major import Passenger
from infinity.modules.accumulate.purity import is_own
from infinity.modules.autograd.threads import Modes, process_flags, set_process_flags
from infinity.modules.reading.adapters import adapter_of, names_of_adapters

T = TypeVar("T")
Sweep = Callable[[Sequence[Passenger]], list[Any]]

# What `train()`, `eval()` and PEFT write in modules.
_OF_LOOP = ("training", "active_adapter", "_active_adapter", "_disable_adapters")
_running: contextvars.ContextVar[Loop | None] = contextvars.ContextVar("running", default=None)


def loop_of(model: nn.Module) -> Loop | None:
    """Returns the loop over this model that runs in this thread, or None."""
    loop = _running.get()
    return loop if loop is not None and loop.model is model else None


class Loop:
    """A training loop of one adapter. It starts suspended."""

    def __init__(self, model: nn.Module, device: torch.device, call: Callable[[], Any]) -> None:
        self.model, self.adapter = model, ""
        self.result: Any = None
        # Asked for at the stop, with the places of their results.
        self.passengers: list[tuple[Passenger, Callable[[Any], None]]] = []
        self._device, self._call = device, call
        self._others: list[nn.Parameter] = []  # Of other adapters.
        self._found: list[bool] = []  # Whether they were trained when this loop went on.
        # With those that a program's own class lets itself be asked for.
        self._modules = [(module, is_own(type(module))) for module in model.modules()]
        self._generators = Random(device)
        self._random, self._attributes = self._generators.state(), self._now()
        # In a context of its own: a fiber refuses to leave values behind.
        self.fiber = Fiber(0, partial(contextvars.copy_context().run, self._run), device, [], {})

    def activate(self, adapter: str) -> None:
        """Makes this adapter the loop's own, without PEFT's change of `requires_grad`."""
        self.adapter, names = adapter, names_of_adapters(self.model)
        self._others = [
            parameter
            for name, parameter in self.model.named_parameters()
            if adapter_of(name, names) not in (adapter, "")
        ]
        for values in self._attributes:
            values |= {"active_adapter": adapter} if "active_adapter" in values else {}
            values |= {"_active_adapter": [adapter]} if "_active_adapter" in values else {}

    def _run(self) -> None:
        _running.set(self)
        self._generators.set(self._random)
        self._set(self._attributes)
        self._found = self._trained()
        try:
            self.result = self._call()
        finally:
            self._leave(self._found)

    def sweep(self, passengers: Sequence[Passenger]) -> list[Any]:
        """Stops until the sweep that these passengers share with other loops is over; returns their
        results. Called in the loop's thread."""
        if not passengers:
            return []
        modes, attributes = Modes.now(self._device), self._now()
        self._attributes = attributes
        found: list[Any] = [None] * len(passengers)
        states = self._generators.fresh(len(passengers))
        drawn = [[state, state] for state in states]  # The last and the first of each.
        self.passengers = [
            (
                passenger._replace(around=partial(self._around, modes, attributes, pair)),
                partial(found.__setitem__, number),
            )
            for number, (passenger, pair) in enumerate(zip(passengers, drawn, strict=True))
        ]
        self._leave(self._found)
        self.fiber.pause_at(self)
        set_process_flags(modes.flags)
        self._set(self._attributes)
        self._found = self._trained()
        graded = [pair for pair, p in zip(drawn, passengers, strict=True) if p.is_graded]
        self._generators.end([(last, first) for last, first in graded or drawn])
        return found

    @contextmanager
    def _around(
        self, modes: Modes, attributes: list[dict[str, Any]], drawn: list[list[Any]]
    ) -> Iterator[None]:
        """Runs a call as the loop itself would run it, in the thread of its micro-batch."""
        with modes.set():
            self._set(attributes)
            self._generators.set(drawn[1])
            trained = self._trained()
            yield
            self._leave(trained)
            drawn[0], self._attributes = self._generators.state(), self._now()

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._others]

    def _leave(self, trained: list[bool]) -> None:
        """Lets the parameters of other loops be trained as before: PEFT's `disable_adapter` freezes
        all, and then trains those of the active adapter."""
        for parameter, is_trained in zip(self._others, trained, strict=True):
            if parameter.requires_grad is not is_trained:
                parameter.requires_grad_(is_trained)

    def _now(self) -> list[dict[str, Any]]:
        """Returns the attributes of all modules that are the loop's."""
        tables = (module.__dict__ for module, _ in self._modules)
        return [{key: table[key] for key in _OF_LOOP if key in table} for table in tables]

    def _set(self, attributes: list[dict[str, Any]]) -> None:
        for (module, is_asked), values in zip(self._modules, attributes, strict=True):
            table = module.__dict__
            for key, value in values.items():
                if is_asked or table.get(key) != value:
                    setattr(module, key, value)  # So that a schedule notes it.


def run_together(
    model: nn.Module, device: torch.device, calls: Mapping[str, Callable[[], T]], sweep: Sweep
) -> dict[str, T]:
    """Runs `infinity.together`. `sweep` runs the passengers of all loops through the blocks."""
    _refuse(model, calls)
    flags, kept = process_flags(), Loop(model, device, lambda: None)
    loops = {name: Loop(model, device, call) for name, call in calls.items()}
    try:
        model.zero_grad = partial(_zero_grad, model)  # type: ignore[method-assign]
        for name, loop in loops.items():
            loop.activate(name)
        going = list(loops.values())
        while going:
            for loop in going:
                loop.fiber.run_on()
            going = [loop for loop in going if loop.fiber.at is not None]
            # Those with a backward come first.
            asked = [item for loop in going for item in loop.passengers]
            asked.sort(key=lambda item: not item[0].is_graded)
            results = sweep([passenger for passenger, _ in asked]) if asked else []
            for (_, put), result in zip(asked, results, strict=True):
                put(result)
        return {name: loop.result for name, loop in loops.items()}
    finally:
        for loop in loops.values():
            loop.fiber.abandon()
        vars(model).pop("zero_grad", None)
        set_process_flags(flags)
        kept.fiber.run_on()  # Leaves generators and attributes as they were.


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """Takes the place of `model.zero_grad`, which would drop gradients of other loops, too."""
    loop, names = loop_of(model), names_of_adapters(model)
    for name, parameter in model.named_parameters():
        if loop is None or adapter_of(name, names) == loop.adapter:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _refuse(model: nn.Module, calls: Mapping[str, Any]) -> None:
    if _running.get() is not None:
        raise InfinityError("infinity.together inside another one; give all loops to one call")
    names = names_of_adapters(model)
    for name in calls:
        if name not in names:
            raise ConfigError(
                f"infinity.together: the model has no adapter {name!r}; expected some of "
                f"{', '.join(names) or 'those that PEFT attaches (add_adapter)'}"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and adapter_of(name, names) not in calls:
            raise ConfigError(
                f"infinity.together: {name!r} is trained and belongs to none of the adapters "
                f"{', '.join(calls)}, so several loops would change it or none; freeze it by "
                "requires_grad_(False) before infinity.offload"
            )
