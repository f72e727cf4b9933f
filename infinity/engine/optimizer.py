"""AdamW as users know it, over state that rests on tiers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from infinity.engine.engine import Engine
from infinity.engine.handles import Handle
from infinity.engine.interrupts import uninterrupted
from infinity.engine.registry import engine_of, owner_of
from infinity.engine.slot import Slot
from infinity.engine.tiling import tiles_of
from infinity.engine.update import StepRecord
from infinity.errors import ConfigError, NonFiniteError, UnsupportedError
from infinity.ops.adamw import AdamWSettings
from infinity.state.tiles import name_of_whole


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` for an offloaded model; the same bits as its fused implementation.

    `params` is the model, its parameters, or groups of them, as for any torch optimizer.
    Learning-rate schedulers work on `param_groups`. `max_grad_norm` clips the global 2-norm,
    exactly as `torch.nn.utils.clip_grad_norm_` before the step would; `grad_norm` then holds the
    norm of the last step (fp32 scalar), as it does with `always_norm`. `error_if_nonfinite` raises
    NonFiniteError before anything is changed.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    """

    # Accelerate leaves an optimizer alone that is prepared already.
    _is_accelerate_prepared = True
    step_was_skipped = False

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        always_norm: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        _check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        if isinstance(params, nn.Module):
            engine_of(params).reset()  # A forward that was interrupted may hold parameters still.
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self._slots: dict[int, Slot] = {}
        # By id of the handle: a parameter steps when it has a gradient.
        self._steps: dict[int, int] = {}
        self._engine: Engine | None = None
        self.max_grad_norm = max_grad_norm
        self.always_norm = always_norm
        self.error_if_nonfinite = error_if_nonfinite
        self.grad_norm: torch.Tensor | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        param_group["params"] = params = (
            [params] if isinstance(params, torch.Tensor) else list(params)
        )
        param_group["params"] = params = [tile for each in params for tile in tiles_of(each)]
        for key in ("amsgrad", "maximize", "capturable", "differentiable"):
            if param_group.get(key):
                raise UnsupportedError(f"infinity.AdamW has no {key!r}; leave it out")
        settings = {key: param_group.get(key, value) for key, value in self.defaults.items()}
        _check(**settings, max_grad_norm=self.max_grad_norm)
        for place, item in enumerate(params):
            name, parameter = item if isinstance(item, tuple) else (None, item)
            slot = self._find(parameter)  # Frozen ones never get a gradient.
            params[place] = slot.handle if name is None else (name, slot.handle)
            self._slots[id(slot.handle)] = slot
            slot.optimizer = weakref.ref(self)
        super().add_param_group(param_group)

    def _find(self, parameter: Any) -> Slot:
        engine = owner_of(parameter)
        if engine is None:
            raise ConfigError(
                f"expected parameters of an offloaded model, got {type(parameter).__name__}; "
                "build the optimizer after infinity.offload(model, config), and add adapters and "
                "heads before it"
            )
        if self._engine is not None and engine is not self._engine:
            raise ConfigError(
                "the parameters belong to two offloaded models; use one optimizer each"
            )
        self._engine = engine
        return engine.handle_operations.slot_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. Returns what the closure returned, if one was given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._engine is not None
        self._engine.begin_step()
        factor = self._clip()
        settings, steps = {}, {}
        for group in self.param_groups:
            for handle in group["params"]:
                slot = self._slots[id(handle)]
                if self._engine.has_gradient(slot):
                    self._refuse_successor(slot)
                    steps[id(handle)] = self._steps.get(id(handle), 0) + 1
                    settings[slot.spec] = _settings(group, steps[id(handle)])
        if settings:
            with uninterrupted():
                self._engine.step(StepRecord(settings, factor))
                self._steps.update(steps)  # A step that was refused has not been made.
        return loss

    def _refuse_successor(self, slot: Slot) -> None:
        if slot.optimizer is None or slot.optimizer() is not self:
            raise ConfigError(
                f"{slot.name!r} was given to another optimizer since; its moments rest in one "
                "place and start anew there. Use one optimizer for each parameter"
            )

    def _clip(self) -> torch.Tensor | None:
        """The factor gradients are multiplied by, after the norm was looked at."""
        self.grad_norm = None
        if self.max_grad_norm is None and not self.always_norm and not self.error_if_nonfinite:
            return None
        assert self._engine is not None
        mine = {id(slot) for slot in self._slots.values()}
        # In the model's order, like clip_grad_norm_(model.parameters()), whatever the groups are.
        ordered = [slot for slot in self._engine.slots if id(slot) in mine]
        norms = self._engine.gradient_norms(ordered)
        if not norms:
            self.grad_norm = torch.tensor(0.0)
            return None
        self.grad_norm = torch.linalg.vector_norm(torch.stack(list(norms.values())))
        if self.error_if_nonfinite and not torch.isfinite(self.grad_norm):
            culprits = [name for name, norm in norms.items() if not torch.isfinite(norm)]
            raise NonFiniteError(
                "the gradient norm",
                step=1 + max(self._steps.values(), default=0),
                unit=culprits[0] if culprits else None,
            )
        if self.max_grad_norm is None:
            return None
        return torch.clamp(self.max_grad_norm / (self.grad_norm + 1e-6), max=1.0)

    def clip_grad_norm_(self, max_norm: float | None) -> torch.Tensor:
        """Clips from the next step on, and returns the norm of the gradients as they are now.

        In the place of `torch.nn.utils.clip_grad_norm_` in loops that call it before every step.
        None, 0 and infinity clip nothing.
        """
        self.max_grad_norm = max_norm if max_norm and math.isfinite(max_norm) else None
        always_norm, self.always_norm = self.always_norm, True
        try:
            self._clip()
        finally:
            self.always_norm = always_norm
        assert self.grad_norm is not None
        return self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or with `set_to_none` false makes those that are there zero."""
        if self._engine is not None:
            self._engine.zero_gradients(self._slots.values(), set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Settings and step counts. Moments stay on their tiers; they are never put in a dict."""
        index = 0
        groups, steps = [], {}
        for group in self.param_groups:
            indexes = list(range(index, index + len(group["params"])))
            index += len(indexes)
            groups.append(
                {key: value for key, value in group.items() if key != "params"}
                | {"params": indexes}
            )
            for each, handle in zip(indexes, group["params"], strict=True):
                if id(handle) in self._steps:
                    steps[each] = {"step": self._steps[id(handle)]}
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes settings and step counts, as far as the moments on the tiers belong to them.

        Moments are not in the dict. Where it is of another step than they are, this is refused:
        continuing from it would not be the same run. `infinity.checkpoint.load` brings back both.
        """
        handles = [handle for group in self.param_groups for handle in group["params"]]
        saved, mine = state_dict["param_groups"], self.state_dict()
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ConfigError(
                f"expected groups of {[len(group['params']) for group in self.param_groups]} "
                f"parameters, got {sizes}"
            )
        steps = {index: int(entry["step"]) for index, entry in state_dict["state"].items()}
        if steps != {index: entry["step"] for index, entry in mine["state"].items()}:
            raise UnsupportedError(
                "optimizer.load_state_dict cannot bring back moments that rest on tiers, and the "
                "dict is of another step than they are; use infinity.checkpoint.load, which "
                "brings back both"
            )
        self._take_settings(saved)
        self._steps = {id(handles[index]): step for index, step in steps.items()}

    def named_state(self) -> dict[str, Any]:
        """Settings and step counts by parameter names: what a checkpoint keeps beside moments."""
        names = {key: slot.name for key, slot in self._slots.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [names[id(handle)] for handle in group["params"]]}
            for group in self.param_groups
        ]
        return {"groups": groups, "steps": {names[key]: step for key, step in self._steps.items()}}

    def check_named_state(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the groups of `state` are not this optimizer's."""
        saved = [group["params"] for group in state["groups"]]
        mine = [group["params"] for group in self.named_state()["groups"]]
        if saved != mine and list(map(_wholes, saved)) != list(map(_wholes, mine)):
            raise ConfigError(
                f"expected an optimizer with groups of {[len(names) for names in saved]} "
                f"parameters, got {[len(names) for names in mine]}, or the same numbers of "
                "other parameters: build it as it was built for the run that was saved"
            )

    def restore_named_state(self, state: dict[str, Any]) -> None:
        """Takes what `named_state` gave; the moments on the tiers are those of the same step. Tiles
        of one parameter step together, so one of another cut tells the count of all."""
        self.check_named_state(state)
        self._take_settings(state["groups"])
        steps = state["steps"]
        names = {slot.name: key for key, slot in self._slots.items()}
        if not set(steps) <= set(names):
            of_wholes = {name_of_whole(name): step for name, step in steps.items()}
            wholes = {name: name_of_whole(name) for name in names}
            steps = {n: of_wholes[whole] for n, whole in wholes.items() if whole in of_wholes}
        self._steps = {names[name]: step for name, step in steps.items()}
        self.grad_norm = None

    def _take_settings(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def _refuse_others(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer of another kind could change parameters one by one, and would keep its state
    outside of every budget."""
    if isinstance(optimizer, AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Handle):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} would keep its state of "
                    f"{parameter.name_in_model!r} outside of the tiers; train an offloaded model "
                    "with infinity.AdamW"
                )


register_optimizer_step_pre_hook(_refuse_others)


def _wholes(names: list[str]) -> list[str]:
    """Parameters as the user's model names them, each once."""
    return list(dict.fromkeys(map(name_of_whole, names)))


def _settings(group: dict[str, Any], step: int) -> AdamWSettings:
    beta1, beta2 = group["betas"]
    return AdamWSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
    )


def _check(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float | None,
) -> None:
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ConfigError(f"expected {lr=}, {eps=} and {weight_decay=} to be at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"expected two betas in [0, 1), got {betas}")
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ConfigError(f"expected max_grad_norm > 0 or None, got {max_grad_norm}")
