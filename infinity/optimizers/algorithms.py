"""The optimizers: the signatures of torch, and one update rule each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn
from typing_extensions import Unpack, override

from infinity.errors import ConfigError
from infinity.modules.autograd.param import OffloadedParam
from infinity.ops.rules import AdamSettings, AdamWSettings, LionSettings, Settings, SGDSettings
from infinity.optimizers.offloaded import OffloadedOptimizer, Options, refuse_options
from infinity.state.tiles import name_of_tiled
from infinity.state.units import TensorSpec


class AdamW(OffloadedOptimizer):
    """`torch.optim.AdamW` for an offloaded model, with the bits of the fused implementation
    over fp32 parameters: those of 16 bits have fp32 masters, which torch lacks.

    `params` is the model, its parameters, or groups of them, as in any torch optimizer.
    Learning-rate schedulers work on `param_groups`. `amsgrad` is refused. `options`: see `Options`.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    """

    name: ClassVar[str] = "adamw"
    moments: ClassVar[frozenset[str]] = frozenset({"exp_avg", "exp_avg_sq"})
    rule: ClassVar[type[Settings]] = AdamWSettings

    @override
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        refuse_options(self, {"amsgrad": amsgrad})
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)


class Adam(AdamW):
    """`torch.optim.Adam` for an offloaded model, with the bits of the fused implementation.

    Weight decay is added to the gradient. Everything else is as in `infinity.AdamW`.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015.
    """

    name: ClassVar[str] = "adam"
    rule: ClassVar[type[Settings]] = AdamSettings

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        refuse_options(self, {"decoupled_weight_decay": decoupled_weight_decay})
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class SGD(OffloadedOptimizer):
    """`torch.optim.SGD` for an offloaded model, with the bits of the fused implementation.

    Set `optimizer.name = "sgd"` in the configuration of `infinity.offload`, and
    `optimizer.momentum` if there is a momentum. Without momentum there is no optimizer state.
    `options`: see `Options`.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    2013, in the form that torch.optim.SGD documents.
    """

    name: ClassVar[str] = "sgd"
    moments: ClassVar[frozenset[str]] = frozenset({"momentum_buffer"})
    rule: ClassVar[type[Settings]] = SGDSettings
    is_same_in_group: ClassVar[bool] = False  # A momentum begins with the first gradient.

    @override
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov,
        }  # fmt: skip
        # Parameters whose momentum has begun, which happens with the gradient of their first step.
        self._begun: set[TensorSpec] = set()
        super().__init__(params, defaults, **options)

    @classmethod
    @override
    def check_group(cls, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (not group["momentum"] > 0 or group["dampening"] != 0):
            raise ConfigError(
                "nesterov expects a momentum above 0 and no dampening, got momentum="
                f"{group['momentum']} and dampening={group['dampening']}"
            )

    @override
    def settings_of(self, group: dict[str, Any], param: OffloadedParam, step: int) -> Settings:
        # The rule begins the momentum at the first `step`. A momentum of 0 at that step begins
        # later.
        if group["momentum"]:
            step = max(step, 2) if param.spec in self._begun else 1
        return super().settings_of(group, param, step)

    def _note_step(self, settings: Mapping[TensorSpec, Settings]) -> None:
        self._begun.update(spec for spec, own in settings.items() if own.state_names)

    @override
    def state_names_of(self, param: OffloadedParam) -> list[str]:
        return ["momentum_buffer"] if param.spec in self._begun else []

    @override
    def named_state(self) -> dict[str, Any]:
        begun = [param.name for param in self._params.values() if param.spec in self._begun]
        return super().named_state() | {"begun": begun}

    @override
    def restore_named_state(self, state: dict[str, Any]) -> None:
        super().restore_named_state(state)
        begun = {name_of_tiled(name) for name in state["begun"]}
        params = self._params.values()
        self._begun = {param.spec for param in params if name_of_tiled(param.name) in begun}


class Lion(OffloadedOptimizer):
    """Lion for an offloaded model: steps of equal size along the sign of an interpolated momentum.

    torch has no Lion; `infinity.ops.rules` defines the arithmetic. Set `optimizer.name = "lion"` in
    the configuration of `infinity.offload`. `options`: see `Options`.

    Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023.
    """

    name: ClassVar[str] = "lion"
    moments: ClassVar[frozenset[str]] = frozenset({"exp_avg"})
    rule: ClassVar[type[Settings]] = LionSettings

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, **options)


OPTIMIZERS: dict[str, type[OffloadedOptimizer]] = {
    optimizer.name: optimizer for optimizer in (AdamW, Adam, SGD, Lion)
}
