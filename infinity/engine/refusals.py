"""Models that cannot be offloaded, and what their owner can do about it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.engine.registry import is_offloaded
from infinity.errors import ConfigError, UnsupportedError
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.originals import Follower
from infinity.modules.reading.adapters import (
    derived_buffers,
    refuse_values_to_come,
    refuse_without_values,
)
from infinity.modules.reading.empty_weights import Awaited


def refuse_model(model: nn.Module, *, has_weights: bool) -> None:
    """Raises ConfigError or UnsupportedError, and changes nothing (INV-10).

    `has_weights`: values of parameters and of persistent buffers come from files.
    """
    if is_offloaded(model):
        raise ConfigError(f"{type(model).__name__} is offloaded already")
    _refuse_compiled(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (Handle, Follower)):
            raise ConfigError(f"{name!r} belongs to a model that is offloaded already")
        if is_lazy(parameter):
            raise UnsupportedError(
                f"{name!r} has no shape yet: its module is lazy and was never run. Run a forward, "
                "or give the module its sizes, before infinity.offload"
            )
        if type(parameter.data) not in (torch.Tensor, Awaited):
            raise UnsupportedError(
                f"{name!r} is a {type(parameter.data).__name__}; expected a plain tensor. "
                "Offload the model before it is sharded or quantized by other means"
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"{name!r} has a gradient, which would be lost; finish the step, or "
                "model.zero_grad(), before infinity.offload"
            )
        if parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"{name!r} has a hook after the accumulation of its gradient, but the gradient "
                "leaves for its tier before that; remove the hook, or use register_hook"
            )
    refuse_without_values(model)
    refuse_values_to_come(model)
    derived = derived_buffers(model)
    for module_name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.sparse and module.weight.requires_grad
        ):
            raise UnsupportedError(
                f"the gradient of {module_name or type(module).__name__!r} would be sparse; "
                "expected a dense one. Build the embedding with sparse=False"
            )
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta or id(buffer) in derived:
                continue
            if not has_weights or name in module._non_persistent_buffers_set:
                raise ConfigError(
                    f"buffer {module_name}.{name} is on the meta device and no file has its value; "
                    "build the model under `with infinity.init_empty_weights(config):`, which "
                    "keeps buffers real; one that is computed from a weight, as spectral_norm "
                    "does, needs offload(weights=...), or a module that is built outside of it"
                )


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UnsupportedError(
                f"{name or type(module).__name__!r} was compiled by torch.jit, which keeps its "
                "parameters out of reach; expected the module that torch.jit.script or "
                "torch.jit.trace was given. Compiled functions may take weights as arguments"
            )
