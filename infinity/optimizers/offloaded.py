"""The common part of the optimizers, over state that rests on tiers."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypedDict

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Unpack, override

from infinity.engine.engine import Engine
from infinity.engine.registry import engine_of, owner_of
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.modules.autograd.param import OffloadedParam
from infinity.modules.handles.handle import Handle
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.modules.tiling.split import tiles_of
from infinity.ops.rules import Settings
from infinity.optimizers.clipping import Measured, clip_grad_norm_, measured
from infinity.optimizers.state import OptimizerState
from infinity.state.tiles import name_of_tiled
from infinity.state.units import TensorSpec, moments_of


class Options(TypedDict, total=False):
    """Options of every optimizer. `capturable`, `differentiable` and `maximize` are refused;
    `foreach` and `fused` are accepted and change nothing.

    max_grad_norm: clips the global 2-norm with the bits of `torch.nn.utils.clip_grad_norm_` before
        each step, unless a call of `clip_grad_norm_` has clipped gradients of the step. `grad_norm`
        is the norm of the last step before clipping (fp32 scalar)
    always_norm: computes `grad_norm` also without clipping
    error_if_nonfinite: raises NonFiniteError before anything changes
    skip_if_nonfinite: skips a step whose norm is not finite, as a GradScaler does.
        `step_was_skipped` is true until the next step
    """

    max_grad_norm: float | None
    always_norm: bool
    error_if_nonfinite: bool
    skip_if_nonfinite: bool
    maximize: bool
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


class OffloadedOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers; subclasses add the update rule."""

    name: ClassVar[str]  # The value of `[optimizer] name`.
    moments: ClassVar[frozenset[str]]  # All moments that the rule can keep of a parameter.
    rule: ClassVar[type[Settings]]  # Has the defaults of the optimizer, with beta1 and beta2.
    # Whether the settings of a step are the same for all parameters of a group.
    is_same_in_group: ClassVar[bool] = True
    # Accelerate does not wrap a prepared optimizer again.
    _is_accelerate_prepared = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        defaults: dict[str, Any],
        **options: Unpack[Options],
    ) -> None:
        for unknown in options.keys() - Options.__annotations__.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {unknown!r}")
        refuse_options(self, options)
        max_grad_norm = options.get("max_grad_norm")
        error_if_nonfinite = options.get("error_if_nonfinite", False)
        skip_if_nonfinite = options.get("skip_if_nonfinite", False)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"expected max_grad_norm > 0 or None, got {max_grad_norm}")
        if error_if_nonfinite and skip_if_nonfinite:
            raise ConfigError("expected one of error_if_nonfinite and skip_if_nonfinite, got both")
        self.check_group(defaults)
        self._params: dict[int, OffloadedParam] = {}
        # By id of the handle. A parameter makes a step if it has a gradient.
        self._steps: dict[int, int] = {}
        self._groups: dict[int, dict[str, Any]] = {}  # By id of the handle.
        # The last answer of `_in_groups`, and the ids of groups and handles that it was for.
        self._looked_up: tuple[list[list[int]], list[OffloadedParam]] = [], []
        self._engine: Engine | None = None
        self.max_grad_norm = max_grad_norm
        self.always_norm = options.get("always_norm", False)
        self.error_if_nonfinite = error_if_nonfinite
        self.skip_if_nonfinite = skip_if_nonfinite
        self.step_was_skipped = False
        self.grad_norm: torch.Tensor | None = None
        # Gradients of this step that are clipped, by their numbers; the norm of all gradients that
        # have these stamps, which no later step uses: its gradients may be those that were clipped.
        self._clipped: dict[TensorSpec, int] = {}
        self._measured: tuple[dict[TensorSpec, tuple[int, int]] | None, Measured] | None = None
        super().__init__(self._trainable(params), defaults)
        self.state = OptimizerState(self)  # type: ignore[assignment]
        self._own(self._params.values())

    @staticmethod
    def _trainable(params: nn.Module | Iterable[Any]) -> list[Any]:
        if not isinstance(params, nn.Module):
            found = list(params)
        else:
            engine_of(params).reset()  # Releases parameters of an interrupted forward.
            found = [parameter for parameter in params.parameters() if parameter.requires_grad]
        if not found:
            raise ConfigError(
                "expected parameters to train, got none: every parameter of the model is frozen, "
                "or the list is empty"
            )
        return found

    # -- The rule ------------------------------------------------------------------------

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        """Raises ConfigError for settings that the rule does not allow."""
        for key in ("lr", "momentum", "eps", "weight_decay"):
            if key in group:
                _check_number(key, group[key])
        if "betas" in group:
            if len(group["betas"]) != 2:
                raise ConfigError(f"expected two betas, got {group['betas']}")
            for beta in group["betas"]:
                _check_number("each of betas", beta, below=1.0)

    def settings_of(self, group: dict[str, Any], param: OffloadedParam, step: int) -> Settings:
        """Returns the settings of one step of one parameter. `step` counts from 1."""
        del param  # Those of SGD depend on it.
        numbers = {key: float(group[key]) for key in self.defaults if key != "betas"}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        rule: Any = self.rule
        return _settings(rule, step=step, **numbers)

    # -- Groups ----------------------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        param_group["params"] = params = (
            [params] if isinstance(params, torch.Tensor) else list(params)
        )
        param_group["params"] = params = [tile for param in params for tile in tiles_of(param)]
        refuse_options(self, param_group)
        group = {**self.defaults, **param_group}
        self.check_group(group)
        found: list[OffloadedParam] = []
        for place, item in enumerate(params):
            name, parameter = item if isinstance(item, tuple) else (None, item)
            param = self._find(parameter)  # A frozen parameter never gets a gradient.
            params[place] = param.handle if name is None else (name, param.handle)
            found.append(param)
        for param in found[:1]:
            self._check_moments(self.settings_of(group, param, step=1).state_names)
        super().add_param_group(param_group)
        for param in found:
            self._params[id(param.handle)] = param
            self._groups[id(param.handle)] = param_group
        if isinstance(self.state, OptimizerState):
            self._own(found)

    def _in_groups(self) -> list[OffloadedParam]:
        """Returns the parameters of `param_groups`, which a program may have changed itself."""
        # Objects that are looked up by their ids are kept, so no other object gets one of these.
        ids = [[id(group), *map(id, group["params"])] for group in self.param_groups]
        if ids != self._looked_up[0]:
            found: dict[int, OffloadedParam] = {}
            for group in self.param_groups:
                for handle in group["params"]:
                    found[id(handle)] = self._params.get(id(handle)) or self._find(handle)
                    self._groups[id(handle)] = group
            self._params.update(found)  # What was taken out keeps its state.
            self._looked_up = ids, list(found.values())
        return self._looked_up[1]

    def _own(self, params: Iterable[OffloadedParam]) -> None:
        """Takes parameters from the optimizers that had them, which keep them if this one is
        refused: nothing raises after this."""
        for param in params:
            param.optimizer = weakref.ref(self)

    def _check_moments(self, needed: Iterable[str]) -> None:
        """Raises ConfigError unless the model was offloaded with space for exactly the moments that
        the groups of this rule can use."""
        assert self._engine is not None
        config = self._engine.config
        reserved = {kind.value for kind in moments_of(config.optimizer, config.precision).kinds}
        if set(needed) <= reserved <= self.moments:
            return
        word = type(self).__name__
        kept = " and ".join(sorted(needed)) or "no moments"
        momentum = ", and optimizer.momentum as it is here" if self.name == "sgd" and needed else ""
        raise ConfigError(
            f"infinity.{word} keeps {kept} of a parameter, and the model was offloaded with space "
            f"for {' and '.join(sorted(reserved)) or 'none'}, by optimizer.name = "
            f'"{config.optimizer.name}"; set optimizer.name = "{self.name}"{momentum} in the '
            "configuration of infinity.offload"
        )

    def _find(self, parameter: Any) -> OffloadedParam:
        engine = owner_of(parameter)
        if engine is None:
            raise ConfigError(
                f"expected parameters of an offloaded model, got {type(parameter).__name__}; "
                "build the optimizer after infinity.offload(model, config), and attach adapters "
                "and new heads before that"
            )
        if self._engine is not None and engine is not self._engine:
            raise ConfigError(
                "the parameters belong to two offloaded models; use one optimizer each"
            )
        self._engine = engine
        return engine.handle_ops.param_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step. Returns the result of the closure, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.engine.is_closed:
            raise InfinityError(
                f"{type(self).__name__}.step(): the engine of this model is closed and its state "
                "is gone; make the steps before close()"
            )
        self._in_groups()
        self.engine.begin_step()
        self._clip()
        if self.step_was_skipped:
            return loss
        has_gradient = self.engine.gradients.has
        settings, steps = {}, {}
        for group in self.param_groups:
            made: dict[int, Settings] = {}  # By step.
            for handle in group["params"]:
                key = id(handle)
                param = self._params[key]
                if has_gradient(param.spec):
                    if param.optimizer is None or param.optimizer() is not self:
                        raise _other_optimizer(param)
                    step = steps[key] = self._steps.get(key, 0) + 1
                    if step not in made or not self.is_same_in_group:
                        made[step] = self.settings_of(group, param, step)
                    settings[param.spec] = made[step]
        if settings:
            self._check_moments(
                {name for setting in settings.values() for name in setting.state_names}
            )
            with UNINTERRUPTED:
                self.engine.step(settings)
                self._steps.update(steps)  # A refused step is not counted.
                self._note_step(settings)
        self._end_clipping()
        return loss

    def _end_clipping(self) -> None:
        """The next step clips anew, whatever it finds of these gradients."""
        self._clipped.clear()
        if self._measured is not None:
            self._measured = (None, self._measured[1])

    def _note_step(self, settings: Mapping[TensorSpec, Settings]) -> None:
        """Records a step with these settings."""

    @property
    def engine(self) -> Engine:
        """The engine of the model whose parameters this optimizer updates."""
        assert self._engine is not None, "there is no optimizer without a parameter"
        return self._engine

    def _clip(self) -> None:
        """Checks the norm of all gradients, and clips them unless a call has done so."""
        self.step_was_skipped = False
        looks = self.always_norm or self.error_if_nonfinite or self.skip_if_nonfinite
        if self.max_grad_norm is None and not looks and not self._clipped:
            self.grad_norm = None
            return
        stamps = self._stamps()
        max_norm = None if self._still_clipped(stamps) else self.max_grad_norm
        if max_norm is None and not looks:
            return
        if self._measured is not None and self._measured[0] == stamps:
            found = self._measured[1]
        else:
            found = measured(self._in_order())
        self.grad_norm = found.norm
        if self.skip_if_nonfinite and not torch.isfinite(found.norm):
            self.step_was_skipped = True
            self._end_clipping()
            return
        if self.error_if_nonfinite:
            found.check(self.next_step)
        if max_norm is not None:
            found.clip(max_norm)
        self.note_measured(found, is_clipped=max_norm is not None)

    @property
    def grad_norms(self) -> Sequence[torch.Tensor]:
        """The norms of the single gradients behind `grad_norm`, in the order of the model: fp32
        scalars on the host. Empty where none were computed, or not of all gradients at once."""
        return () if self._measured is None else self._measured[1].norms

    def _in_order(self) -> list[Handle]:
        """Returns the parameters in the order of the model, as a call with `model.parameters()`
        gives them, for any groups."""
        own = {id(param) for param in self._in_groups()}
        return [param.handle for param in self.engine.params if id(param) in own]

    def _stamps(self) -> dict[TensorSpec, tuple[int, int]]:
        """Returns the stamps of all gradients of this optimizer."""
        gradients = self.engine.gradients
        stamps = {param.spec: gradients.stamp(param.spec) for param in self._in_groups()}
        return {spec: stamp for spec, stamp in stamps.items() if stamp is not None}

    def _still_clipped(self, stamps: Mapping[TensorSpec, tuple[int, int]]) -> set[TensorSpec]:
        """Returns the gradients that a call has clipped and that are there with the same number."""
        return {s for s, number in self._clipped.items() if s in stamps and stamps[s][0] == number}

    @property
    def next_step(self) -> int:
        """The number of the next step, from 1."""
        return 1 + max(self._steps.values(), default=0)

    def note_measured(self, found: Measured, *, is_clipped: bool) -> None:
        """Gradients, some of which are of this optimizer, were measured, and then clipped if
        `is_clipped`."""
        self.grad_norm, stamps = found.norm, self._stamps()
        specs = {param.spec for param in found.params if isinstance(param, OffloadedParam)}
        if is_clipped:
            self._clipped |= {spec: stamps[spec][0] for spec in specs & stamps.keys()}
        is_of_all = specs == stamps.keys() and len(found.params) == len(specs)
        self._measured = (stamps, found) if is_of_all and found.norm_type == 2 else None

    def note_zeroed(self, spec: TensorSpec) -> None:
        """The gradient is zeros now, and keeps its number; what is added to it was not clipped."""
        self._clipped.pop(spec, None)

    def clip_grad_norm_(
        self,
        max_norm: float | None,
        *,
        parameters: torch.Tensor | Iterable[Any] | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool | None = None,
    ) -> torch.Tensor:
        """Clips the gradients of this optimizer, or of `parameters`, and returns their norm before
        that: see `clipping.clip_grad_norm_`. Gradients read clipped afterwards. None as `max_norm`
        clips nothing.

        The call is for the gradients of this step alone: `max_grad_norm` does not clip them again.
        """
        chosen = self._in_order() if parameters is None else parameters
        return clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    # -- State -----------------------------------------------------------------------------------

    def params_of(self, parameter: Any) -> list[OffloadedParam]:
        """Returns this optimizer's parameters for one parameter of the model, which may be
        tiled."""
        found = self.engine.params_of([parameter]) if owner_of(parameter) is self._engine else []
        return [param for param in found if id(param.handle) in self._params]

    def own_units(self) -> frozenset[int]:
        """Returns the units that this optimizer updates. Raises ConfigError for one that has other
        trained parameters as well."""
        own = frozenset(param.unit.index for param in self._params.values())
        for param in self.engine.params:
            is_others = param.handle.requires_grad and id(param.handle) not in self._params
            if is_others and param.unit.index in own:
                raise ConfigError(
                    f"{param.name!r} shares the unit {param.unit.name!r} with parameters of this "
                    "optimizer; expected an optimizer of all parameters of an adapter, and "
                    "adapters that are trained for all_state=False"
                )
        return own

    def next_settings(self, param: OffloadedParam) -> Settings:
        """Returns the settings that a step now would use for one parameter of this optimizer."""
        return self.settings_of(self._groups[id(param.handle)], param, self.step_of(param) + 1)

    def step_of(self, param: OffloadedParam) -> int:
        """Returns the number of updates of a parameter so far."""
        return self._steps.get(id(param.handle), 0)

    def state_names_of(self, param: OffloadedParam) -> list[str]:
        """Returns the names in `state` of a parameter, as in torch's optimizer after the same
        steps."""
        if not self.step_of(param):
            return []
        group = self._groups[id(param.handle)]
        return ["step", *self.settings_of(group, param, self.step_of(param)).state_names]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; with `set_to_none=False`, sets existing gradients to zero."""
        if self._engine is not None:
            self._engine.zero_gradients(self._in_groups(), set_to_none=set_to_none)

    @override
    def __getstate__(self) -> Any:
        raise UnsupportedError(
            f"infinity.{type(self).__name__} cannot be pickled or copied: its moments rest on "
            "tiers. Save optimizer.state_dict(), or all state by infinity.checkpoint.save"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns settings and step counts. Moments stay on their tiers and are never part of the
        dict."""
        index = 0
        groups, steps = [], {}
        for group in self.param_groups:
            indexes = list(range(index, index + len(group["params"])))
            index += len(indexes)
            groups.append(
                {key: value for key, value in group.items() if key != "params"}
                | {"params": indexes}
            )
            for number, handle in zip(indexes, group["params"], strict=True):
                if id(handle) in self._steps:
                    steps[number] = {"step": self._steps[id(handle)]}
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads settings and step counts, if they belong to the moments on the tiers.

        The dict has no moments. A dict of another step raises ConfigError, because training would
        not continue the same run. `infinity.checkpoint.load` restores settings and moments
        together.
        """
        handles = [handle for group in self.param_groups for handle in group["params"]]
        saved, own = state_dict["param_groups"], self.state_dict()
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ConfigError(
                f"expected groups of {[len(group['params']) for group in self.param_groups]} "
                f"parameters, got {sizes}"
            )
        self._check_settings(saved)
        steps = {index: int(entry["step"]) for index, entry in state_dict["state"].items()}
        if steps != {index: entry["step"] for index, entry in own["state"].items()}:
            raise UnsupportedError(
                "optimizer.load_state_dict cannot bring back moments that rest on tiers, and the "
                "dict is of another step than they are; use infinity.checkpoint.load, which "
                "brings back both"
            )
        self._take_settings(saved)
        self._steps = {id(handles[index]): step for index, step in steps.items()}

    def named_state(self) -> dict[str, Any]:
        """Returns settings and step counts by parameter name, for a checkpoint beside the
        moments."""
        names = {key: param.name for key, param in self._params.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [names[id(handle)] for handle in group["params"]]}
            for group in self.param_groups
        ]
        steps = {names[key]: step for key, step in self._steps.items()}
        state = {"name": self.name, "groups": groups, "steps": steps}
        if self._clipped:  # Gradients are saved, too.
            clipped = self._still_clipped(self._stamps())
            state["clipped"] = [p.name for p in self._params.values() if p.spec in clipped]
        return state

    def check_named_state(self, state: dict[str, Any]) -> None:
        """Raises ConfigError if `state` belongs to another rule or to other groups,
        UnsupportedError if it has options of torch that the rule lacks."""
        name = state.get("name", "adamw")
        if name != self.name:
            raise ConfigError(
                f'expected the state of "{self.name}", got that of "{name}"; continue with the '
                f'optimizer that the run was saved with, optimizer.name = "{name}"'
            )
        saved = [group["params"] for group in state["groups"]]
        own = [group["params"] for group in self.named_state()["groups"]]
        if saved != own and list(map(_tiled_names, saved)) != list(map(_tiled_names, own)):
            pairs = zip(chain.from_iterable(saved), chain.from_iterable(own), strict=False)
            other = next((f"; {a} there is {b} here" for a, b in pairs if a != b), "")
            raise ConfigError(
                f"expected an optimizer with groups of {[len(names) for names in saved]} "
                f"parameters, got {[len(names) for names in own]}{other}: build it as it was built "
                "for the run that was saved"
            )
        self._check_settings(state["groups"])

    def restore_named_state(self, state: dict[str, Any]) -> None:
        """Loads the result of `named_state`; moments and gradients on the tiers must be of the same
        step. All tiles of a parameter have one step count, so the tiles may have changed since."""
        self.check_named_state(state)
        self._take_settings(state["groups"])
        steps = state["steps"]
        names = {param.name: key for key, param in self._params.items()}
        if not set(steps) <= set(names):
            step_of = {name_of_tiled(name): step for name, step in steps.items()}
            tiled_names = {name: name_of_tiled(name) for name in names}
            steps = {n: step_of[tiled] for n, tiled in tiled_names.items() if tiled in step_of}
        self._steps = {names[name]: step for name, step in steps.items()}
        self.grad_norm = self._measured = None
        clipped, stamps = {name_of_tiled(name) for name in state.get("clipped", ())}, self._stamps()
        params = (p for p in self._params.values() if name_of_tiled(p.name) in clipped)
        self._clipped = {p.spec: stamps[p.spec][0] for p in params if p.spec in stamps}

    def _check_settings(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.param_groups, groups, strict=True):
            # These two change the use of torch's optimizer, not the numbers that it has saved.
            refuse_options(self, {**saved, "capturable": False, "differentiable": False})
            self.check_group({**group, **saved})

    def _take_settings(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


@functools.lru_cache(maxsize=64)  # Almost always the settings of the next parameter, too.
def _settings(rule: Any, **numbers: float) -> Settings:
    settings: Settings = rule(**numbers)
    return settings


def _refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimizer of another kind, which would change parameters one by one and keep state
    outside every budget."""
    if isinstance(optimizer, OffloadedOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            handle = tiles_of(parameter)[0]
            if isinstance(handle, Handle):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} would keep its state of "
                    f"{handle.name_in_model!r} outside of the tiers; train an offloaded model "
                    "with infinity.AdamW, Adam, SGD or Lion, and one under a Trainer after "
                    "infinity.integrations.hf.prepare_trainer(trainer)"
                )


register_optimizer_step_pre_hook(_refuse_others)


def _other_optimizer(param: OffloadedParam) -> ConfigError:
    return ConfigError(
        f"{param.name!r} was given to another optimizer since; its moments rest in one "
        "place and start anew there. Use one optimizer for each parameter"
    )


def _tiled_names(names: list[str]) -> list[str]:
    """Returns the parameters' names in the user's model, each once."""
    return list(dict.fromkeys(map(name_of_tiled, names)))


def refuse_options(optimizer: OffloadedOptimizer, options: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for missing options of torch's optimizers that would change the
    result or the use. `fused` and `foreach` only choose a kernel of torch and are accepted."""
    for key in ("amsgrad", "maximize", "capturable", "differentiable"):
        if options.get(key):
            word = type(optimizer).__name__
            raise UnsupportedError(f"infinity.{word} has no {key!r}; train without it")
    is_decoupled = optimizer.name == "adamw"  # torch's Adam has both rules.
    if options.get("decoupled_weight_decay", is_decoupled) != is_decoupled:
        rule = "Adam" if is_decoupled else "AdamW"
        raise ConfigError(
            f"expected decoupled_weight_decay={is_decoupled}; the other rule is infinity.{rule}"
        )


def _check_number(name: str, value: Any, *, below: float | None = None) -> None:
    """Raises ConfigError unless `value` is a finite number of at least 0 and less than `below`."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0 and (below is None or number < below)):
        most = "" if below is None else f" and below {below:g}"
        raise ConfigError(f"expected {name} to be a finite number of at least 0{most}, got {value}")
