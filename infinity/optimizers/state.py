"""`optimizer.state`: moments on their tiers, fetched on demand.

Plain PyTorch keeps a dict of tensors. An `OptimizerState` keeps nothing: each access fetches a copy
of the moment (fp32, on the host). A change of the copy would be lost and is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.modules.autograd.param import OffloadedParam
from infinity.private.torch import DisableTorchFunctionSubclass, tree_leaves, tree_map_only
from infinity.state.units import StateKind

_READ_ONLY = (
    "{} would change a fetched copy of optimizer.state and be lost; clone it to change it. "
    "infinity.checkpoint.load brings back moments, a new optimizer starts with zeros"
)


class FetchedMoment(torch.Tensor):
    """A copy of a moment at the time of the fetch. The copy and its views refuse in-place
    changes."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            fetched = [state for state in tree_leaves((args, kwargs)) if isinstance(state, cls)]
            before = [state._version for state in fetched]
            answer = function(*args, **kwargs)
            if before != [state._version for state in fetched]:
                raise UnsupportedError(
                    _READ_ONLY.format(getattr(function, "__name__", str(function)))
                )
            memory = {state.untyped_storage().data_ptr() for state in fetched}
            if hasattr(answer, "setflags"):  # A numpy array over the same memory.
                answer.setflags(write=False)

            def guarded(tensor: torch.Tensor) -> torch.Tensor:
                is_view = tensor.untyped_storage().data_ptr() in memory
                return tensor.as_subclass(cls if is_view else torch.Tensor)

            return tree_map_only(torch.Tensor, guarded, answer)


class _OfOptimizer:
    """Knows its `OffloadedOptimizer`, which imports this module."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer


class ParameterState(_OfOptimizer):
    """The optimizer's state of one parameter: `step`, and the moments under torch's names."""

    def __init__(self, optimizer: Any, params: list[OffloadedParam]) -> None:
        super().__init__(optimizer)
        self._params = params

    def keys(self) -> list[str]:
        """Returns the names of the state of a parameter, as torch.optim names it."""
        names: list[str] = self._owner().state_names_of(self._params[0])
        return names

    @torch.inference_mode(False)  # A copy that is made in it has no version.
    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.keys():
            raise KeyError(name)
        owner = self._owner()
        if name == "step":
            return torch.tensor(float(owner.step_of(self._params[0])), device="cpu")
        parts = [read_moment(owner.engine, param, StateKind(name)) for param in self._params]
        moment = parts[0] if len(parts) == 1 else torch.cat(parts)
        return moment.as_subclass(FetchedMoment)

    def get(self, name: str, default: Any = None) -> Any:
        """Reads one tensor of the state from its tier; `default` for an unknown name."""
        return self[name] if name in self.keys() else default

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor), each read from its tier when it is yielded."""
        return ((name, self[name]) for name in self.keys())

    def values(self) -> Iterator[torch.Tensor]:
        """Yields the tensors, each read from its tier when it is yielded."""
        return (value for _, value in self.items())

    def __setitem__(self, name: str, value: Any) -> None:
        raise UnsupportedError(_READ_ONLY.format(f"optimizer.state[p][{name!r}] = ..."))

    def __delitem__(self, name: str) -> None:
        raise UnsupportedError(_READ_ONLY.format(f"del optimizer.state[p][{name!r}]"))

    def __repr__(self) -> str:
        return f"<state of {self._params[0].name!r} on tiers: {', '.join(self.keys())}>"


class OptimizerState(_OfOptimizer):
    """`optimizer.state`: a mapping from every parameter with a step to its state. The type is not a
    dict, so that code that walks through dicts does not fetch the moments of a whole model."""

    def __getitem__(self, parameter: Any) -> ParameterState:
        params = self._owner().params_of(parameter)
        if not params:
            raise KeyError("not a parameter of this optimizer")
        return ParameterState(self._owner(), params)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Returns the state of a parameter; `default` if this optimizer has none."""
        params = self._owner().params_of(parameter)
        return ParameterState(self._owner(), params) if params else default

    def __contains__(self, parameter: Any) -> bool:
        owner = self._owner()
        params = owner.params_of(parameter)
        return bool(params) and bool(owner.state_names_of(params[0]))

    def __iter__(self) -> Iterator[Any]:
        groups = self._owner().param_groups
        return (parameter for group in groups for parameter in group["params"] if parameter in self)

    def keys(self) -> list[Any]:
        """Returns the parameters that have state."""
        return list(self)

    def values(self) -> Iterator[ParameterState]:
        """Yields the state of each parameter; no tensor is read."""
        return (self[parameter] for parameter in self)

    def items(self) -> Iterator[tuple[Any, ParameterState]]:
        """Yields (parameter, state); no tensor is read."""
        return ((parameter, self[parameter]) for parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, parameter: Any, value: Any) -> None:
        """Accepts a value that was read before, as code that moves optimizers between devices
        assigns it."""
        if not isinstance(value, ParameterState) or value._params != self[parameter]._params:
            raise UnsupportedError(_READ_ONLY.format("optimizer.state[p] = ..."))

    def __delitem__(self, parameter: Any) -> None:
        raise UnsupportedError(_READ_ONLY.format("del optimizer.state[p]"))

    def clear(self) -> None:
        """Raises UnsupportedError: the state changes by steps and by loading alone."""
        raise UnsupportedError(_READ_ONLY.format("optimizer.state.clear()"))

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters on tiers>"


def read_moment(engine: Engine, param: OffloadedParam, kind: StateKind) -> torch.Tensor:
    """Returns a copy on the host: fp32, in the shape and strides of the parameter.

    Over ranks any rank may call it by itself: the shards of the others are read from them. No shard
    changes meanwhile, because a step of another rank waits for this one (INV-18).
    """
    facts, numel = param.spec.facts, param.spec.numel
    flat = torch.empty(numel, device="cpu")
    with engine.at_rest("optimizer.state") as state:
        for part in state.parts(param.unit, kind, only=param.spec):
            if part.spec is param.spec:
                values = part.wide(kind)
                flat[part.start : part.start + values.numel()] = values
    return flat.as_strided(facts.shape, facts.stride)
