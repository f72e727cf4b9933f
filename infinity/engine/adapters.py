"""What PEFT adds to a model: which parameters are an adapter's own, and the few whose first value
is made of the base weights.

PEFT is known by the shape of what it leaves behind, not imported. A tuner layer keeps the module
that it wraps as `base_layer` and names its own parts in `adapter_layer_names`; a module to save
keeps `original_module` and copies by adapter name; trainable tokens are a tuner layer called
`token_adapter` in one of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.awaited import is_to_come
from infinity.modules.handle import Handle

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

_DERIVED = ("lora_magnitude_vector", "trainable_tokens_delta", "trainable_tokens_original")


def adapter_modules(model: nn.Module) -> list[nn.Module]:
    """Every module that belongs to an adapter, with what is in it."""
    return [module for _, _, part in _parts(model) for module in part.modules()]


def refuse_without_values(model: nn.Module) -> None:
    """An adapter whose values were lost on meta is never drawn anew: it may have been trained."""
    for layer, name, part in _parts(model):
        if name in _DERIVED:
            continue
        for leaf, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_meta:
                raise ConfigError(
                    f"{layer}.{name}.{leaf} of an adapter has no value. Build the model under "
                    "`with infinity.init_empty_weights(config):`, not on torch's meta device, "
                    "and attach or load "
                    "the adapter after that block, where it keeps what PEFT gives it "
                    "(low_cpu_mem_usage=True only where a saved adapter is loaded)"
                )


def derived_buffers(model: nn.Module) -> set[int]:
    """Ids of the buffers that `derive` fills."""
    return {
        id(buffer)
        for _, name, part in _parts(model)
        if name in _DERIVED
        for buffer in part.buffers()
    }


def values_of_adapters(model: nn.Module) -> set[int]:
    """Ids of the adapters' parameters that are there, also where `infinity.init_empty_weights` saw
    them made."""
    return {
        id(parameter)
        for module in adapter_modules(model)
        for parameter in module._parameters.values()
        if parameter is not None and not parameter.is_meta
    }


def derived_parameters(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Parameters without a value that `derive` gives one: (tuner layer, adapter's name) by id."""
    layers = dict(model.named_modules())
    return {
        id(parameter): (layers[layer], leaf.partition(".")[0])
        for layer, name, part in _parts(model)
        if name in _DERIVED
        for leaf, parameter in part.named_parameters()
        if parameter.is_meta
    }


def derive(engine: Engine, wanted: dict[str, tuple[nn.Module, str]]) -> None:
    """PEFT's own first values of what it makes of base weights, now that these are there.

    `wanted` has the tuner layer and the adapter's name for each parameter.
    """
    with torch.no_grad():
        for name, (layer, adapter) in wanted.items():
            if hasattr(layer, "lora_magnitude_vector"):
                value = _magnitude(engine, layer, adapter)
            else:
                value = layer.weight[layer.token_indices[adapter]]  # type: ignore[index]
            engine.write_parameter(name, value.detach().cpu())
        tuner: Any
        for tuner in engine.model.modules():
            for adapter, rows in getattr(tuner, "trainable_tokens_original", {}).items():
                if rows.is_meta:
                    rows = tuner.weight[tuner.token_indices[adapter]].detach().clone()
                    tuner.trainable_tokens_original[adapter] = rows


def _magnitude(engine: Engine, layer: Any, adapter: str) -> torch.Tensor:
    """As PEFT makes it when it attaches: before adapters are cast, in the dtype of the weights."""
    names = {id(param.handle): param.name for param in engine.params}
    base = layer.get_base_layer()
    there = {"device": base.weight.device, "dtype": base.weight.dtype}
    if adapter in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    dora = layer.lora_magnitude_vector[adapter]
    fresh = type(dora)(fan_in_fan_out=dora.fan_in_fan_out)
    fresh.update_layer(
        base_layer=base,
        lora_A=engine.read_parameter(names[id(a)]).to(**there),
        lora_B=engine.read_parameter(names[id(b)]).to(**there),
        scaling=layer.scaling[adapter],
    )
    weight: torch.Tensor = fresh.weight
    return weight


def copied_parameters(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(copy, original) of each parameter of a module to save whose copy has no value of its own."""
    return [
        (copy, original)
        for wrapper in model.modules()
        if {"original_module", "modules_to_save"} <= wrapper._modules.keys()
        for saved in wrapper._modules["modules_to_save"].children()  # type: ignore[union-attr]
        for copy, original in zip(
            saved.parameters(),
            wrapper._modules["original_module"].parameters(),  # type: ignore[union-attr]
            strict=True,
        )
        if follows(copy, original)
    ]


def follows(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether the copy that PEFT made of a parameter gets the original's value: it has none of its
    own, loaded or trained."""
    if isinstance(copy, Handle) or is_to_come(copy):
        return True
    return not original.is_meta and torch.equal(copy.to(original.dtype), original)


def _parts(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(layer's name, part's name, part) of what is an adapter's own."""
    for name, module in model.named_modules():
        parts = module._modules
        if hasattr(module, "adapter_layer_names") and parts.get("base_layer") is not None:
            for part, child in parts.items():
                if child is not None and part != "base_layer":
                    yield name, part, child
        elif hasattr(module, "peft_config") and parts.get("prompt_encoder") is not None:
            yield name, "prompt_encoder", module.prompt_encoder
