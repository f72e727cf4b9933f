"""Merges an adapter of PEFT into its base, one tensor at a time.

The base's architecture is built without memory and PEFT puts the saved adapter on it, as in
training. For each tensor of the checkpoint that the adapter changes, the tensor is read (decoded,
if it is quantised), PEFT's own layer merges into it, and the result is written. Routed experts are
merged expert by expert, because PEFT's merge of packed experts makes the product of all of them at
once; the product of one expert is the same sum of `rank` terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
from infinity.checkpoint.huggingface.names import (
    PlacedSource,
    TensorGroup,
    export_groups,
    planned_targets,
)
from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.codecs import Plain
from infinity.config.schema.inputs import AdapterConfig
from infinity.errors import UnsupportedError
from infinity.integrations.server_layouts import (
    ADAPTER,
    Change,
    adapter_layers,
    base_on_meta,
    changes_of_tensors,
    factors_of,
    variant_of,
)
from infinity.modules.reading.configuration import auto_class, config_of_directory
from infinity.tools.convert.quantize import plain, without_quantisation
from infinity.tools.convert.rewrite import (
    DirectoryPlan,
    PlannedTensor,
    Values,
    as_numbers,
    as_stored,
    unchanged,
)
from infinity.tools.training.adapter import attach_adapter, num_labels_of
from infinity.tools.training.own_experts import changes_of

Stored = Literal["bf16", "keep"]
_TEMPLATE = "chat_template.jinja"


def plan_merge(
    base: Path, adapter: Path, *, to: Stored = "bf16", any_base: bool = False
) -> DirectoryPlan:
    """Plans the merged checkpoint from headers and the adapter. Reads no weight of the base.

    to: "bf16" writes quantised weights as numbers; "keep" encodes the changed ones again, with the
        codec that they have, and copies the others
    any_base: merge into a base of the same shapes over which the adapter was not trained

    Raises ConfigError for an adapter of another base; UnsupportedError for layers that PEFT merges
    in memory only, and for a change of one of two tied weights.
    """
    source, adapted, changes, groups = read_changes(
        base, adapter, any_base=any_base, is_merged=True
    )
    config = read_config(base)
    plan = DirectoryPlan.of(source, config if to == "keep" else without_quantisation(config))
    plan.others = tuple(adapter.glob(_TEMPLATE))  # The one that it was trained with.
    of_tensor: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        name: [partial(_merged, change=change) for change in some] for name, some in changes.items()
    }
    for name, replace in changes_of(adapter, source):
        of_tensor.setdefault(name, []).append(replace)
    wide = {name for name, some in changes.items() if any(change.is_wide for change in some)}
    outcomes = {
        name: _outcome(source, name, of_tensor.get(name, []), to, is_wide=name in wide)
        for name in source.names()
    }
    others = [group for group in groups if group.is_foreign and to == "bf16"]
    foreign = {name: group for group in others for name in group.source_names}
    for name, outcome in outcomes.items():
        shard, group = source.file_of(name).name, foreign.get(name)
        if group is None:
            plan.add(shard, name, outcome)
        elif name == group.source_names[0]:
            plan.add(shard, name, _as_exported(group, outcomes, adapted.get_base_model()))
    return plan


def read_changes(
    base: Path, adapter: Path, *, any_base: bool, is_merged: bool
) -> tuple[WeightSource, Any, dict[str, list[Change]], list[TensorGroup]]:
    """Returns the weights of a base, the model on meta with a saved adapter on it, what the adapter
    changes in each tensor of the checkpoint, by the tensor's name, and the groups of the import.
    Raises as `plan_merge`, for a change of one of two tied weights only where it `is_merged` into
    the base.
    """
    source = weight_source(base)  # First: what it refuses is the base that was named, not a key.
    config, kind = config_of_directory(base), None
    if (num_labels := num_labels_of(adapter)) is not None:
        where = str(base / "config.json")
        config.num_labels, kind = num_labels, auto_class(config, where, purpose="scores sequences")
    model, groups = base_on_meta(source, config, kind=kind)
    tied: dict[int, list[str]] = {}  # The names of each parameter.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    options = AdapterConfig.model_validate({"resume": adapter, "any_base": any_base})
    adapted = attach_adapter(model, [(options, 0)], source)
    layers = adapter_layers(adapted)
    for names in tied.values() if is_merged else ():
        if len(names) > 1:
            _refuse_tied(names, layers)
    changes = changes_of_tensors(adapted, layers, source, groups)
    for name, parts in changes.items() if is_merged else ():
        for change in parts:
            _refuse_variant(name, change)
    return source, adapted, changes, groups


def _outcome(
    source: WeightSource,
    name: str,
    changes: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    to: Stored,
    *,
    is_wide: bool,
) -> PlannedTensor:
    if not changes:
        return unchanged(source, name) if to == "keep" else plain(source, name)
    encoded = source.encoded(name)

    def merged() -> torch.Tensor:
        tensor = source.read(name)
        if is_wide:
            tensor = tensor.float()
        with torch.no_grad():
            for change in changes:
                tensor = change(tensor)
        return tensor

    if to == "keep" and not isinstance(encoded.codec, Plain):
        return as_stored(source, name, merged)
    dtype = torch.float32 if is_wide else source.stored_dtype(name)
    assert isinstance(dtype, torch.dtype), name
    return as_numbers(name, encoded.shape, dtype, merged)


def _as_exported(
    group: TensorGroup, parts: Mapping[str, PlannedTensor], model: Any
) -> PlannedTensor:
    """Returns experts in the layout of another writer under the names that transformers reads."""
    dtype = parts[group.source_names[0]].infos[0].dtype
    facts = {target: (shape, dtype) for target, shape in group.targets.items()}
    (exported,) = export_groups(model, facts)
    infos = [
        TensorInfo(name=name, dtype=dtype, shape=shape)
        for name, (shape, _) in planned_targets(exported, facts, model).items()
    ]

    def make() -> Values:
        made = group.convert(lambda name: parts[name].make()[name], model)
        return exported.convert(made.__getitem__, model)

    return PlannedTensor((*infos,), make)


# -- What an adapter changes -----------------------------------------------------------------------


def _refuse_variant(name: str, change: Change) -> None:
    """Raises UnsupportedError for a layer that PEFT merges never, or not into a part."""
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    layer, variant = change.layer, variant_of(change.layer)
    is_sum = isinstance(layer, (Linear, Embedding, torch.Tensor)) and not variant
    is_sum |= isinstance(layer, ParamWrapper) and layer.num_experts > 1
    if variant in _UNMERGED or not (is_sum or change.is_full):
        what, remedy = "be merged", "use the adapter with its base, by PEFT"
        if variant not in _UNMERGED:
            what = "be merged into a weight that the checkpoint stores in parts"
            remedy = "merge it in memory by merge_and_unload"
        raise UnsupportedError(
            f"{name!r}: PEFT's {variant or type(layer).__name__} cannot {what}; {remedy}"
        )


# Variants of LoRA by PEFT's names that have no merge.
_UNMERGED = ("ALoraLinearVariant", "ArrowLinearVariant", "QALoraLinearVariant")


def _refuse_tied(names: list[str], layers: dict[str, list[Any]]) -> None:
    """Raises UnsupportedError if the adapter changes a weight of several names under one of them
    only."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    changed = [name for name in names if name in layers]
    parts = [layer for name in changed for layer in layers.pop(name)]
    if changed == names and all(isinstance(part, TrainableTokensLayer) for part in parts):
        layers[names[0]] = parts[:1]  # PEFT ties these as the weights are tied.
    elif changed:
        remedy = (
            "Use the adapter with its base (PEFT), or train it over a base with "
            "tie_word_embeddings = false"
        )
        if all(isinstance(part, torch.Tensor) for part in parts):
            remedy = "Merge it in memory by merge_and_unload, which unties them"
        raise UnsupportedError(
            f"{changed[0]} is changed by the adapter and is one weight with "
            f"{', '.join(name for name in names if name != changed[0])} in the base: merged, it "
            f"would change both. {remedy}"
        )


# -- One tensor ------------------------------------------------------------------------------------


def _merged(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    from peft.tuners.lora.layer import ParamWrapper

    if isinstance(change.layer, torch.Tensor):
        return tensor.copy_(change.layer[change.placed.box].permute(change.placed.axes))
    if isinstance(change.layer, ParamWrapper) and change.layer.num_experts > 1:
        return _merged_experts(tensor, change)
    if change.is_full:
        shown = _as_parameter(tensor, change.placed).contiguous()
        return _merged_layer(shown, change.layer).permute(change.placed.axes)
    delta = _with_weight(change.layer, tensor, lambda layer: layer.get_delta_weight(ADAPTER))
    part = delta[change.placed.box].permute(change.placed.axes)
    return tensor.add_(part.to(tensor.dtype))


def _as_parameter(tensor: torch.Tensor, placed: PlacedSource) -> torch.Tensor:
    """Returns a view of a stored tensor in the layout of the parameter."""
    return tensor.permute(sorted(range(len(placed.axes)), key=placed.axes.__getitem__))


def _merged_layer(tensor: torch.Tensor, layer: Any) -> torch.Tensor:
    """Returns the weight as PEFT's own layer merges it."""

    def merge(layer: Any) -> torch.Tensor:
        layer.merge()
        layer.merged_adapters.clear()
        name = getattr(layer, "parameter_name", "weight")
        merged: torch.Tensor = layer.get_base_layer()._parameters[name].detach()
        return merged

    return _with_weight(layer, tensor, merge)


def _with_weight(
    layer: Any, tensor: torch.Tensor, use: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Calls `use` while the base of the layer has `tensor` as its weight."""
    base, name = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
    empty = base._parameters[name]
    base._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    try:
        return use(layer)
    finally:
        base._parameters[name] = empty


def _merged_experts(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """Adds B_e A_e of each expert that the tensor holds, computed as PEFT does, in the dtype of the
    adapter."""
    layer, (first, *box) = change.layer, change.placed.box
    shown = _as_parameter(tensor, change.placed)
    if isinstance(first, int):
        shown.add_(_expert_delta(layer, first)[tuple(box)].to(tensor.dtype))
        return tensor
    for row, expert in enumerate(range(first.start, first.stop)):
        shown[row].add_(_expert_delta(layer, expert)[tuple(box)].to(tensor.dtype))
    return tensor


def _expert_delta(layer: Any, expert: int) -> torch.Tensor:
    """Returns what an adapter adds to one expert, in the layout of the packed parameter."""
    down, up = factors_of(layer, expert)
    is_transposed = not layer._did_swap_in_out_features  # noqa: SLF001  PEFT has no other word.
    delta: torch.Tensor = torch.einsum("or,ri->io" if is_transposed else "or,ri->oi", up, down)
    return delta.mul_(layer.scaling[ADAPTER])
