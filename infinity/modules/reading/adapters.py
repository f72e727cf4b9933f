"""Adapters of PEFT: the parameters of an adapter, and the first values that derive from base
weights.

PEFT is recognised by the structure that it leaves in a model, and is not imported. A tuner layer
keeps the module that it wraps as `base_layer`, and names its own parts in `adapter_layer_names`. A
module to save keeps `original_module`, and copies by adapter name. Trainable tokens are a tuner
layer called `token_adapter` in such a module.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.handles.handle import Handle
from infinity.modules.reading.empty_weights import is_to_come

SCORER = "scorer"  # The name of an adapter that scores what the trained one generates.
# Methods, and values of `init_lora_weights`, whose first values PEFT computes from the base.
_STARTS_FROM_BASE = ("CPT", "DELORA")
_LORA_STARTS_FROM_BASE = ("pissa", "olora", "mica", "eva", "corda", "loftq")
# Values for which PEFT takes out of the base what it gives the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_DERIVED = ("lora_magnitude_vector", "trainable_tokens_delta", "trainable_tokens_original")


def adapter_modules(model: nn.Module) -> list[nn.Module]:
    """Yields every module that belongs to an adapter, with its submodules."""
    return [module for _, _, part in _parts(model) for module in part.modules()]


def names_of_adapters(model: nn.Module) -> list[str]:
    """Returns the names of the adapters that PEFT has attached to a model."""
    configs = getattr(model, "peft_config", None)
    return list(configs) if isinstance(configs, dict) else []


def adapter_of(name: str, adapters: Container[str]) -> str:
    """Returns which of these adapters has the parameter of this name; "" for none."""
    return next((part for part in reversed(name.split(".")) if part in adapters), "")


def refuse_without_values(model: nn.Module) -> None:
    """Refuses an adapter whose values were lost on meta. It may have been trained, so its values
    are never drawn again."""
    for layer, name, part in _parts(model):
        if name in _DERIVED:
            continue
        for leaf, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.is_meta:
                raise ConfigError(
                    f"{layer}.{name}.{leaf} of an adapter has no value. Build the model under "
                    "`with infinity.init_empty_weights(config):`, not on torch's meta device, "
                    "and attach or load the adapter after that block, where it keeps what PEFT "
                    "gives it (low_cpu_mem_usage=True only where a saved adapter is loaded). A "
                    "method whose first values come from the base's weights (CPT, DeLoRA, PiSSA) "
                    "needs a base in memory, built outside of that block"
                )


def refuse_other_base(model: nn.Module, *, has_files: bool) -> None:
    """Refuses an adapter whose first values PEFT has made of weights that do not have theirs yet:
    small ones, which keep their constructor's values until `offload`. With `has_files` also one for
    which PEFT has changed the base in memory: the files have other values."""
    names = names_of_adapters(model)
    is_base_to_come = bool(names) and any(map(is_to_come, model.parameters()))
    for name in names:
        config: Any = model.peft_config[name]  # type: ignore[index]
        start = _start_from_base(model, name, config) if is_base_to_come else None
        if start is not None:
            raise ConfigError(
                f"adapter {name!r} takes its first values from the base's weights ({start}), which "
                "infinity.init_empty_weights leaves to offload; build the base in memory, outside "
                "of that block. `infinity merge` makes one model of a base and a saved adapter"
            )
        if has_files and has_changed_base(model, name):
            raise ConfigError(
                f"PEFT has changed the base's weights for adapter {name!r} (init_lora_weights = "
                f"{config.init_lora_weights!r}), and `weights` has those from before; leave "
                "`weights` out, which takes the weights in memory"
            )


def _start_from_base(model: Any, name: str, config: Any) -> str | None:
    """Returns the method, or the initialisation, that computes first values from the base."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    start = str(getattr(config, "init_lora_weights", "")).partition("_")[0].lower()
    words = getattr(config, "prompt_tuning_init", None)
    if start in _LORA_STARTS_FROM_BASE:
        return start
    if words in ("TEXT", "SAMPLE_VOCAB"):
        prompt = model.prompt_encoder[name].embedding.weight
        return f"{method}, {words}" if prompt._version == 0 else None  # Else it was loaded.
    return method if method in _STARTS_FROM_BASE else None


def changes_base(config: Any) -> bool:
    """Whether PEFT changes the base's weights where it attaches such an adapter."""
    return str(getattr(config, "init_lora_weights", "")).lower().startswith(_CHANGES_BASE)


def has_changed_base(model: Any, name: str) -> bool:
    """Whether PEFT has changed the base's weights in memory for an adapter: where B is zero it has
    taken nothing out of them, as for LoRA-GA without its gradients."""
    factors = (p for key, p in model.named_parameters() if f".lora_B.{name}." in key)
    return changes_base(model.peft_config[name]) and any(p.is_meta or p.any() for p in factors)


def derived_buffers(model: nn.Module) -> set[int]:
    """Returns the ids of the buffers that `derive` fills."""
    return {
        id(buffer)
        for _, name, part in _parts(model)
        if name in _DERIVED
        for buffer in part.buffers()
    }


def values_of_adapters(model: nn.Module) -> set[int]:
    """Returns the ids of the adapters' parameters that have values, also of those that were made
    under `infinity.init_empty_weights`."""
    return {
        id(parameter)
        for module in adapter_modules(model)
        for parameter in module._parameters.values()
        if parameter is not None and not parameter.is_meta
    }


def derived_parameters(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Returns (tuner layer, adapter name) by id, for the parameters whose first value `derive`
    makes."""
    layers = dict(model.named_modules())
    return {
        id(parameter): (layers[layer], leaf.partition(".")[0])
        for layer, name, part in _parts(model)
        if name in _DERIVED
        for leaf, parameter in part.named_parameters()
        if parameter.is_meta
        or _is_of_first_values(parameter, layers[layer], leaf.partition(".")[0])
    }


def rows_to_come(model: nn.Module) -> list[tuple[Any, str]]:
    """Returns (tuner layer, adapter name) for the trainable tokens whose original rows, to which
    an adapter that was merged returns, `derive` reads: those of a weight that waits for its
    value."""
    return [
        (layer, adapter)
        for layer in model.modules()
        for adapter, rows in getattr(layer, "trainable_tokens_original", {}).items()
        if rows.is_meta or is_to_come(layer.weight)  # type: ignore[arg-type]
    ]


def _is_of_first_values(parameter: torch.Tensor, layer: Any, adapter: str) -> bool:
    """Whether PEFT derived the parameter from the values that a constructor drew, which the base
    weight does not keep. A loaded or trained parameter has other values."""
    is_dora = hasattr(layer, "lora_magnitude_vector")
    weight = layer.get_base_layer().weight if is_dora else layer.weight
    if weight.is_meta or not is_to_come(weight):
        return False
    if is_dora:
        expected = _magnitude(layer, adapter, lambda tensor: tensor)
    else:
        expected = weight[layer.token_indices[adapter]]
    return torch.equal(parameter.detach().to(expected.dtype), expected.detach())


def derive(
    wanted: dict[str, tuple[nn.Module, str]], rows: list[tuple[Any, str]], *,
    read: Callable[[torch.Tensor], torch.Tensor], write: Callable[[str, torch.Tensor], None],
) -> None:  # fmt: skip
    """Computes PEFT's first values of the parameters that derive from base weights.

    `wanted` names the tuner layer and the adapter of each parameter, `rows` is `rows_to_come` of
    before the weights had their values. `read` returns the value of a
    handle, `write` replaces the value of a named parameter. The base weights must have their
    values.
    """
    with torch.no_grad():
        for name, (layer, adapter) in wanted.items():
            if hasattr(layer, "lora_magnitude_vector"):
                value = _magnitude(layer, adapter, read)
            else:
                value = layer.weight[layer.token_indices[adapter]]  # type: ignore[index]
            write(name, value.detach().cpu())
        for tuner, adapter in rows:
            original = tuner.weight[tuner.token_indices[adapter]].detach().clone()
            tuner.trainable_tokens_original[adapter] = original


def _magnitude(
    layer: Any, adapter: str, read: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Computes the magnitude as PEFT does when it attaches: in the dtype of the weights, before
    adapters are cast. `read` gives the value of a parameter of the adapter."""
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
        lora_A=read(a).to(**there),
        lora_B=read(b).to(**there),
        scaling=layer.scaling[adapter],
    )
    weight: torch.Tensor = fresh.weight
    return weight


def copied_parameters(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (copy, original) for every parameter of a module to save whose copy has no value."""
    return [
        (copy, original)
        for wrapper in model.modules()
        if {"original_module", "modules_to_save"} <= set(wrapper._modules.keys())
        for saved in wrapper._modules["modules_to_save"].children()  # type: ignore[union-attr]
        for copy, original in zip(
            saved.parameters(),
            wrapper._modules["original_module"].parameters(),  # type: ignore[union-attr]
            strict=True,
        )
        if follows(copy, original)
    ]


def follows(copy: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether PEFT's copy of a parameter gets the original's value, because it was neither loaded
    nor trained."""
    if isinstance(copy, Handle) or is_to_come(copy):
        return True
    return not original.is_meta and torch.equal(copy.to(original.dtype), original)


def _parts(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yields (name of the layer, name of the part, part) for the parts of adapters."""
    for name, module in model.named_modules():
        parts = module._modules
        if hasattr(module, "adapter_layer_names") and parts.get("base_layer") is not None:
            for part, child in parts.items():
                if child is not None and part != "base_layer":
                    yield name, part, child
        elif hasattr(module, "peft_config") and parts.get("prompt_encoder") is not None:
            yield name, "prompt_encoder", module.prompt_encoder
